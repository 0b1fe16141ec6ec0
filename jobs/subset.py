"""Take a nested part of a data set: `python jobs/subset.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("subset")
