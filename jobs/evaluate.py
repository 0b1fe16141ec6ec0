"""Measure accuracy of weights: `python jobs/evaluate.py RECIPE init_from=RUN [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("evaluate")
