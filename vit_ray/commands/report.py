"""The report job: one page of a run, or of an experiment, from MLflow alone."""

from __future__ import annotations

from pathlib import Path

from vit_ray.config import Recipe
from vit_ray.experiments.page import write_page
from vit_ray.report.page import parts_of
from vit_ray.report.runs import require_store
from vit_ray.tracking.mlflow_client import reached_client
from vit_ray.tracking.past_runs import newest_run


def report(recipe: Recipe, *, whole_experiment: bool = False, keep_with: str | None = None) -> Path:
    """Report on the newest run of the recipe's name, or on its experiment if there is none.

    The page, its CSV and its figures are also kept as artifacts of that run.

    Args:
        whole_experiment: report on the experiment in any case.
        keep_with: id of the run to keep them with, instead.

    Raises:
        ValueError: MLflow has no such runs.
        RuntimeError: MLflow does not answer, or cannot be used.
    """
    require_store(recipe.tracking.uri)
    client = reached_client(recipe.tracking.uri)
    run_id = None if whole_experiment else newest_run(recipe.tracking, recipe.name)
    page = write_page(recipe, run_id)
    if keeper := keep_with or run_id:
        for path, folder in parts_of(page):
            place = f"experiment/{folder}" if whole_experiment else folder
            send = client.log_artifacts if path.is_dir() else client.log_artifact
            send(keeper, str(path), place.rstrip("/") or None)
    return page


def report_page(recipe: Recipe) -> int:
    """Write the page and say where it lies."""
    page = report(recipe)
    print(f"report: {page}\ntable:  {page.with_suffix('.csv')}")
    return 0
