"""The file that runs a recipe on a cluster: `python jobs/manifest.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("manifest")
