"""Take a nested part of a data set: `python jobs/subset.py RECIPE [key=value ...]`."""

from vit_ray.launch.command import run_job
from vit_ray.launch.data_care import run_subset

if __name__ == "__main__":
    run_job("Take a nested part of a converted data set, by manifest alone.", run_subset)
