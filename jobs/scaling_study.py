"""Run a scaling study: `python jobs/scaling_study.py RECIPE [key=value ...]`."""

from vit_ray.launch.command import run_job
from vit_ray.launch.study import run_study
from vit_ray.launch.study_table import describe_study, print_study

if __name__ == "__main__":
    run_job(
        "Pre-train and few-shot evaluate models by data sizes; finished cells are not repeated.",
        lambda recipe: print_study(run_study(recipe)),
        describe_study,
    )
