"""The record of a study or a sweep; its trainings are child runs."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from vit_ray.config import Recipe
from vit_ray.config.validation import errors_of
from vit_ray.experiments.runner import Flow, cluster_room, run_flow
from vit_ray.experiments.training import Outcome, Training
from vit_ray.launch.cluster.cluster_checks import check_cluster
from vit_ray.launch.cluster.connection import ClusterShape, connect, refuse_client
from vit_ray.launch.inputs.shared_files import check_shared, paths_of
from vit_ray.launch.inputs.streams import ResolvedRun
from vit_ray.launch.model_checks import Kind
from vit_ray.launch.pool.pool_keeper import keeper, kept_pools
from vit_ray.launch.pool.worker_pool import PoolShape
from vit_ray.launch.progress_display import shown_progress
from vit_ray.launch.record.open_record import OpenRun, open_record
from vit_ray.launch.run_lock import lock_run
from vit_ray.launch.stopping import stopping_on_signals
from vit_ray.outcomes import TrialState
from vit_ray.storage import locate
from vit_ray.tracking.metrics_log import MetricsLog, metrics_log_path
from vit_ray.tracking.past_runs import newest_run

T = TypeVar("T")


@dataclass(frozen=True)
class OpenParent:
    """An open parent run."""

    recipe: Recipe
    run: OpenRun
    run_id: str | None
    """Run id in MLflow; None if its server could not be reached."""
    node_id: str
    """Id of the driver's node."""
    cluster: ClusterShape

    def training(self, recipe: Recipe, kind: Kind, **of_its_own: Any) -> Training:
        """A training under it; other fields as in `Training`."""
        recipe = recipe.with_changes(tracking={"parent_run_id": self.run_id})
        return Training(recipe, kind, self.run.opening, self.node_id, **of_its_own)

    def note_end(self, training: Training, outcome: Outcome) -> None:
        """Count a training that has ended, for the display."""
        is_measured = outcome.state is TrialState.FINISHED
        self.run.control.child_ended(training.label, outcome.top1 if is_measured else None)

    def start_workers(self, first: Recipe | None, *, trains: bool = True) -> None:
        """Let workers start for the child that is trained first; None if all have ended.

        Args:
            trains: not only uses weights.
        """
        if first is not None:
            use_gpu = check_cluster(first, self.cluster)
            shape = PoolShape.of(first, self.cluster, use_gpu=use_gpu, trains=trains)
            # no limit: the result is not waited for
            keeper().start.remote(shape, self.cluster.is_private)

    def run_flow(
        self, flow: Flow[T], max_runs: int | None, max_gpus: int | None = None
    ) -> T | None:
        """What a flow under it returns; None if the run was asked to stop.

        Args:
            max_runs, max_gpus: in parallel; None: as many as the cluster has.
        """
        return run_flow(
            flow,
            room=lambda: cluster_room(max_runs, max_gpus),
            is_stopped=lambda: bool(self.run.control.stop_reason()),
            name=f"{self.recipe.name}-tune",
            storage_path=f"{self.recipe.output.rstrip('/')}/tune",
            is_private=self.cluster.is_private,
        )


def earlier_run(recipe: Recipe, kind: str) -> str | None:
    """The MLflow run of a parent's earlier start; None if it is new, or while MLflow is away.

    From the log in its folder, even if the folder was moved; without the log, which may be on
    another machine, by the folder's name.
    """
    return newest_run(
        recipe.tracking,
        recipe.name,
        kind,
        recipe.tracking.parent_run_id,
        folder=recipe.run_folder,
        noted_id=MetricsLog(metrics_log_path(recipe.run_folder)).read_sent().run_id,
    )


@contextmanager
def open_parent(
    recipe: Recipe,
    kind: str,
    resolved: ResolvedRun,
    total_steps: int,
    run_id: str | None = None,
    *,
    trainings: Sequence[Recipe] = (),
    trains: bool = True,
    under: OpenParent | None = None,
    tags: dict[str, str] | None = None,
    varied: Collection[str] = (),
) -> Iterator[OpenParent]:
    """Inside this block hold a parent run's folder, record it, and show its children's progress.

    Args:
        resolved: describes the run: the recipe's own training, or the first of a grid.
        total_steps: of all its children.
        run_id: the MLflow run to continue; None for a new one.
        trainings: all that may run under it; unset = like the recipe's own.
        trains: they do not only use weights.
        under: the study that this run is part of; it shows this run's progress, and forwards
            signals.
        tags: of the run, in addition to those that every run has.
        varied: as for `open_record`.

    Raises:
        ValueError: the cluster cannot hold the workers of a training, nodes do not see its files,
            or another process holds the folder; nothing was started.
    """
    cluster = connect(recipe, *trainings)
    refuse_client()
    _check_trainings(recipe, trainings, cluster)
    read = {path: None for one in trainings or (recipe,) for path in paths_of(one, trains=trains)}
    check_shared(cluster, read, ("output", recipe.output))
    with (
        lock_run(locate(recipe.run_folder)),
        open_record(
            recipe,
            kind,
            resolved,
            cluster,
            run_id=run_id,
            tags=tags,
            varied=varied,
            node_id=under.node_id if under else None,
            parent=under.run.opening if under else None,
        ) as run,
        shown_progress(run.control, recipe.name, total_steps, is_shown=under is None),
        contextlib.nullcontext() if under else stopping_on_signals(run.control.request_stop),
        kept_pools(),
    ):
        node_id = ray.get_runtime_context().get_node_id()
        yield OpenParent(recipe, run, run.record.run_id(), node_id, cluster)


def _check_trainings(recipe: Recipe, trainings: Sequence[Recipe], cluster: ClusterShape) -> None:
    """Check that there is room for each training; errors name the keys that it changes."""
    for training in trainings or (recipe,):
        is_own = training.workers == recipe.workers
        with contextlib.nullcontext() if is_own else errors_of(training.name):
            check_cluster(training, cluster)
