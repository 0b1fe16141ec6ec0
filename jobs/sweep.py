"""Sweep fine-tuning learning rates: `python jobs/sweep.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.dry_run import describe_sweep
from vit_ray.commands.experiments import sweep

if __name__ == "__main__":
    run_job(
        "Fine-tune over a grid of learning rates, choose on a dev split, retrain on all data.",
        sweep,
        describe_sweep,
    )
