"""What a worker group's controller does at its start, and when the group changes its state."""

import contextlib
import os
import time
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, Final

import ray
from ray.util import get_placement_group, placement_group_table, remove_placement_group

from vit_ray.launch.pool.actor_calls import PROCESS_DIED
from vit_ray.launch.pool.no_barrier import NoBarrier
from vit_ray.ray_internals import (
    ControllerCallback,
    PreemptingState,
    ResizingState,
    RunningState,
    SchedulingState,
    name_placement_groups,
    replace_barrier,
)
from vit_ray.storage import locate
from vit_ray.worker.job import TrainJob

SAVE_BEFORE_RESIZE_S = 120.0
JOB_S: Final = 30.0
_CREATION_MS: Final = "end_to_end_creation_latency_ms"


class NotePlacement(ControllerCallback):
    """Names worker groups after their pool, and notes their waiting times and whether they have a
    place, even if they may lose it.
    """

    def __init__(self, server: Any) -> None:
        self._server, self._asked_s, self._pool = server, 0.0, ""

    def after_controller_start(self, train_run_context: Any) -> None:
        """By the name `remove_groups` finds the groups."""
        self._pool = train_run_context.run_config.name
        name_placement_groups(self._pool)

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Runs each time the group starts, runs, fails, or changes its size."""
        is_placed = isinstance(current_state, RunningState | PreemptingState | ResizingState)
        self._server.note_placement.remote(is_placed)
        was_asking = isinstance(previous_state, SchedulingState)
        if isinstance(current_state, SchedulingState):
            self._asked_s = time.time()
        elif was_asking and isinstance(current_state, RunningState):
            with contextlib.suppress(ray.exceptions.RayError):  # its next call decides
                job = ray.get(self._server.current_job.remote(), timeout=JOB_S)
                if job is not None:
                    waits_ms = {
                        int(group["name"].rpartition("-")[2]): group["stats"][_CREATION_MS]
                        for group in placement_group_table().values()
                        if group["name"].startswith(f"{self._pool}-")
                    }
                    wait_s = float(waits_ms[max(waits_ms)]) / 1e3 if waits_ms else 0.0
                    job.record.place_wait(self._asked_s, self._asked_s + wait_s)


class OwnEnvironment(ControllerCallback):
    """Sets environment variables in the controller's process before it makes a worker group, and
    leaves out Ray Train's barrier.

    Variables of the driver would apply to all of its pools, which start in threads.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    def after_controller_start(self, train_run_context: Any) -> None:
        """Runs in the controller's process, whose workers inherit the variables."""
        os.environ |= self._variables
        replace_barrier(NoBarrier)


def remove_groups(pools: str) -> None:
    """Remove the placement groups that worker groups hold or wait for.

    Args:
        pools: name of their pool, or a pattern for `fnmatch`.
    """
    for group in placement_group_table().values():
        if group["state"] != "REMOVED" and fnmatch(group["name"], f"{pools}-*"):
            with contextlib.suppress(ValueError):  # removed since
                remove_placement_group(get_placement_group(group["name"]))


class SaveBeforeResize(ControllerCallback):
    """Before an elastic group grows, it writes a checkpoint.

    It restarts from its newest checkpoint, which could otherwise be a quarter of an hour old.
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
    """Step of the newest complete checkpoint; -1 if there is none, or storage does not answer."""
    from vit_ray.checkpoints.run_checkpoints import newest_checkpoint  # torch: rarely needed

    try:
        checkpoint = newest_checkpoint(locate(run_folder))
    except OSError:
        return -1
    return checkpoint.position.step if checkpoint else -1
