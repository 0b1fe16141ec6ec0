"""A worker whose process has died is replaced alone, and the others keep their processes.

Ray Train 2.60 does this for a backend with groups of replicas, in the places of the failed ones.
The other workers leave their process group, and meet the new ones at the pool's server. All workers
restart when that is not enough: after an error raised by a worker, when its node has gone or is
left out, or when the group changes its size.
"""

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

from vit_ray.launch.cluster.connection import live_nodes
from vit_ray.launch.pool.actor_calls import answer
from vit_ray.launch.pool.failing_nodes import FAILING_NODES
from vit_ray.launch.pool.failure_causes import is_gone
from vit_ray.outcomes import WorkerPlace
from vit_ray.ray_internals import (
    ControllerCallback,
    PreemptionCallback,
    ReplicaGroupCallback,
    WorkerGroupCallback,
)

MOST_REPLACED: Final = 8
"""Workers at a time: Ray starts single workers one after another, but a whole group at once."""
PLACED_S: Final = 60.0
"""Longest time for new workers to start in the old places, whose node may be dying."""


class Replacement:
    """Whether the last failure lets the other workers stay; in the controller's process."""

    def __init__(self) -> None:
        self.is_allowed = False

    def judge(self, error: Any, places: Mapping[int, WorkerPlace]) -> None:
        """Called after a failure that the run survives.

        A worker that cannot be reached may be on a dying node, and Ray would place a new worker
        there before noticing.

        Args:
            places: of the workers by rank, as far as known.
        """
        failures = getattr(error, "worker_failures", {})
        self.is_allowed = False
        if 0 < len(failures) <= MOST_REPLACED and all(map(is_gone, failures.values())):
            nodes = {places[rank].node for rank in failures if rank in places}
            alive = {node["NodeID"] for node in live_nodes()}
            is_known = failures.keys() <= places.keys()
            self.is_allowed = is_known and nodes <= alive - FAILING_NODES.hosts.keys()


REPLACEMENT: Final = Replacement()


class ReplaceWorkers(ControllerCallback, WorkerGroupCallback):
    """Makes Ray replace some workers or all, and assigns the training to the group again."""

    def __init__(self, server: Any) -> None:
        """`server`: handle of the pool's `PoolServer`."""
        self._server, self._statuses = server, dict[int, Any]()
        self._are_placed: threading.Event | None = None

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Ray replaces workers with an error in the last of these."""
        self._statuses = worker_group_status.worker_statuses

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Workers are about to start after a failure, or for another size."""
        failed = sum(status.error is not None for status in self._statuses.values())
        is_alone = (
            REPLACEMENT.is_allowed and failed < len(self._statuses) == resize_decision.num_workers
        )
        if is_alone and self._reassign(alone=True):
            self._are_placed = threading.Event()
            threading.Thread(target=_limit_wait, args=(self._are_placed,), daemon=True).start()
        else:
            self._statuses.clear()
        REPLACEMENT.is_allowed = False

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> None:
        """All workers are new."""
        self._reassign(alone=False)

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """The workers have started, or could not."""
        if self._are_placed is not None:
            self._are_placed.set()
            self._are_placed = None

    def _reassign(self, *, alone: bool) -> bool:
        return bool(answer(self._server.reassign.remote(alone=alone), "the pool's server"))


def _limit_wait(are_placed: threading.Event) -> None:
    """End this process, the controller's, if new workers do not start: its successor starts all.

    Ray waits for them without a limit, even after their placement group was removed: an actor that
    waits for a group which is being moved off a dead node is never notified.
    """
    if not are_placed.wait(PLACED_S):
        print(
            f"a worker did not start again within {PLACED_S:g} s; all workers restart",
            file=sys.stderr,
        )
        os._exit(1)


class WatchPreemption(PreemptionCallback, ReplicaGroupCallback):
    """Ray's method, which it skips when single workers are replaced: it would keep the old."""

    def after_worker_group_start(self, worker_group: Any) -> None:
        """All workers are new."""
        self._group = worker_group
        super().after_worker_group_start(worker_group)

    def after_replica_group_start(self, replica_group: Any) -> None:
        """A worker was replaced."""
        self.after_worker_group_start(self._group)
