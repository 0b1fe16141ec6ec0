"""Ray Train's failure and scaling policies: when a failure ends a run, and how large its group is.

Ray 2.60 has no public place for either; the trainer's own step that hands its policies to the
controller is overridden, and nothing else.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import ray
from ray.train.backend import Backend, BackendConfig

# The classes that `ray.train` gives at run time; type checkers see there those of its version 1.
from ray.train.v2.api.config import FailureConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError
from ray.util import get_placement_group, placement_group_table, remove_placement_group

from vit_ray.launch.actor_calls import PROCESS_DIED
from vit_ray.outcomes import EventKind, Failure, WorkerPlace
from vit_ray.ray_internals import (
    ControllerCallback,
    DatasetsCallback,
    DefaultFailurePolicy,
    ElasticScalingPolicy,
    FailureDecision,
    NoopDecision,
    PlacementGroupCleanerCallback,
    PreemptingState,
    ResizingState,
    RunningState,
    ScalingDecision,
    SchedulingState,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    _is_preemption_failure,
    expire_resource_requests_after,
    memory_kill,
    name_placement_groups,
    refresh_reserved_resources,
)
from vit_ray.storage import locate
from vit_ray.worker.job import SmallerMicroBatchError, TrainJob

SAVE_BEFORE_RESIZE_S = 120.0
WAIT_FOR_NODES_S = 1.0
KEEP_REQUEST_S: Final = 45
"""How long a driver that was killed holds the places of its group; Ray's default is 180 s."""
REPEAT_REQUEST_S: Final = 5
REFRESH_S: Final = 5.0
JOB_S: Final = 30.0
IN_A_ROW_S: Final = 3600.0
"""Failures on one node that are further apart are not taken for a defect of it."""
_MOST_CAUSES: Final = 3
_COLLATERAL: Final = re.compile(r"connection|peer|timed? ?out|nccl|gloo", re.IGNORECASE)


class PolicedTrainer(DataParallelTrainer):
    """Ray Train's workers under policies of our own.

    Streams and process groups are the workers' own affair: without Ray's data sets and its torch
    backend the controller does not import torch, and no process is started for data sets that
    there are none of.
    """

    def __init__(self, policies: dict[str, Any], *, is_private: bool, **options: Any) -> None:
        """
        Args:
            policies: by the names of the controller's arguments.
            is_private: the cluster ends with this driver, and what is placed on it too.
        """
        super().__init__(backend_config=WorkersBackendConfig(), **options)
        self._policies = policies
        cleaner = (PlacementGroupCleanerCallback,) if is_private else ()
        self._unused = (DatasetsCallback, *cleaner)

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        callbacks = [c for c in arguments["callbacks"] if not isinstance(c, self._unused)]
        changed = {**self._policies, "callbacks": callbacks}
        return super()._initialize_and_run_controller(**{**arguments, **changed})


class _WorkersBackend(Backend):
    """GPUs of a node are visible to all of its workers, which NCCL needs to link them."""

    share_cuda_visible_devices = True


