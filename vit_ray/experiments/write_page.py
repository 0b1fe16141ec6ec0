"""The report page of a run and its child runs, next to its checkpoints."""

import logging
from pathlib import Path
from typing import Final

from vit_ray.addresses import absolute_uri
from vit_ray.config import Recipe
from vit_ray.report.page import Written, parts_of, write_report
from vit_ray.tracking.metrics_log import metrics_log_path
from vit_ray.tracking.mlflow_client import redact_uri
from vit_ray.tracking.recorder import Recorder

FLUSH_S: Final = 20.0
"""Longest wait until MLflow has the metrics that the page shows."""

logger = logging.getLogger(__name__)


def write_page(recipe: Recipe, run_id: str | None) -> Written:
    """The page of a run with its children, or of the whole experiment.

    Raises:
        ValueError: MLflow has no such runs.
    """
    selection = run_id or recipe.tracking.experiment
    uri = absolute_uri(recipe.tracking.uri)
    return write_report(
        uri,
        selection,
        metrics_log_path(recipe.run_folder).with_name("report.html"),
    )


def page_of(recipe: Recipe, run_id: str | None, record: Recorder) -> Path | None:
    """As `write_page` at the end of a long job, which must not fail because MLflow is away.

    The page and its figures are kept with the run of `record`.
    """
    if run_id is None:
        return None
    try:
        record.flush(FLUSH_S)
        page = write_page(recipe, run_id).page
        for path, folder in parts_of(page):
            record.artifact(path, folder)
        return page
    except Exception as error:
        reason = redact_uri(str(error), recipe.tracking.uri).partition("\n")[0]
        logger.warning("no report of run %s: %s; `vit-ray report` can write it", run_id, reason)
        return None
