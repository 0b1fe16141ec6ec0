"""Ray Train's failure and scaling policies: when a failure ends a run, and how many workers a group
has.

Ray 2.60 has no public place for either; only the trainer's method that passes its policies to the
controller is overridden.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import ray
from ray.train.backend import Backend, BackendConfig

# The classes that `ray.train` has at run time; type checkers see those of its version 1 there.
from ray.train.v2.api.config import FailureConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

from vit_ray.launch.cluster.connection import live_nodes
from vit_ray.launch.pool.actor_calls import PROCESS_DIED
from vit_ray.launch.pool.failing_nodes import FAILING_NODES
from vit_ray.launch.pool.failure_causes import cause, failing_node
from vit_ray.launch.pool.group_callbacks import newest_step
from vit_ray.launch.pool.replacement import REPLACEMENT
from vit_ray.outcomes import EventKind, Failure, WorkerPlace
from vit_ray.ray_internals import (
    DatasetsCallback,
    DefaultFailurePolicy,
    ElasticScalingPolicy,
    FailureDecision,
    NoopDecision,
    PlacementGroupCleanerCallback,
    ScalingDecision,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    _is_preemption_failure,
    expire_resource_requests_after,
    refresh_reserved_resources,
)
from vit_ray.worker.job import SmallerMicroBatchError, TrainJob

WAIT_FOR_NODES_S = 1.0
KEEP_REQUEST_S: Final = 45
"""How long the places of a killed driver's group are held; Ray's default is 180 s."""
REPEAT_REQUEST_S: Final = 5
REFRESH_S: Final = 5.0


class PolicedTrainer(DataParallelTrainer):
    """Ray Train's workers with our own policies.

    Workers manage streams and process groups themselves: without Ray's data sets and its torch
    backend the controller does not import torch, and no process is started for data sets. There is
    also no cleaner process for the places of a group whose controller dies: the pool's owner takes
    them back. Ray's cleaner would never end on a cluster without a dashboard, or with a second Ray
    on the head's machine.
    """

    def __init__(self, policies: dict[str, Any], *, replaces: bool, **options: Any) -> None:
        """
        Args:
            policies: by the names of the controller's arguments.
            replaces: a worker whose process has died is replaced alone.
        """
        super().__init__(backend_config=WorkersBackendConfig(replaces), **options)
        self._policies = policies

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        unused = (DatasetsCallback, PlacementGroupCleanerCallback)
        callbacks = [c for c in arguments["callbacks"] if not isinstance(c, unused)]
        changed = {**self._policies, "callbacks": callbacks}
        return super()._initialize_and_run_controller(**{**arguments, **changed})


class _WorkersBackend(Backend):
    """GPUs of a node are visible to all of its workers, because NCCL links them."""

    share_cuda_visible_devices = True


class _ReplacingBackend(_WorkersBackend):
    """Ray Train's groups of replicas: each worker is one, and the failed ones are replaced."""

    has_replica_groups = True


class WorkersBackendConfig(BackendConfig):
    """Nothing is set up before the workers run: each training joins its own process group."""

    def __init__(self, replaces: bool = False) -> None:
        self._replaces = replaces

    @property
    def backend_cls(self) -> type[Backend]:
        return _ReplacingBackend if self._replaces else _WorkersBackend


class ConsecutiveFailurePolicy(DefaultFailurePolicy):
    """Ends a run that fails repeatedly without a new checkpoint in between.

    Ray Train itself counts all failures since the start: a run of weeks would end at the sixth lost
    node, however far apart they are.
    """

    def __init__(self, current_job: Callable[[], TrainJob | None]) -> None:
        """`current_job`: the group's training; None before the first."""
        # Ray's own limits are off: for preempted nodes, and for groups that are not placed in time.
        super().__init__(FailureConfig(max_failures=-1))
        self._current_job = current_job
        self._run_folder, self._count, self._failed_at = "", 0, -1

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Every failure becomes part of the run's history."""
        REPLACEMENT.is_allowed = False
        try:
            job = self._current_job()
        except PROCESS_DIED:
            return FailureDecision.RAISE  # of the pool's server: the pool and its group end
        failure = getattr(training_failed_error, "controller_failure", None)
        if job is None or isinstance(failure, WorkerGroupStartupTimeoutError):
            return super().make_decision(training_failed_error)  # the driver reports the waiting
        places: dict[int, WorkerPlace] = {}
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            places = job.control.places()
        text = cause(training_failed_error, places)
        job.record.event(EventKind.WORKER_FAILED, text, 0)
        if job.control.failure():
            return FailureDecision.RAISE  # a worker has reported that a restart would not help
        if _is_preemption_failure(training_failed_error) or not _is_crash(training_failed_error):
            return super().make_decision(training_failed_error)
        failures = getattr(training_failed_error, "worker_failures", {}).values()
        FAILING_NODES.note(failing_node(training_failed_error, places))
        run_folder, newest = job.run_folder, newest_step(job.run_folder)
        if run_folder != self._run_folder or newest not in (-1, self._failed_at):
            self._run_folder, self._count, self._failed_at = run_folder, 0, newest
        # A smaller micro-batch is the remedy, and there are only a few smaller sizes.
        self._count += not any(isinstance(one, SmallerMicroBatchError) for one in failures)
        if -1 < (most := job.recipe.workers.max_failures) < self._count:
            reason = (
                f"{text} (failure {self._count} without a new checkpoint between; "
                f"workers.max_failures={most})"
            )
            job.control.fail(Failure(reason))
            return FailureDecision.RAISE
        REPLACEMENT.judge(training_failed_error, places)
        return FailureDecision.RETRY


