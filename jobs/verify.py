"""Check a converted data set: `python jobs/verify.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.datasets import run_verify

if __name__ == "__main__":
    run_job("Check a converted data set: files, checksums, and images that decode.", run_verify)