class WorkersBackendConfig(BackendConfig):
    """Nothing is set up before the workers run: each training joins a process group of its own."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _WorkersBackend


class ConsecutiveFailurePolicy(DefaultFailurePolicy):
    """Ends a run that fails repeatedly with no new checkpoint in between.

    Ray Train itself counts all failures since the start: a run of weeks would end at the sixth
    node that it lost, however far apart they were.
    """

    def __init__(self, current_job: Callable[[], TrainJob | None]) -> None:
        """`current_job`: what the group is training; None before its first training."""
        # Ray's own limits are off: for nodes taken back, and groups that find no place in time.
        super().__init__(FailureConfig(max_failures=-1))
        self._current_job = current_job
        self._run_folder, self._count, self._failed_at = "", 0, -1

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Every failure becomes part of the run's history."""
        try:
            job = self._current_job()
        except PROCESS_DIED:
            return FailureDecision.RAISE  # of the pool's server: the pool ends, and its group
        failure = getattr(training_failed_error, "controller_failure", None)
        if job is None or isinstance(failure, WorkerGroupStartupTimeoutError):
            return super().make_decision(training_failed_error)  # the driver reports the wait
        places: dict[int, WorkerPlace] = {}
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            places = job.control.places()
        text = cause(training_failed_error, places)
        job.record.event(EventKind.WORKER_FAILED, text, 0)
        if job.control.failure():
            return FailureDecision.RAISE  # a worker has said that a restart would not help
        if _is_preemption_failure(training_failed_error) or not _is_crash(training_failed_error):
            return super().make_decision(training_failed_error)
        FAILING_NODES.note(failing_node(training_failed_error, places))
        run_folder, newest = job.run_folder, newest_step(job.run_folder)
        if run_folder != self._run_folder or newest not in (-1, self._failed_at):
            self._run_folder, self._count, self._failed_at = run_folder, 0, newest
        # A smaller micro-batch is the remedy, and only a few sizes are smaller.
        failures = getattr(training_failed_error, "worker_failures", {}).values()
        self._count += not any(isinstance(one, SmallerMicroBatchError) for one in failures)
        if -1 < (most := job.recipe.workers.max_failures) < self._count:
            reason = (
                f"{text} (failure {self._count} with no new checkpoint between; "
                f"workers.max_failures={most})"
            )
            job.control.fail(Failure(reason))
            return FailureDecision.RAISE
        return FailureDecision.RETRY


def _is_crash(error: TrainingFailedError) -> bool:
    """Whether workers died, in training or while their group was being started."""
    if isinstance(error, WorkerGroupError):
        return True
    failure = getattr(error, "controller_failure", None)
    if isinstance(failure, ray.exceptions.RayTaskError):
        return not isinstance(failure.cause, ValueError)
    return isinstance(failure, (WorkerGroupStartupFailedError, *PROCESS_DIED))


