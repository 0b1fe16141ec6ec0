"""Nodes on which a worker group fails twice in a row, and how a group avoids them.

This is known only in the process of the group's controller, which also has its policies.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import ray

from vit_ray.launch.cluster.connection import live_nodes
from vit_ray.outcomes import EventKind, WorkerPlace
from vit_ray.ray_internals import ControllerCallback
from vit_ray.worker.job import TrainJob

IN_A_ROW_S: Final = 3600.0
"""Failures on a node that are further apart are not counted as a defect of it."""
LEFT_OUT_S: Final = 6 * 3600.0
"""After this time a node, perhaps repaired, is tried again; then a single failure is enough."""


class FailingNodes:
    """Nodes on which the group has failed twice in a row, in the process of its controller."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[str, float]] = {}
        """Ray's node id to host, and the time until which the node is left out."""
        self._last: tuple[str, float] = "", 0.0

    @property
    def hosts(self) -> dict[str, str]:
        """The nodes that are left out now, by Ray's node id."""
        now_s = time.monotonic()
        return {node: host for node, (host, until_s) in self._left.items() if now_s < until_s}

    def note(self, place: WorkerPlace | None) -> None:
        """Count a failure of the group: on a single node, or not (None)."""
        node, now_s = (place.node if place else ""), time.monotonic()
        before, at_s = self._last
        self._last = node, now_s
        is_second = node == before and now_s - at_s < IN_A_ROW_S
        if place and (is_second or node in self._left):
            self._left[node] = place.host, now_s + LEFT_OUT_S


FAILING_NODES: Final = FailingNodes()


class LeaveOutNodes(ControllerCallback):
    """Places the group on nodes that have not failed twice in a row, if these have room for it.

    It runs in the controller's process, like the policy that counts failures.
    """

    def __init__(self, current_job: Callable[[], TrainJob | None]) -> None:
        self._current_job = current_job
        self._noted: set[str] = set()

    def on_controller_start_worker_group(
        self, *, scaling_config: Any, num_workers: int
    ) -> dict[str, str] | None:
        """Ray's label selector for each worker; None if any node is allowed."""
        hosts = FAILING_NODES.hosts
        wanted = scaling_config._resources_per_worker_not_none
        labels = scaling_config.label_selector or {}
        if not hosts or _room(wanted, labels) < num_workers:
            return None
        if news := hosts.keys() - self._noted:
            self._noted |= news
            named = ", ".join(sorted(hosts[node] for node in news))
            text = (
                f"{named}: workers there have failed twice in a row, so the group is placed on "
                "other nodes; check its GPUs and its system log"
            )
            with contextlib.suppress(ray.exceptions.RayError):
                if (job := self._current_job()) is not None:
                    job.record.event(EventKind.NODE_LEFT_OUT, text, 0)
        return {**labels, "ray.io/node-id": f"!in({','.join(sorted(hosts))})"}


def _room(wanted: Mapping[str, float], labels: Mapping[str, str]) -> int:
    """Workers that fit on the nodes with the labels, without those that are left out."""
    left_out = FAILING_NODES.hosts
    held = [n["Resources"] for n in live_nodes(labels) if n["NodeID"] not in left_out]
    needs = [(key, need) for key, need in wanted.items() if need > 0]
    return sum(int(min(one.get(key, 0.0) // need for key, need in needs)) for one in held)
