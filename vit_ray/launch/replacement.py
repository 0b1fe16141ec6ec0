"""Workers whose process has died are replaced alone, and the others keep their processes.

Ray Train 2.60 does so for a backend with groups of replicas, in the places of those that failed.
The others leave their process group, and meet the new ones at the pool's server. All workers start
again where that is not enough: after an error that a worker has raised, when its node is gone
or left out, when the group changes its size.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

import ray

from vit_ray.launch.actor_calls import answer
from vit_ray.launch.failing_nodes import FAILING_NODES
from vit_ray.launch.failure_causes import has_died
from vit_ray.launch.group_callbacks import remove_groups
from vit_ray.outcomes import WorkerPlace
from vit_ray.ray_internals import (
    ControllerCallback,
    PreemptionCallback,
    ReplicaGroupCallback,
    WorkerGroupCallback,
)

MOST_REPLACED: Final = 8
"""Workers at a time: Ray starts one after the other, and a whole group at once."""
PLACED_S: Final = 120.0
"""Longest time for a new worker to start in the place of the old one, whose node may be dying."""


class Replacement:
    """Whether the last failure lets the other workers stay, in the process of the controller."""

    def __init__(self) -> None:
        self.is_allowed = False

    def judge(self, error: Any, places: Mapping[int, WorkerPlace]) -> None:
        """After a failure that the run survives.

        Args:
            places: of the workers by rank, as far as they are known.
        """
        failures = getattr(error, "worker_failures", {})
        self.is_allowed = False
        if 0 < len(failures) <= MOST_REPLACED and all(map(has_died, failures.values())):
            alive = {n["NodeID"] for n in ray.nodes() if n["Alive"]}  # type: ignore[no-untyped-call]
            alive -= FAILING_NODES.hosts.keys()
            self.is_allowed = all(r in places and places[r].node in alive for r in failures)


REPLACEMENT: Final = Replacement()


class ReplaceWorkers(ControllerCallback, WorkerGroupCallback):
    """Has Ray replace some workers or all, and the training assigned again to the group."""

    def __init__(self, server: Any) -> None:
        """`server`: handle of the pool's `PoolServer`."""
        self._server, self._pool, self._statuses = server, "", dict[int, Any]()
        self._placing: threading.Timer | None = None

    def after_controller_start(self, train_run_context: Any) -> None:
        """The name of its placement groups begins with that of the pool."""
        self._pool = train_run_context.run_config.name

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Ray replaces what has an error in the last of these."""
        self._statuses = worker_group_status.worker_statuses

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Workers are about to start after a failure, or for another size."""
        failed = sum(status.error is not None for status in self._statuses.values())
        is_alone = (
            REPLACEMENT.is_allowed and failed < len(self._statuses) == resize_decision.num_workers
        )
        if is_alone and self._reassign(alone=True):
            # Ray waits for them without a limit. Without their places it starts all again.
            self._placing = threading.Timer(PLACED_S, remove_groups, [self._pool])
            self._placing.daemon = True
            self._placing.start()
        else:
            self._statuses.clear()
        REPLACEMENT.is_allowed = False

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> None:
        """All workers are new."""
        self._reassign(alone=False)

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """The workers have started, or could not."""
        if self._placing is not None:
            self._placing.cancel()
            self._placing = None

    def _reassign(self, *, alone: bool) -> bool:
        return bool(answer(self._server.reassign.remote(alone=alone), "the pool's server"))


class WatchPreemption(PreemptionCallback, ReplicaGroupCallback):
    """Ray's, which it leaves out where single workers are replaced: it would keep the old ones."""

    def after_worker_group_start(self, worker_group: Any) -> None:
        """All workers are new."""
        self._group = worker_group
        super().after_worker_group_start(worker_group)

    def after_replica_group_start(self, replica_group: Any) -> None:
        """A worker was replaced."""
        self.after_worker_group_start(self._group)
