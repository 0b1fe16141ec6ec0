"""The page of a run and its child runs, next to its checkpoints and with the run in MLflow."""

import contextlib
import re
from typing import Final

from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from vit_ray.addresses import absolute_uri
from vit_ray.config import Recipe
from vit_ray.report.page import Written, write_report
from vit_ray.tracking.metrics_log import metrics_log_path
from vit_ray.tracking.mlflow_client import MlflowClient, page_hint

DOTS_PER_INCH: Final = 150


def write_page(recipe: Recipe, run_id: str | None) -> Written:
    """The page of a run with its children; without `run_id`, of the experiment.

    Raises:
        ValueError: MLflow has no such runs.
    """
    uri = absolute_uri(recipe.tracking.uri)
    page = metrics_log_path(recipe.run_folder).with_name("report.html")
    opening = f"Recipe, events and files of each run are in MLflow: {page_hint(uri)}"
    return write_report(uri, run_id or recipe.tracking.experiment, page, opening)


def keep_page(client: MlflowClient, run_id: str, written: Written) -> None:
    """Store a page with a run in MLflow: the file, the figures as PNG, the tables as JSON."""
    client.log_artifact(run_id, str(written.page))
    uri = str(client.get_run(run_id).info.artifact_uri)
    artifacts = get_artifact_repository(uri, client.tracking_uri)
    for caption, figure in written.figures.items():
        path = f"figures/{_file_name(caption)}.png"
        client.log_figure(run_id, figure, path, save_kwargs={"dpi": DOTS_PER_INCH})
    for caption, table in written.tables.items():
        path = f"tables/{_file_name(caption)}.json"
        # `log_table` would append rows to an earlier table.
        with contextlib.suppress(Exception):  # there is none yet, or the store cannot delete
            artifacts.delete_artifacts(path)  # type: ignore[no-untyped-call]
        client.log_table(run_id, table.reset_index(), path)


def _file_name(caption: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", re.split("[?:;,]( |$)", caption.lower())[0]).strip("_")
