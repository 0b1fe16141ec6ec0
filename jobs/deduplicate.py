"""Drop near-duplicates of evaluation sets: `python jobs/deduplicate.py RECIPE [key=value ...]`."""

from vit_ray.launch.command import run_job
from vit_ray.launch.data_care import run_deduplicate

if __name__ == "__main__":
    run_job("Leave out of a pre-training set what it shares with evaluation sets.", run_deduplicate)
