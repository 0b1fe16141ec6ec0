"""Drop near-duplicates of evaluation sets: `python jobs/deduplicate.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("deduplicate")
