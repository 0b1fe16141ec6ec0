"""The whole main job on scikit-learn's digits: `python jobs/quickstart.py RECIPE`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("quickstart")
