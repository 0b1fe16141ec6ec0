"""Measure accuracy of weights: `python jobs/evaluate.py RECIPE init_from=RUN [key=value ...]`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.train import evaluate

if __name__ == "__main__":
    run_job(
        "Accuracy on data.eval, and few-shot accuracy, of the weights in init_from.",
        evaluate,
    )
