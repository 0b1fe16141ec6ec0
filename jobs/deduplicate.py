"""Drop near-duplicates of evaluation sets: `python jobs/deduplicate.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.datasets import run_deduplicate

if __name__ == "__main__":
    run_job("Leave out of a pre-training set what it shares with evaluation sets.", run_deduplicate)
