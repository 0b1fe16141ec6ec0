"""The report page of a run and of what is recorded under it: written beside its checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path

from vit_ray.config import Recipe
from vit_ray.launch.mlflow_store import absolute_uri, open_client, scrubbed
from vit_ray.launch.past_runs import newest_run
from vit_ray.launch.preflight import spool_path
from vit_ray.report.page import build_report
from vit_ray.report.runs import require_store

logger = logging.getLogger(__name__)


def write_page(recipe: Recipe, run_id: str | None) -> Path:
    """The page of a run with its children, or of the whole experiment; returns its path.

    Raises:
        ValueError: MLflow has no such runs.
    """
    selection = run_id or recipe.tracking.experiment
    target = spool_path(recipe).with_name("report.html")
    return build_report(absolute_uri(recipe.tracking.uri), selection, target)


def page_of(recipe: Recipe, run_id: str | None) -> Path | None:
    """As `write_page` at the end of a long job, which must not fail because MLflow is away."""
    if run_id is None:
        return None
    try:
        return write_page(recipe, run_id)
    except Exception as error:
        reason = scrubbed(str(error), recipe.tracking.uri).partition("\n")[0]
        logger.warning("no report of run %s for now; jobs/report.py makes it: %s", run_id, reason)
        return None


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


def print_page(page: Path) -> int:
    """Say where the page lies."""
    print(f"report: {page}\ntable:  {page.with_suffix('.csv')}")
    return 0
