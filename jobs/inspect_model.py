"""Figures of a model: `python jobs/inspect_model.py RECIPE init_from=RUN inspect.images=FOLDER`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.inspect import inspect

if __name__ == "__main__":
    run_job(
        "Draw the patch filters, position similarity, attention distance and attention rollout of "
        "the weights in init_from over the images in inspect.images.",
        inspect,
    )
