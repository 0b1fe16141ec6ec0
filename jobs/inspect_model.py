"""Figures of a model: `python jobs/inspect_model.py RECIPE init_from=RUN inspect.images=FOLDER`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("inspect_model")
