"""Waiting for a worker group's placement: reports every minute what is missing, and has a limit.

A placed group may lack something too: the node that read for it is lost, and its workers wait for
images. This is looked at every minute, and reported when it changes.

A stop also ends the waiting: workers learn of a stop by their heartbeat, and none is running yet.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import ray

from vit_ray.config import Recipe
from vit_ray.launch.cluster.cluster_checks import check_room
from vit_ray.launch.cluster.connection import shape
from vit_ray.outcomes import EventKind
from vit_ray.ray_internals import draining_nodes
from vit_ray.worker.job import TrainJob

TELL_S: Final = 60.0


class NoPlaceError(RuntimeError):
    """A worker group was not placed on the cluster in time."""


class StoppedWaitingError(NoPlaceError):
    """The run was asked to stop before its worker group was placed; the text is the reason."""


class PlacementWait:
    """Polled while a run waits for its workers."""

    def __init__(
        self,
        job: TrainJob,
        missing: Callable[[], str],
        lacking: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            missing: says what the group needs and what the cluster has.
            lacking: what the run of a placed group lacks; empty if nothing.
        """
        self._job, self._missing, self._lacking, self._clock = job, missing, lacking, clock
        self._since_s = self._told_s = self._looked_s = clock()
        self._lacked = ""

    def check(self, *, is_placed: bool) -> None:
        """Note whether the group is placed; report once a minute what it lacks, and what a placed
        group's run lacks when that changes: there is no limit to its wait.

        Raises:
            NoPlaceError: it was not placed within `workers.place_timeout_minutes`.
            StoppedWaitingError: it is not placed, and the run is to stop.
        """
        now_s = self._clock()
        if is_placed:
            self._since_s = self._told_s = now_s
            if now_s - self._looked_s >= TELL_S:
                self._looked_s = now_s
                before, self._lacked = self._lacked, self._lacking()
                if self._lacked and self._lacked != before:
                    self._job.record.event(EventKind.NO_PLACE, self._lacked, 0)
            return
        if reason := self._job.control.stop_reason():
            raise StoppedWaitingError(reason)
        if now_s - self._told_s < TELL_S:
            return
        self._told_s = now_s
        text = f"no workers for {now_s - self._since_s:.0f} s: {self._missing()}"
        limit_minutes = self._job.recipe.workers.place_timeout_minutes
        if now_s - self._since_s > 60 * limit_minutes:
            raise NoPlaceError(f"{text} (workers.place_timeout_minutes={limit_minutes:g})")
        self._job.record.event(EventKind.NO_PLACE, text, 0)


def describe_missing(
    num_workers: int,
    each: Mapping[str, float],
    total: Mapping[str, float],
    free: Mapping[str, float],
    draining: Sequence[str] = (),
) -> str:
    """What `num_workers` need, what the cluster has, and what to do.

    Args:
        draining: addresses of nodes that are counted, and take no new work.
    """
    held = ", ".join(
        f"{num_workers * count:g} {key} (the cluster has {total.get(key, 0):g}, "
        f"{free.get(key, 0):g} of them free)"
        for key, count in each.items()
    )
    who = "1 worker needs" if num_workers == 1 else f"{num_workers} workers need"
    leaving = ""
    if draining:
        leaving = f"; draining nodes among them take no new work: {', '.join(draining)}"
    return (
        f"{who} {held}{leaving}; start nodes, wait for or end what else runs there, or lower "
        "workers.num_workers"
    )


def missing_now(
    num_workers: int, each: Mapping[str, float], labels: Mapping[str, str] | None = None
) -> str:
    """`describe_missing` of the connected cluster, and the labels that the nodes must have."""
    total, free = ray.cluster_resources(), ray.available_resources()  # type: ignore[no-untyped-call]
    drains = draining_nodes()
    draining = [
        node["NodeManagerAddress"]
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"] and node["NodeID"] in drains
    ]
    text = describe_missing(num_workers, each, total, free, draining)
    if labels:
        text += f"; only nodes with workers.label_selector={json.dumps(dict(labels))} are used"
    return text


def lacking_now(recipe: Recipe, *, use_gpu: bool) -> str:
    """Why the connected cluster is now too small for a run whose group is placed; empty if not.

    Args:
        use_gpu: whether its workers have GPUs. `workers.use_gpu=auto` was decided when it started:
            GPUs that join later are not for it.
    """
    try:
        cluster = shape(time.time())
    except (ray.exceptions.RayError, RuntimeError, OSError):
        return ""  # the run works without the answer; it is asked again
    if cluster.is_private:
        return ""
    try:
        check_room(recipe.with_changes(workers={"use_gpu": use_gpu}), cluster)
    except ValueError as error:
        return f"the cluster has become too small, start nodes: {error}"
    return ""
