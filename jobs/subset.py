"""Take a nested part of a data set: `python jobs/subset.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.datasets import run_subset

if __name__ == "__main__":
    run_job("Take a nested part of a converted data set, by manifest alone.", run_subset)
