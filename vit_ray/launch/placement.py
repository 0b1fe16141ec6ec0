"""Waiting for a worker group's resources, before workers start and when the group may grow.

Ray Train's controller takes no messages while it waits for resources. So the driver waits, with a
placement group for the same workers, which it removes just before they start. An autoscaler sees
this request all the time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from vit_ray.launch.connection import live_nodes
from vit_ray.launch.failures import FailingNodes
from vit_ray.outcomes import EventKind, RunFailedError, RunStoppedError
from vit_ray.worker.job import TrainJob

STRATEGY: Final = "PACK"
# How long Ray may take to create a placement group whose resources are free
LOOK_S: Final = 1.0
# The same before a run starts, on a busy machine; then a smaller group is tried.
_PATIENCE_S: Final = 5.0
_REPORT_EVERY_S: Final = 10.0
# How long a group waits for other nodes than those that have failed, which may be repaired by then
_OTHERS_S: Final = 60.0


@dataclass(frozen=True)
class Place:
    """Where a worker group may start.

    Attributes:
        labels: selects its nodes.
        since_s: unix time at which the wait began.
        waited_s: duration of the wait.
    """

    size: int
    labels: Mapping[str, str]
    since_s: float = 0.0
    waited_s: float = 0.0


class PlaceFinder:
    """Finds a place for each start of a run's worker group.

    Attributes:
        sizes: possible numbers of workers, ascending.
        resources: of a worker.
    """

    def __init__(
        self,
        job: TrainJob,
        failing: FailingNodes,
        *,
        use_gpu: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._job, self._failing, self._clock = job, failing, clock
        workers = job.recipe.workers
        self.sizes: Sequence[int] = job.recipe.group_sizes if job.kind == "train" else workers.sizes
        self.resources = {"CPU": workers.cpus_per_worker, **({"GPU": 1.0} if use_gpu else {})}

    def wait_for_place(self, lost_since_s: float | None = None) -> Place:
        """The largest group that the cluster has room for; waits for room for the smallest.

        Args:
            lost_since_s: start of the previous wait if its resources were lost before the workers
                had started; the time limit then counts from there.

        Raises:
            RunFailedError: there was no room within `workers.place_timeout_minutes`.
            RunStoppedError: the run was asked to stop; the text is the reason.
        """
        began_s = reported_s = self._clock()
        if lost_since_s is not None:
            began_s = lost_since_s
            self._report(
                began_s, "the group had a place, which was lost before its workers started"
            )
        while True:
            labels = self._labels(self._clock() - began_s)
            # On a cluster without nodes: its autoscaler may have room only for the smaller groups.
            for size in self._fitting(labels) or self.sizes[::-1]:
                if self._has_place(size, labels):
                    return Place(size, labels, began_s, self._clock() - began_s)
                if self._clock() - reported_s >= _REPORT_EVERY_S:
                    reported_s = self._clock()
                    self._report(began_s, self._missing())

    def _report(self, began_s: float, why: str) -> None:
        """Record the wait for workers as an event.

        Raises:
            RunFailedError: the wait exceeds the limit.
        """
        waited_s, limit = self._clock() - began_s, self._job.recipe.workers.place_timeout_minutes
        text = f"no workers for {waited_s:.0f} s: {why}"
        if waited_s > 60 * limit:
            raise RunFailedError(f"{text} (workers.place_timeout_minutes={limit:g})")
        self._job.record.event(EventKind.NO_PLACE, text, 0)

    def _has_place(self, size: int, labels: dict[str, str]) -> bool:
        """Whether the cluster places a group within some seconds, and can read beside it.

        Raises:
            RunStoppedError: as `wait_for_place`.
        """
        end_s = self._clock() + _PATIENCE_S
        with self._asked_for(size, labels) as group:
            while self._clock() < end_s:
                if group.wait(LOOK_S):
                    if size in self._fitting(labels):
                        return True
                    time.sleep(LOOK_S)  # no CPU would be free for reading
                if reason := self._job.record.stop_reason():
                    raise RunStoppedError(reason)
        return False

    def has_larger(self, place: Place) -> bool:
        """Whether there is room to enlarge the running group of `place`."""
        labels = dict(place.labels)
        for size in self._fitting(labels):
            if size > place.size:
                with self._asked_for(size - place.size, labels) as group:
                    if group.wait(LOOK_S):
                        return True
        return False

    def _fitting(self, labels: dict[str, str]) -> list[int]:
        """The sizes that the cluster could hold if it were free, largest first."""
        sizes, reading_cpus = [*self.sizes[::-1]], self._job.recipe.data.cpus_per_task
        if len(sizes) == 1:
            return sizes
        workers_of, cpus_per_worker = self._by_node(labels), self.resources["CPU"]
        spare_cpus = (
            node["Resources"].get("CPU", 0.0) - workers_of.get(node["NodeID"], 0) * cpus_per_worker
            for node in live_nodes()
        )
        max_workers = sum(workers_of.values())
        if max(spare_cpus, default=0.0) < reading_cpus:  # a task must fit next to the workers
            max_workers -= math.ceil(reading_cpus / cpus_per_worker)
        return [size for size in sizes if size <= max_workers]

    def _labels(self, waited_s: float) -> dict[str, str]:
        """Selects the next group's nodes: without failing ones, if the others have room in time."""
        labels = dict(self._job.recipe.workers.label_selector)
        excluded = self._failing.among(live_nodes(labels))
        if not excluded or waited_s > _OTHERS_S:
            return labels
        without = {**labels, "ray.io/node-id": f"!in({','.join(sorted(excluded))})"}
        have_room = sum(self._by_node(without).values()) >= self.sizes[0]
        return without if have_room else labels

    def _by_node(self, labels: Mapping[str, str]) -> dict[str, int]:
        """Workers that each node with the labels could hold if it were free, by node id."""
        needs = [(key, need) for key, need in self.resources.items() if need > 0]
        return {
            node["NodeID"]: int(min(node["Resources"].get(key, 0.0) // n for key, n in needs))
            for node in live_nodes(labels)
        }

    def _missing(self) -> str:
        recipe, workers = self._job.recipe, self.sizes[0]
        total, free = ray.cluster_resources(), ray.available_resources()  # type: ignore[no-untyped-call]
        needed = ", ".join(
            f"{workers * count:g} {key} (the cluster has {total.get(key, 0):g}, "
            f"{free.get(key, 0):g} of them free)"
            for key, count in self.resources.items()
        )
        text = (
            f"{workers} worker{' needs' if workers == 1 else 's need'} {needed}; start nodes, "
            "wait for or end what else runs there, or lower workers.num_workers"
        )
        if len(self.sizes) > 1:
            text += f"; {recipe.data.cpus_per_task:g} CPU more is needed to read with"
        if selector := dict(recipe.workers.label_selector):
            text += f"; only nodes with workers.label_selector={json.dumps(selector)} are used"
        return text

    @contextmanager
    def _asked_for(self, size: int, labels: dict[str, str]) -> Iterator[PlacementGroup]:
        """The placement group that Ray Train requests; removed after the block."""
        selectors: Any = [labels] * size if labels else None
        bundles = [dict(self.resources)] * size
        group = placement_group(bundles, STRATEGY, bundle_label_selector=selectors)
        try:
            yield group
        finally:
            remove_placement_group(group)


def give_back(group: str) -> None:
    """Remove a placement group by its id, if any: Ray keeps it if its controller or trial dies."""
    with suppress(ray.exceptions.RayError):
        if group:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group))))
