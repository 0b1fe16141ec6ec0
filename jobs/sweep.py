"""Sweep fine-tuning learning rates: `python jobs/sweep.py RECIPE [key=value ...]`."""

from vit_ray.launch.command import run_job
from vit_ray.launch.dry_run import describe_sweep
from vit_ray.launch.reports import print_sweep
from vit_ray.launch.sweep import run_sweep

if __name__ == "__main__":
    run_job(
        "Fine-tune over a grid of learning rates, choose on a dev split, retrain on all data.",
        lambda recipe: print_sweep(run_sweep(recipe)),
        describe_sweep,
    )
