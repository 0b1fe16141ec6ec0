"""Check a converted data set: `python jobs/verify.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("verify")
