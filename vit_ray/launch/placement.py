"""A worker group's place: asked for before the workers start, and again when the group may grow.

Ray Train's controller takes no messages while it waits for a place, so the driver waits itself, by
a placement group of the same workers, which it gives up just before they start. An autoscaler sees
the wish all the time.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from vit_ray.config import Recipe
from vit_ray.launch.cluster_checks import check_room
from vit_ray.launch.connection import live_nodes, shape
from vit_ray.launch.failures import FailingNodes
from vit_ray.outcomes import EventKind
from vit_ray.worker.job import TrainJob

STRATEGY: Final = "PACK"
LOOK_S: Final = 1.0
"""How long a place that is there may take to be given."""
PATIENCE_S: Final = 5.0
"""The same for that of the largest group, on a machine that is busy."""
TELL_S: Final = 10.0


class NoPlaceError(Exception):
    """A worker group was not placed on the cluster in time."""


class StoppedWaitingError(NoPlaceError):
    """The run was asked to stop before its worker group was placed; the text is the reason."""


@dataclass(frozen=True)
class GroupShape:
    """The worker groups that a run may have.

    Attributes:
        sizes: worker counts, ascending.
        resources: of a worker.
        labels: of the nodes that train.
        reading_cpus: CPUs of a reading task, for which an elastic group leaves room.
    """

    sizes: tuple[int, ...]
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    reading_cpus: float
    use_gpu: bool = False

    @classmethod
    def of(cls, recipe: Recipe, *, use_gpu: bool, trains: bool) -> GroupShape:
        """What a training or an evaluation asks for."""
        workers = recipe.workers
        sizes = recipe.group_sizes if trains else workers.sizes
        gpus = {"GPU": 1.0} if use_gpu else {}
        return cls(
            tuple(sorted(sizes)),
            {"CPU": workers.cpus_per_worker, **gpus},
            dict(workers.label_selector),
            recipe.data.cpus_per_task,
            use_gpu,
        )


@dataclass(frozen=True)
class Place:
    """Where a worker group may start.

    Attributes:
        labels: selects its nodes.
        since_s: unix time at which the wait began.
        waited_s: until it was there.
    """

    size: int
    labels: Mapping[str, str]
    since_s: float = 0.0
    waited_s: float = 0.0


class PlaceFinder:
    """Finds a place for each start of a run's worker group."""

    def __init__(
        self,
        job: TrainJob,
        shape: GroupShape,
        failing: FailingNodes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._job, self._shape, self._failing, self._clock = job, shape, failing, clock
        self._noted: set[str] = set()
        self._wished: Iterator[int] = iter(())

    def found(self, lost_since_s: float | None = None) -> Place:
        """The largest group that the cluster has room for; waits for room for the smallest.

        Args:
            lost_since_s: time of the first wait if the last place was lost before its workers had
                started; its limit includes this wait.

        Raises:
            NoPlaceError: there was none within `workers.place_timeout_minutes`.
            StoppedWaitingError: the run is to stop.
        """
        began_s = told_s = self._clock()
        patient_s = began_s + PATIENCE_S
        if lost_since_s is not None:
            began_s = lost_since_s
            self._say(began_s, "the group had a place, which was lost before its workers started")
        # Of a cluster without nodes: its autoscaler may have room for the smaller ones only.
        self._wished = itertools.cycle(sorted(self._shape.sizes, reverse=True))
        while (place := self._looked_for(told_s + TELL_S, patient_s)) is None:
            if self._clock() - told_s >= TELL_S:
                told_s = self._clock()
                self._say(began_s, self._missing())
        return replace(place, since_s=began_s, waited_s=self._clock() - began_s)

    def _say(self, began_s: float, why: str) -> None:
        """Say how long workers have been waited for.

        Raises:
            NoPlaceError: too long.
        """
        waited_s, limit = self._clock() - began_s, self._job.recipe.workers.place_timeout_minutes
        text = f"no workers for {waited_s:.0f} s: {why}"
        if waited_s > 60 * limit:
            raise NoPlaceError(f"{text} (workers.place_timeout_minutes={limit:g})")
        self._job.record.event(EventKind.NO_PLACE, text, 0)

    def _looked_for(self, until_s: float, patient_s: float) -> Place | None:
        """A place that is found until then.

        Args:
            patient_s: time from which smaller groups are tried, and a stop is looked for.

        Raises:
            StoppedWaitingError: as `found`.
        """
        labels = self._labels()
        fitting = self._fitting(labels)
        size = fitting[0] if fitting else next(self._wished)
        with asked_for(size, self._shape.resources, labels) as wish:
            while self._clock() < until_s:
                if wish.wait(LOOK_S):
                    if fits := self._fitting(labels):
                        return Place(min(size, fits[0]), labels)
                    time.sleep(LOOK_S)  # no CPU would be left to read with
                if self._clock() < patient_s:
                    continue
                for smaller in fitting[1:]:
                    if self._is_free(smaller, labels):
                        return Place(smaller, labels)
                if reason := self._job.record.stop_reason():
                    raise StoppedWaitingError(reason)
        return None

    def has_larger(self, place: Place) -> bool:
        """Whether a larger group than that of `place`, which runs, would have room."""
        labels = dict(place.labels)
        larger = [size - place.size for size in self._fitting(labels) if size > place.size]
        return any(self._is_free(more, labels) for more in larger)

    def _fitting(self, labels: dict[str, str]) -> list[int]:
        """The sizes that the cluster holds, largest first, whether or not it is free."""
        sizes = sorted(self._shape.sizes, reverse=True)
        return sizes if len(sizes) == 1 else [n for n in sizes if n <= self._most(labels)]

    def _is_free(self, size: int, labels: dict[str, str]) -> bool:
        with asked_for(size, self._shape.resources, labels) as group:
            return group.wait(LOOK_S)

    def _labels(self) -> dict[str, str]:
        """Of the nodes for the next group: without failing ones, if the others have room."""
        labels = dict(self._shape.labels)
        left_out = self._failing.among(live_nodes(labels))
        if not left_out:
            return labels
        without = {**labels, "ray.io/node-id": f"!in({','.join(sorted(left_out))})"}
        if sum(self._by_node(without).values()) < self._shape.sizes[0]:
            return labels
        if news := left_out.keys() - self._noted:
            self._noted |= news
            named = ", ".join(sorted(left_out[node] for node in news))
            text = (
                f"{named}: workers there have failed twice in a row, so the group is placed on "
                "other nodes; check its GPUs and its system log"
            )
            self._job.record.event(EventKind.NODE_LEFT_OUT, text, 0)
        return without

    def _by_node(self, labels: Mapping[str, str]) -> dict[str, int]:
        """Workers that each node with the labels holds, whether or not it is free."""
        wanted = [(key, need) for key, need in self._shape.resources.items() if need > 0]
        return {
            node["NodeID"]: int(min(node["Resources"].get(key, 0.0) // n for key, n in wanted))
            for node in live_nodes(labels)
        }

    def _most(self, labels: Mapping[str, str]) -> int:
        """Workers that the cluster holds, with a CPU to read with on some node."""
        shape, counts = self._shape, self._by_node(labels)
        most, each = sum(counts.values()), shape.resources["CPU"]
        spare = (
            node["Resources"].get("CPU", 0.0) - counts.get(node["NodeID"], 0) * each
            for node in live_nodes()
        )
        if max(spare, default=0.0) < shape.reading_cpus:
            most -= math.ceil(shape.reading_cpus / each)
        return most

    def _missing(self) -> str:
        """What the smallest group needs, what the cluster has, and what to do."""
        shape, least = self._shape, self._shape.sizes[0]
        total, free = ray.cluster_resources(), ray.available_resources()  # type: ignore[no-untyped-call]
        needed = ", ".join(
            f"{least * count:g} {key} (the cluster has {total.get(key, 0):g}, "
            f"{free.get(key, 0):g} of them free)"
            for key, count in shape.resources.items()
        )
        text = (
            f"{least} worker{' needs' if least == 1 else 's need'} {needed}; start nodes, wait for "
            "or end what else runs there, or lower workers.num_workers"
        )
        if len(shape.sizes) > 1:
            text += f"; {shape.reading_cpus:g} CPU more is needed to read with"
        if shape.labels:
            named = json.dumps(dict(shape.labels))
            text += f"; only nodes with workers.label_selector={named} are used"
        return text


@contextmanager
def asked_for(
    size: int, resources: Mapping[str, float], labels: dict[str, str]
) -> Iterator[PlacementGroup]:
    """A placement group of so many workers, as Ray Train asks for it; given up with the block."""
    selectors: Any = [labels] * size if labels else None
    bundles = [dict(resources)] * size
    group = placement_group(bundles, STRATEGY, bundle_label_selector=selectors)
    try:
        yield group
    finally:
        remove_placement_group(group)


def lacking_now(recipe: Recipe, *, use_gpu: bool) -> str:
    """Why the connected cluster is now too small for a run whose group is placed; empty if not.

    Args:
        use_gpu: whether its workers have GPUs. `workers.use_gpu=auto` was decided when it started:
            GPUs that join later are not for it.
    """
    cluster = shape(time.time())
    try:
        if not cluster.is_private:
            check_room(recipe.with_changes(workers={"use_gpu": use_gpu}), cluster)
    except ValueError as error:
        return f"the cluster has become too small, start nodes: {error}"
    return ""
