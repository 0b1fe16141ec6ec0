"""What a training costs before it starts: `python jobs/plan.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("plan")
