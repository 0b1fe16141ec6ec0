"""The page of a run and its child runs, next to its checkpoints and with the run in MLflow."""

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Final

from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from vit_ray.addresses import absolute_uri, local_folder, sqlite_file
from vit_ray.config import Recipe
from vit_ray.report.page import Written, write_report
from vit_ray.tracking.metrics_log import metrics_log_path
from vit_ray.tracking.mlflow_api import MlflowClient
from vit_ray.tracking.mlflow_client import asking, page_hint
from vit_ray.tracking.recorder import Recorder
from vit_ray.tracking.safe_address import redact_uri

FLUSH_S: Final = 20.0
"""Longest wait until MLflow has the metrics that the page shows."""
DOTS_PER_INCH: Final = 150

logger = logging.getLogger(__name__)


def write_page(recipe: Recipe, run_id: str | None) -> Written:
    """The page of a run with its children, or of the whole experiment.

    Raises:
        ValueError: MLflow has no such runs.
    """
    selection = run_id or recipe.tracking.experiment
    uri = absolute_uri(recipe.tracking.uri)
    page = metrics_log_path(recipe.run_folder).with_name("report.html")
    opening = f"Recipe, events and files of each run are in MLflow: {page_hint(uri)}"
    return write_report(uri, selection, page, opening)


def keep_page(client: MlflowClient, run_id: str, written: Written, folder: str = "") -> None:
    """Keep a page with a run: the file, its figures as pictures, its tables for MLflow's pages."""
    client.log_artifact(run_id, str(written.page), folder or None)
    files = get_artifact_repository(str(client.get_run(run_id).info.artifact_uri))
    for caption, figure in written.figures.items():
        place = os.path.join(folder, "figures", f"{_file_name(caption)}.png")
        client.log_figure(run_id, figure, place, save_kwargs={"dpi": DOTS_PER_INCH})
    for caption, table in written.tables.items():
        place = os.path.join(folder, "tables", f"{_file_name(caption)}.json")
        with contextlib.suppress(Exception):  # there is none yet, or the store cannot delete
            files.delete_artifacts(place)  # type: ignore[no-untyped-call]  # log_table would append its rows
        client.log_table(run_id, table.reset_index(), place)


def _file_name(caption: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", re.split("[?:;,]", caption.lower())[0]).strip("_")


def page_of(recipe: Recipe, run_id: str | None, record: Recorder) -> Written | None:
    """As `write_page` at the end of a long job, which must not fail because MLflow is away.

    The page, its figures and its tables are kept with the run of `record`.
    """
    if run_id is None:
        return None
    try:
        record.flush(FLUSH_S)
        written = write_page(recipe, run_id)
        with asking(recipe.tracking.uri) as client:
            keep_page(client, run_id, written)
        return written
    except Exception as error:
        reason = redact_uri(str(error), recipe.tracking.uri).partition("\n")[0]
        logger.warning("no report of run %s: %s; `vit-ray report` can write it", run_id, reason)
        return None


def are_own_files(uri: str, artifact_uri: str) -> bool:
    """Whether a run's files may be written: those of a server, or below `mlruns` next to the SQLite
    file. Others, also on S3, may be those of another store, of which this one is a copy.

    The store, its folder and `mlruns` may be symbolic links. A copy in the folder of its original
    shares the files.
    """
    store, folder = sqlite_file(uri), local_folder(artifact_uri)
    if store is None:
        return True
    if folder is None:
        return False
    typed = Path(os.path.abspath(store)).parent
    homes = {one / "mlruns" for one in (typed, typed.resolve(), store.resolve().parent)}
    addresses = Path(os.path.abspath(folder)), folder.resolve()
    return any(address.is_relative_to(home) for address in addresses for home in homes)
