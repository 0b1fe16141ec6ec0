"""Sweep fine-tuning learning rates: `python jobs/sweep.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("sweep")
