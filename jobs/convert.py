"""Convert images to sharded parquet: `python jobs/convert.py RECIPE [key=value ...]`."""

from vit_ray.launch.command import run_job
from vit_ray.launch.conversion import run_convert

if __name__ == "__main__":
    run_job("Convert a source of images to a sharded parquet data set.", run_convert)
