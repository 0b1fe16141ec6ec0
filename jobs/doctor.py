"""Check what a recipe's job needs: `python jobs/doctor.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("doctor")
