"""The report page of a run and its child runs, next to its checkpoints."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from vit_ray.addresses import absolute_uri
from vit_ray.config import Recipe
from vit_ray.launch.record.run_host import RunRecord
from vit_ray.report.page import Written, parts_of, reload_s, write_report
from vit_ray.tracking.metrics_log import metrics_log_path
from vit_ray.tracking.mlflow_client import redact_uri

FLUSH_S: Final = 20.0
"""Longest wait until MLflow has the metrics that the page shows."""
FIRST_PAGE_S: Final = 60.0
"""A job that ends sooner gets its page only at the end."""
TIMES_ITS_COST: Final = 20
"""Time between two pages, as a multiple of what the last page took: 5 % of one core."""
END_S: Final = 300.0
"""Longest wait at the end of a job for a page that is being written."""

logger = logging.getLogger(__name__)


def write_page(recipe: Recipe, run_id: str | None, watch_s: float | None = None) -> Written:
    """The page of a run with its children, or of the whole experiment.

    Args:
        watch_s: as in `write_report`.

    Raises:
        ValueError: MLflow has no such runs.
    """
    selection = run_id or recipe.tracking.experiment
    uri = absolute_uri(recipe.tracking.uri)
    return write_report(
        uri,
        selection,
        _place_of_page(recipe),
        watch_s=watch_s,
        joins_commits=recipe.report.joins_commits,
        price_per_gpu_hour=recipe.plan.price_per_gpu_hour,
    )


def _place_of_page(recipe: Recipe) -> Path:
    return metrics_log_path(recipe.run_folder).with_name("report.html")


def page_of(recipe: Recipe, run_id: str | None, record: RunRecord) -> Path | None:
    """As `write_page` at the end of a long job, which must not fail because MLflow is away.

    The page, its table and its figures are kept with the run of `record`. It is final, and does not
    reload itself, although that run has not ended.
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
        _tell_of_none(recipe, run_id, error)
        return None


def _tell_of_none(recipe: Recipe, run_id: str, error: Exception) -> None:
    reason = redact_uri(str(error), recipe.tracking.uri).partition("\n")[0]
    logger.warning("no report of run %s for now; `vit-ray report` can write it: %s", run_id, reason)


@contextmanager
def page_meanwhile(recipe: Recipe, run_id: str | None) -> Iterator[Callable[[], None]]:
    """Inside this block the page of a long job is rewritten after each call of the yielded
    function.

    A thread writes it; only the end of the block waits for it, and its failures are only reported.
    Calls that come while a page is written, or within `TIMES_ITS_COST` after it, share the next
    page. A page that reloads itself (`report.watch_s`) continues to do so.
    """
    is_due, is_over = threading.Event(), threading.Event()

    def write() -> None:
        pause_s = FIRST_PAGE_S
        while run_id is not None and not is_over.wait(pause_s):
            is_due.wait()  # no limit: a thread; the study's end sets it
            if is_over.is_set():
                return
            is_due.clear()
            begun_s = time.monotonic()
            try:
                watch_s = recipe.report.watch_s or reload_s(_place_of_page(recipe))
                write_page(recipe, run_id, watch_s)
            except Exception as error:
                _tell_of_none(recipe, run_id, error)
            pause_s = TIMES_ITS_COST * (time.monotonic() - begun_s)

    writing = threading.Thread(target=write, name="page", daemon=True)
    writing.start()
    try:
        yield is_due.set
    finally:
        is_over.set()
        is_due.set()
        writing.join(END_S)  # or an older page would replace the last one
        if writing.is_alive():
            logger.warning(
                "a page of run %s is still being written after %g s and is not waited for any "
                "longer; if it replaces the last page, rewrite that with `vit-ray report`",
                run_id,
                END_S,
            )