class DivisorScalingPolicy(ElasticScalingPolicy):
    """The largest group that fits, divides the global batch, and leaves a CPU to read data with."""

    def __init__(
        self,
        scaling_config: ScalingConfig,
        sizes: Sequence[int],
        reading_cpus: float,
        current_job: Callable[[], TrainJob | None],
    ) -> None:
        """
        Args:
            sizes: worker counts that are allowed.
            reading_cpus: CPUs of one reading task, which must be free on some node.
            current_job: what the group is to train.
        """
        super().__init__(scaling_config)
        self._sizes, self._reading_cpus = sorted(sizes), reading_cpus
        self._current_job = current_job
        self._waits_since_s: float | None = None

    def after_controller_start(self, train_run_context: Any) -> None:
        """Here, in the controller's process: the first request is kept no longer than others."""
        expire_resource_requests_after(KEEP_REQUEST_S, repeat_s=REPEAT_REQUEST_S)
        super().after_controller_start(train_run_context)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """As Ray's, which would ask again without a pause while there is no place for a group.

        Raises:
            RayError: the pool's server is gone, and nothing waits for the group any more.
        """
        with contextlib.suppress(ray.exceptions.RayError):  # then by what was counted before
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
        # Ray's coordinator counts a node that is lost for some seconds more than the cluster does.
        cpus = {
            node: n for node, n in cpus_by_node().items() if node not in FAILING_NODES.hosts
        } or cpus_by_node()
        counts = {
            node: int(min(held.get(key, 0.0) // n for key, n in wanted.items() if n > 0))
            for node, held in reserved_resources.items()
            if node in cpus
        }
        most, cpus_per_worker = sum(counts.values()), wanted.get("CPU", 0.0)
        spare = max(
            (n - counts.get(node, 0) * cpus_per_worker for node, n in cpus.items()), default=0
        )
        if spare < self._reading_cpus and cpus_per_worker > 0:
            most -= math.ceil(self._reading_cpus / cpus_per_worker)
        return max((size for size in self._sizes if size <= most), default=0)


def cpus_by_node() -> dict[str, float]:
    """CPUs of each node that is alive, by its id."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {n["NodeID"]: n["Resources"].get("CPU", 0.0) for n in nodes if n["Alive"]}


class FailingNodes:
    """Nodes on which the group has failed twice in a row, in the process of its controller."""

    def __init__(self) -> None:
        self.hosts: dict[str, str] = {}
        """Host by Ray's id of the node."""
        self._last: tuple[str, float] = "", 0.0

    def note(self, place: WorkerPlace | None) -> None:
        """The group has failed: on one node alone, or not (None)."""
        node, now_s = (place.node if place else ""), time.monotonic()
        before, at_s = self._last
        self._last = node, now_s
        if place and node == before and now_s - at_s < IN_A_ROW_S:
            self.hosts[node] = place.host


FAILING_NODES: Final = FailingNodes()


class LeaveOutNodes(ControllerCallback):
    """Places the group on nodes that have not failed twice in a row, where they have room for it.

    It runs in the controller's process, as the policy does that counts failures.
    """

    def __init__(self, current_job: Callable[[], TrainJob | None]) -> None:
        self._current_job = current_job
        self._noted: set[str] = set()

    def on_controller_start_worker_group(
        self, *, scaling_config: Any, num_workers: int
    ) -> dict[str, str] | None:
        """Ray's label selector for each worker; None where any node may take it."""
        hosts = FAILING_NODES.hosts
        wanted = scaling_config._resources_per_worker_not_none
        if not hosts or _room(wanted) < num_workers:
            return None
        if news := hosts.keys() - self._noted:
            self._noted |= news
            named = ", ".join(sorted(hosts[node] for node in news))
            text = (
                f"{named}: workers there have failed twice in a row, so the group has its place on "
                "other nodes; look at its GPUs and its system log"
            )
            with contextlib.suppress(ray.exceptions.RayError):
                if (job := self._current_job()) is not None:
                    job.record.event(EventKind.NODE_LEFT_OUT, text, 0)
        return {"ray.io/node-id": f"!in({','.join(sorted(hosts))})"}


def _room(wanted: Mapping[str, float]) -> int:
    """Workers that the nodes which are not left out have room for."""
    nodes = [n for n in ray.nodes() if n["Alive"]]  # type: ignore[no-untyped-call]
    held = [n["Resources"] for n in nodes if n["NodeID"] not in FAILING_NODES.hosts]
    needs = [(key, need) for key, need in wanted.items() if need > 0]
    return sum(int(min(one.get(key, 0.0) // need for key, need in needs)) for one in held)


class NotePlacement(ControllerCallback):
    """Notes whether the group is placed, be it about to lose its place, and its waits for it."""

    def __init__(self, server: Any) -> None:
        self._server, self._asked_s, self._pool = server, 0.0, ""

    def after_controller_start(self, train_run_context: Any) -> None:
        """The name of its placement groups begins with that of the pool."""
        self._pool = train_run_context.run_config.name

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Each time that the group starts, runs, fails, or changes its size."""
        is_placed = isinstance(current_state, RunningState | PreemptingState | ResizingState)
        self._server.note_placement.remote(is_placed)
        was_asking = isinstance(previous_state, SchedulingState)
        if isinstance(current_state, SchedulingState):
            self._asked_s = time.time()
        elif was_asking and isinstance(current_state, RunningState):
            with contextlib.suppress(ray.exceptions.RayError):  # the next call of it decides
                job = ray.get(self._server.current_job.remote(), timeout=JOB_S)
                if job is not None:
                    wait_s = placement_wait_s(self._pool)
                    job.record.place_wait(self._asked_s, self._asked_s + wait_s)


def placement_wait_s(pool_name: str) -> float:
    """How long the newest worker group of a pool has waited for its place."""
    waits = {
        int(group["name"].rpartition("-")[2]): group["stats"]["end_to_end_creation_latency_ms"]
        for group in placement_group_table().values()
        if group["name"].startswith(f"{pool_name}-")
    }
    return float(waits[max(waits)]) / 1e3 if waits else 0.0


class OwnEnvironment(ControllerCallback):
    """Sets variables in the controller's process, before it makes a worker group.

    Variables of the driver are for all of its pools, which start in threads.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    def after_controller_start(self, train_run_context: Any) -> None:
        """Here, in the controller's process, whose workers get them too."""
        os.environ |= self._variables


class NameGroups(ControllerCallback):
    """Gives worker groups the name of their pool, so that `remove_groups` finds them."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Here, in the controller's process, which places them."""
        name_placement_groups(train_run_context.run_config.name)


def remove_groups(pool_name: str) -> None:
    """Take back what the worker groups of a pool hold or wait for."""
    for group in placement_group_table().values():
        if group["state"] != "REMOVED" and group["name"].startswith(f"{pool_name}-"):
            with contextlib.suppress(ValueError):  # gone since
                remove_placement_group(get_placement_group(group["name"]))


class SaveBeforeResize(ControllerCallback):
    """An elastic group that has room to grow is saved first.

    It is started again from its newest checkpoint, which by the clock may be a quarter of an hour
    old.
    """

    def __init__(self, current_job: Callable[[], TrainJob | None]) -> None:
        self._current_job = current_job

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Wait for a checkpoint when Ray has decided to change the size of a running group."""
        if not isinstance(current_state, ResizingState):
            return
        try:
            job = self._current_job()
        except PROCESS_DIED:
            return
        if job is None or job.kind != "train":
            return
        before = newest_step(job.run_folder)
        job.control.request_save()
        deadline = time.monotonic() + SAVE_BEFORE_RESIZE_S
        while newest_step(job.run_folder) <= before and time.monotonic() < deadline:
            time.sleep(0.5)


def newest_step(run_folder: str) -> int:
    """Of the newest whole checkpoint; -1 where there is none, or storage does not answer."""
    from vit_ray.checkpoints.run_checkpoints import newest_checkpoint  # torch: few need it

    try:
        checkpoint = newest_checkpoint(locate(run_folder))
    except OSError:
        return -1
    return checkpoint.position.step if checkpoint else -1


def cause(error: BaseException, places: Mapping[int, WorkerPlace] | None = None) -> str:
    """The workers' own errors, without Ray's frames; errors that followed from them come last.

    A worker that dies takes the connections of the others with it.

    Args:
        places: of the workers by rank, as far as they are known.
    """
    places = places or {}
    failures = getattr(error, "worker_failures", None)
    if not failures:
        if found := memory_kill(error):
            return (
                f"host {found[0]} ran out of memory ({found[1]}), so Ray ended the process; use "
                "nodes with more memory, or fewer workers on each (a larger "
                "workers.cpus_per_worker)"
            )
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[-1].strip() if lines else repr(error)
    by_text: dict[str, tuple[bool, int]] = {}
    for rank, failure in sorted(failures.items()):
        text = cause(failure)
        by_text.setdefault(text, (_is_collateral(failure, text), rank))
    shown = []
    for text in sorted(by_text, key=by_text.__getitem__)[:_MOST_CAUSES]:
        rank = by_text[text][1]
        place = f" {places[rank]}" if rank in places else ""
        shown.append(f"worker {rank}{place}: {text}")
    return "; ".join(shown)


def _is_collateral(failure: BaseException, text: str) -> bool:
    """Whether a worker has only lost the others, by what torch 2's NCCL and Gloo say of that."""
    return not _is_ours(failure) and bool(_COLLATERAL.search(text))


def _is_ours(failure: BaseException) -> bool:
    return type(failure).__module__.startswith("vit_ray")


def failing_node(error: Any, places: Mapping[int, WorkerPlace]) -> WorkerPlace | None:
    """A place on the one node that may be to blame for a failure; None where there is no such one.

    What this project raises, and a lack of memory, would be met on any node.
    """
    blamed = {
        rank: failure
        for rank, failure in getattr(error, "worker_failures", {}).items()
        if not (_is_ours(failure) or memory_kill(failure) or _is_collateral(failure, str(failure)))
    }
    found = [places[rank] for rank in sorted(blamed) if rank in places]
    is_one = len(found) == len(blamed) and len({place.node for place in found}) == 1
    return found[0] if is_one else None