def _is_crash(error: TrainingFailedError) -> bool:
    """Whether workers died, during training or while the group was starting."""
    if isinstance(error, WorkerGroupError):
        return True
    failure = getattr(error, "controller_failure", None)
    if isinstance(failure, ray.exceptions.RayTaskError):
        return not isinstance(failure.cause, ValueError)
    return isinstance(failure, (WorkerGroupStartupFailedError, *PROCESS_DIED))


class DivisorScalingPolicy(ElasticScalingPolicy):
    """The largest group that fits, divides the global batch, and leaves a CPU for reading."""

    def __init__(
        self,
        scaling_config: ScalingConfig,
        sizes: Sequence[int],
        reading_cpus: float,
        current_job: Callable[[], TrainJob | None],
    ) -> None:
        """
        Args:
            sizes: allowed worker counts.
            reading_cpus: CPUs of one reading task, which must be free on some node.
            current_job: the training of the group.
        """
        super().__init__(scaling_config)
        self._sizes, self._reading_cpus = sorted(sizes), reading_cpus
        self._current_job = current_job
        self._waits_since_s: float | None = None

    def after_controller_start(self, train_run_context: Any) -> None:
        """Runs in the controller's process: its first request must expire like any other."""
        expire_resource_requests_after(KEEP_REQUEST_S, repeat_s=REPEAT_REQUEST_S)
        super().after_controller_start(train_run_context)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """As Ray's method, which would retry without a pause while the group cannot be placed.

        Raises:
            RayError: the pool's server has ended, and nothing waits for the group.
        """
        with contextlib.suppress(ray.exceptions.RayError):  # then by the last count
            refresh_reserved_resources(self, REFRESH_S)
        decision = super().make_decision_for_non_running_worker_group()
        is_waiting, since_s = isinstance(decision, NoopDecision), self._waits_since_s
        if is_waiting or since_s is not None:
            job = self._current_job()
            if not is_waiting and since_s is not None and job is not None:
                job.record.place_wait(since_s, time.time())
            self._waits_since_s = (since_s or time.time()) if is_waiting else None
        if is_waiting:
            time.sleep(WAIT_FOR_NODES_S)
        return decision

    def _count_possible_workers(self, reserved_resources: dict[str, dict[str, float]]) -> int:
        wanted = self.scaling_config._resources_per_worker_not_none
        # Ray's coordinator counts a lost node for some seconds longer than the cluster does.
        cpus = {
            node: n for node, n in cpus_by_node().items() if node not in FAILING_NODES.hosts
        } or cpus_by_node()
        labels = self.scaling_config.label_selector
        fitting = cpus_by_node(labels) if isinstance(labels, dict) else cpus
        counts = {
            node: int(min(held.get(key, 0.0) // n for key, n in wanted.items() if n > 0))
            for node, held in reserved_resources.items()
            if node in cpus and node in fitting
        }
        most, cpus_per_worker = sum(counts.values()), wanted.get("CPU", 0.0)
        spare = max(
            (n - counts.get(node, 0) * cpus_per_worker for node, n in cpus.items()), default=0
        )
        if spare < self._reading_cpus and cpus_per_worker > 0:
            most -= math.ceil(self._reading_cpus / cpus_per_worker)
        return max((size for size in self._sizes if size <= most), default=0)


def cpus_by_node(labels: Mapping[str, str] | None = None) -> dict[str, float]:
    """CPUs of each live node with the labels, by its id."""
    return {n["NodeID"]: n["Resources"].get("CPU", 0.0) for n in live_nodes(labels)}
