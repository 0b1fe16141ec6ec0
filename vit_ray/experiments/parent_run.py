"""The record of a study or a sweep; its trainings are child runs."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from vit_ray.config import Recipe
from vit_ray.config.schema import errors_of
from vit_ray.experiments.trials import EndOnRequest, OpenParent
from vit_ray.launch.cluster_checks import check_cluster, check_shared, paths_of
from vit_ray.launch.connection import ClusterShape, connect
from vit_ray.launch.prepared_run import lock_run
from vit_ray.launch.resolved_run import ResolvedRun
from vit_ray.launch.run_record import OpenRun, open_record
from vit_ray.launch.terminal import shown_progress, stopping_on_signals
from vit_ray.ray_internals import start_data_actors
from vit_ray.storage import locate
from vit_ray.tracking.store_requests import redact_uri

if TYPE_CHECKING:
    from vit_ray.report.page import Written

FLUSH_S: Final = 20.0
"""Longest wait until MLflow has the metrics that the page shows."""

logger = logging.getLogger(__name__)


@contextmanager
def open_parent(
    recipe: Recipe,
    kind: str,
    resolved: ResolvedRun,
    total_steps: int,
    *,
    continues: bool = False,
    trainings: Sequence[Recipe] = (),
    under: OpenRun | None = None,
    tags: dict[str, str] | None = None,
    varied: Collection[str] = (),
) -> Iterator[OpenParent]:
    """Inside this block hold a parent run's folder, record it, and show its children's progress.

    Args:
        resolved: describes the run: the recipe's own training, or the first of a grid.
        total_steps: of all its children.
        continues: some of its children have begun at an earlier start, whose run it continues.
        trainings: all that may run under it; unset = like the recipe's own.
        under: the study that this run is part of, which has checked its files; it shows this run's
            progress, and forwards signals.
        tags: of the run, in addition to those that every run has.
        varied: as for `open_record`.

    Raises:
        ValueError: the cluster cannot hold the workers of a training, nodes do not see its files,
            or another process holds the folder; nothing was started.
    """
    cluster = connect(recipe, *trainings)
    if under is None:
        _check_trainings(recipe, trainings, cluster)
        read = {path: None for one in trainings or (recipe,) for path in paths_of(one)}
        check_shared(cluster, read)
        if not cluster.is_private:  # or they would end with the trial that needs them first
            start_data_actors()
    EndOnRequest.is_requested.clear()
    with (
        lock_run(locate(recipe.run_folder)),
        open_record(
            recipe,
            kind,
            resolved,
            cluster,
            under,
            continues=continues,
            tags=tags,
            varied=varied,
        ) as run,
        contextlib.nullcontext() if under else shown_progress(run.record, recipe.name, total_steps),
        contextlib.nullcontext() if under else stopping_on_signals(_stop_of(run)),
    ):
        yield OpenParent(recipe, run, cluster)


def page_of(parent: OpenParent) -> "Written | None":
    """Write the page at the end of a long job, and keep it with the parent run; None while MLflow
    is away: the job must not fail because of it, nor because of what draws the page.
    """
    recipe = parent.recipe
    try:
        if (run_id := parent.run_id) is None:
            return None
        # Here: the processes of trials import this module, and need neither MLflow nor charts.
        from vit_ray.experiments.write_page import keep_page, write_page
        from vit_ray.tracking.mlflow_client import asking

        parent.run.record.flush(FLUSH_S)
        with asking(recipe.tracking.uri) as client:
            written = write_page(recipe, run_id)
            keep_page(client, run_id, written)
        return written
    except Exception as error:
        reason = redact_uri(str(error), recipe.tracking.uri).partition("\n")[0]
        logger.warning("no report of %s: %s; `vit-ray report` can write it", recipe.name, reason)
        return None


def _stop_of(run: OpenRun) -> Callable[[str], None]:
    def stop(reason: str) -> None:
        run.record.request_stop(reason)
        EndOnRequest.is_requested.set()

    return stop


def _check_trainings(recipe: Recipe, trainings: Sequence[Recipe], cluster: ClusterShape) -> None:
    """Check that there is room for each training; errors name the keys that it changes."""
    for training in trainings or (recipe,):
        is_own = training.workers == recipe.workers
        with contextlib.nullcontext() if is_own else errors_of(training.name):
            check_cluster(training, cluster)
