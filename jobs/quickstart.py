"""The whole main job on scikit-learn's digits: `python jobs/quickstart.py RECIPE`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.quickstart import run_quickstart

if __name__ == "__main__":
    run_job("Convert, pre-train, sweep and report on handwritten digits.", run_quickstart)
