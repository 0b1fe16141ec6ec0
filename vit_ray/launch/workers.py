"""A run's worker groups, one `fit()` of Ray Train after another.

Ray Train starts a group and notices its end. This module decides whether a failure counts, and the
size and the nodes of the next group.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Final

import fsspec
import ray
import ray.train
from pyarrow.fs import FSSpecHandler, PyFileSystem

# The classes that `ray.train` has at run time; type checkers see those of its version 1 there.
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig

from vit_ray.addresses import redact
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config import Recipe
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.stream_server import StreamSource
from vit_ray.launch.connection import ClusterShape, has_dashboard, variables
from vit_ray.launch.failures import FailingNodes, cause, counts, failing_node, micro_batch_limit
from vit_ray.launch.placement import STRATEGY, Place, PlaceFinder, give_back
from vit_ray.outcomes import EventKind, RunFailedError, RunStoppedError
from vit_ray.ray_internals import get_or_create_autoscaling_coordinator, start_data_actors
from vit_ray.storage import locate
from vit_ray.tracking.metrics_log import ARRIVAL_S
from vit_ray.tracking.recorder import RunStatus
from vit_ray.worker.entry import GroupConfig, work
from vit_ray.worker.job import TrainJob

# Ray Train's limit for the workers' start; after it, the driver waits for resources again.
_START_TIMEOUT_S: Final = 20.0
# Longest time without a heartbeat of any worker, from the start of its group; Ray has no limit.
SILENT_S: Final = 600.0
# How long `fit()` may take to return after its workers have ended, or are silent
RETURN_S: Final = 60.0
# Interval of the checks while `fit()` runs: whether the run has ended, and room for a larger group
LOOK_EVERY_S = 30.0
# Errors of a recorder or a storage that does not answer: the workers train without it.
_UNAVAILABLE: Final = (ray.exceptions.RayError, RuntimeError, OSError)
# Of a collective operation; also the time limit of the rendezvous.
_MIN_TIMEOUT_S: Final = 120.0
# Ray Train's controller polls every rank: 1.4 ms of its CPU each.
_RANKS_PER_POLL_S: Final = 128


def run_workers(
    job: TrainJob, streams: dict[str, StreamSpec], cluster: ClusterShape, *, use_gpu: bool
) -> None:
    """Train until the run ends, through failures and changes of the group's size.

    A stop before the group is placed ends the training with the event `stopped`, the same as
    workers send after their last checkpoint.

    Args:
        streams: what the workers read, by name, as in `ResolvedRun`.

    Raises:
        RunFailedError: training failed more often than the recipe allows, or cannot work, or the
            cluster had no room for the workers in time.
    """
    if cluster.is_private:
        get_or_create_autoscaling_coordinator()
    else:
        start_data_actors()
    options = {
        "keeps_statistics": not cluster.is_private or has_dashboard(),
        "warms_up": not cluster.is_private,
        "cpus_per_rank": job.recipe.workers.cpus_per_worker,
    }
    source = ray.put(StreamSource(ray.put(streams), options))
    failing = FailingNodes(locate(job.recipe.run_folder) if job.kind == "train" else None)
    run = Run(job, source, cluster, failing, use_gpu=use_gpu)
    with variables(settings(run.finder.sizes[-1], is_private=cluster.is_private)):
        run.train()


@dataclass(frozen=True)
class Ended:
    """How an attempt has ended.

    Attributes:
        goes_on: whether a larger group follows an attempt without an error.
    """

    error: BaseException | None = None
    goes_on: bool = False


class Run:
    """The run's worker groups, and the driver's decisions from one to the next."""

    def __init__(
        self,
        job: TrainJob,
        streams: ray.ObjectRef[StreamSource],
        cluster: ClusterShape,
        failing: FailingNodes,
        *,
        use_gpu: bool,
    ) -> None:
        self._job, self._streams, self._cluster = job, streams, cluster
        self._failing, self._use_gpu = failing, use_gpu
        self.finder = PlaceFinder(job, failing, use_gpu=use_gpu)
        self._num_failures, self._failed_at = 0, -1
        self._name, self._num_groups = f"{job.recipe.name}-{uuid.uuid4().hex[:8]}", 0

    def train(self) -> None:
        """Raises: as `run_workers`."""
        lost_since_s: float | None = None
        try:
            while True:
                place = self.finder.wait_for_place(lost_since_s)
                ended = self.attempt(place)
                lost_since_s = place.since_s if lost_place(ended.error) else None
                if lost_since_s is None and self._is_over(ended):
                    return
                reason = None
                with contextlib.suppress(*_UNAVAILABLE):
                    reason = self._job.record.stop_reason()
                if reason:
                    raise RunStoppedError(reason)
        except RunStoppedError as stop:
            if failure := self._job.record.failure():
                raise failure from stop
            saved = "so no checkpoint was written"
            if (newest := newest_step(self._job.recipe)) != -1:
                saved = f"the newest checkpoint is of step {newest}"
            text = f"{stop}; no workers were running, {saved}"
            self._job.record.event(EventKind.STOPPED, text, 0, ARRIVAL_S)

    def _is_over(self, ended: Ended) -> bool:
        """Whether the run has ended with this attempt.

        Raises:
            RunFailedError: with an error, or after too many failures without a new checkpoint.
        """
        # The error that a worker reported says more than the time-outs of the other ranks.
        if failure := self._job.record.failure():
            raise failure from ended.error
        if ended.error is None:
            return not ended.goes_on
        worker_info = {}
        with contextlib.suppress(*_UNAVAILABLE):
            worker_info = self._job.record.places()
        text = cause(ended.error, worker_info)
        self._job.record.event(EventKind.WORKER_FAILED, text, 0)
        if not counts(ended.error):
            return False
        node = None if self._cluster.is_private else failing_node(ended.error, worker_info)
        if host := self._failing.note(node):
            note = (
                f"{host}: workers there have failed twice in a row, so groups are placed on other "
                "nodes while those have room; check its GPUs and its system log"
            )
            self._job.record.event(EventKind.NODE_LEFT_OUT, note, 0)
        # A new checkpoint resets the count: a run may take weeks.
        newest = newest_step(self._job.recipe)
        if newest not in (-1, self._failed_at):
            self._num_failures, self._failed_at = 0, newest
        self._num_failures += 1
        if -1 < (max_failures := self._job.recipe.workers.max_failures) < self._num_failures:
            raise RunFailedError(
                f"{text} (failure {self._num_failures} without a new checkpoint between; "
                f"workers.max_failures={max_failures})"
            ) from ended.error
        return False

    def attempt(self, place: Place) -> Ended:
        """Train with a new group until it ends."""
        self._num_groups += 1
        self._job = replace(self._job, place_wait_s=place.waited_s)
        watch = GroupWatch(self._job, self.finder, place)
        fit = _in_thread(lambda: self._trainer(place).fit())
        try:
            with contextlib.suppress(*_UNAVAILABLE):  # training needs no MLflow
                recipe = self._job.recipe
                if self._num_groups == 1 and self._job.record.run_id(ARRIVAL_S) is None:
                    # Not an error: MLflow takes seconds to create the schema of a SQLite file.
                    print(
                        f"MLflow at {redact(recipe.tracking.uri)} has not answered yet; "
                        f"{recipe.name} trains meanwhile, and its record waits in "
                        f"{recipe.run_folder}",
                        file=sys.stderr,
                        flush=True,
                    )
            while not wait([fit], LOOK_EVERY_S).done:
                if watch.is_over():
                    break
        finally:
            error = fit.exception() if fit.done() else watch.error
            # A controller that hangs or has died does not remove its placement group.
            if error or not fit.done():
                give_back(watch.group_id())
        if (limit := micro_batch_limit(error)) is not None:
            self._job = replace(self._job, micro_batch_limit=limit)
        goes_on = error is None and watch.is_resizing
        with contextlib.suppress(*_UNAVAILABLE):
            goes_on = goes_on and not has_ended(self._job, self._job.record.status())
        return Ended(error, goes_on)

    def _trainer(self, place: Place) -> Any:
        # Imported here, in a thread: torch takes seconds.
        from ray.train.torch import TorchTrainer

        use_gpu, group = self._use_gpu, f"{self._name}-{self._num_groups}"
        # Ray leaves a machine's GPUs visible to workers that did not ask for one.
        hides_gpus = self._cluster.num_gpus > 0 and not use_gpu
        return TorchTrainer(
            work,
            train_loop_config={
                "job": ray.put(self._job),
                "group": group,
                "use_gpu": use_gpu,
                "streams": self._streams,
            },
            torch_config=GroupConfig(  # type: ignore[arg-type]
                backend="nccl" if use_gpu else "gloo",
                timeout_s=math.ceil(max(_MIN_TIMEOUT_S, self._job.recipe.train.step_timeout_s)),
                record=self._job.record,
            ),
            scaling_config=ScalingConfig(
                num_workers=place.size,
                use_gpu=use_gpu,
                resources_per_worker=dict(self.finder.resources),
                placement_strategy=STRATEGY,
                label_selector=dict(place.labels) or None,
            ),
            run_config=RunConfig(  # type: ignore[arg-type]
                name=group,
                # Ray Train's own state, which is never read, goes to the controller's memory, so
                # that no files are left behind. Checkpoints do not go through Ray Train.
                storage_path="groups",
                storage_filesystem=PyFileSystem(FSSpecHandler(fsspec.filesystem("memory"))),
                failure_config=FailureConfig(
                    max_failures=0, max_preemption_failures=0, controller_failure_limit=0
                ),
                worker_runtime_env=(
                    {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}} if hides_gpus else None
                ),
            ),
        )


def _in_thread(call: Callable[[], object]) -> Future[object]:
    """Run `call` in a thread: in the main thread `fit()` would handle Ctrl-C itself."""
    result = Future[object]()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # given to the waiting thread
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="fit").start()
    return result


class GroupWatch:
    """Watches a group while `fit()` runs: its heartbeats, room for a larger group, its end."""

    def __init__(
        self,
        job: TrainJob,
        finder: PlaceFinder,
        place: Place,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._job, self._finder, self._place, self._clock = job, finder, place, clock
        self.error: Exception | None = None
        self._group = ""
        # The workers were asked for a checkpoint, after which a larger group starts
        self.is_resizing = False
        self._began_s = clock()
        self._ended_s: float | None = None

    def is_over(self) -> bool:
        """Whether to stop waiting although `fit()` runs.

        The workers have ended the run, or are silent (`error`).
        """
        with contextlib.suppress(*_UNAVAILABLE):
            self.group_id()
            now_s, status = self._clock(), self._job.record.status()
            silent_s = now_s - max(self._began_s, status.heard_s)
            has_ended_well = has_ended(self._job, status)
            if has_ended_well or silent_s > SILENT_S:
                self._ended_s = self._ended_s or now_s
                if now_s - self._ended_s <= RETURN_S:
                    return False
                if not has_ended_well:
                    self.error = TimeoutError(f"no worker has been heard from for {silent_s:.0f} s")
                return True
            self._ended_s = None
            may_grow = status.heard_s > self._began_s and self._job.kind == "train"
            if may_grow and not self.is_resizing and self._finder.has_larger(self._place):
                self.is_resizing = True
                self._job.record.request_resize()
        return False

    def group_id(self) -> str:
        """Placement group of the workers; empty if no worker has sent its worker info yet."""
        if not self._group:
            with contextlib.suppress(*_UNAVAILABLE):
                workers = self._job.record.places().values()
                self._group = max((worker.group for worker in workers), default="")
        return self._group


def lost_place(error: BaseException | None) -> bool:
    """Whether other work took a group's resources before its workers had started.

    Of Ray's errors only the time-out of such a start has `num_workers`.
    """
    return hasattr(getattr(error, "controller_failure", None), "num_workers")


def has_ended(job: TrainJob, status: RunStatus) -> bool:
    """Whether the workers have recorded the end of the run."""
    if status.failure or any(event.kind == EventKind.STOPPED for event in status.events):
        return True
    if job.kind != "train":
        return bool(status.metrics)
    if status.step < job.total_steps:
        return False
    newest = newest_checkpoint(locate(job.recipe.run_folder))
    return newest is not None and newest.position.progress.is_over(job.total_steps)


def settings(num_workers: int, *, is_private: bool) -> dict[str, str]:
    """Environment variables for Ray Train, except those that the user has set."""
    watches = "0" if is_private else "1"
    defaults = {
        # How soon Ray Train notices that a worker has ended or died.
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": f"{max(0.5, num_workers / _RANKS_PER_POLL_S):g}",
        # A private Ray has a single node, which is not preempted, and its metrics are not read.
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": watches,
        "RAY_TRAIN_METRICS_ENABLED": watches,
        # The driver has waited for the resources before a group starts.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{_START_TIMEOUT_S:g}",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths are those of the driver
    }
    return {key: value for key, value in defaults.items() if key not in os.environ}


def newest_step(recipe: Recipe) -> int:
    """Step of the newest complete checkpoint; -1 if there is none, or storage does not answer."""
    with contextlib.suppress(OSError):
        if checkpoint := newest_checkpoint(locate(recipe.run_folder)):
            return checkpoint.position.step
    return -1
