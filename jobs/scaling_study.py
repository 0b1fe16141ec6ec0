"""Run a scaling study: `python jobs/scaling_study.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("scaling_study")
