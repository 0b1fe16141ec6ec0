"""Convert images to sharded parquet: `python jobs/convert.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.convert import run_convert

if __name__ == "__main__":
    run_job("Convert a source of images to a sharded parquet data set.", run_convert)
