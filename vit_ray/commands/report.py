"""The report job: one page of a run, or of an experiment, from MLflow alone."""

from __future__ import annotations

from pathlib import Path

from vit_ray.config import Recipe
from vit_ray.experiments.page import write_page
from vit_ray.report.runs import require_store
from vit_ray.tracking.mlflow_client import open_client
from vit_ray.tracking.past_runs import newest_run


def report(recipe: Recipe) -> Path:
    """Report on the newest run of the recipe's name, or on its experiment if there is none.

    The page and its CSV are also kept as artifacts of that run.

    Raises:
        ValueError: MLflow has no such runs.
    """
    require_store(recipe.tracking.uri)
    run_id = newest_run(recipe.tracking, recipe.name)
    page = write_page(recipe, run_id)
    if run_id is not None:
        client = open_client(recipe.tracking.uri)
        for path in (page, page.with_suffix(".csv")):
            client.log_artifact(run_id, str(path))
    return page


def report_page(recipe: Recipe) -> int:
    """Write the page and say where it lies."""
    page = report(recipe)
    print(f"report: {page}\ntable:  {page.with_suffix('.csv')}")
    return 0
