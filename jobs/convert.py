"""Convert images to sharded parquet: `python jobs/convert.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("convert")
