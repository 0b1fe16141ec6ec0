"""Report on a run of any job: `python jobs/report.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.report import print_page, report

if __name__ == "__main__":
    run_job(
        "One HTML page of tables and figures of the recipe's run or experiment, from MLflow.",
        lambda recipe: print_page(report(recipe)),
    )
