"""Run a scaling study: `python jobs/scaling_study.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.experiments import study
from vit_ray.commands.study_tables import describe_study

if __name__ == "__main__":
    run_job(
        "Pre-train and few-shot evaluate models by data sizes; finished cells are not repeated.",
        study,
        describe_study,
    )
