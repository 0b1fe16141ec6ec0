"""Gives Ray Data's scheduling loop a pause while nobody takes what has been read."""

import time
from typing import Any, Final

from vit_ray.ray_internals import ExecutionCallback

PAUSE_S: Final = 0.02
"""Short beside the time that a full buffer lasts, unless it is of a block or two."""


class PauseWhileFull(ExecutionCallback):
    """A callback of Ray Data, one object for each execution, called after each turn of its loop.

    A turn of the loop waits for its tasks. While the buffer is full none may be started, and
    nothing waits: the loop would take a core from training (Ray 2.60,
    `streaming_executor_state.process_completed_tasks`).
    """

    def on_execution_step(self, executor: Any) -> None:
        """Wait if the next turn would not, and there is one."""
        operators = executor._topology
        has_tasks = any(op.num_active_tasks() for op in operators)
        if not has_tasks and not all(op.has_completed() for op in operators):
            time.sleep(PAUSE_S)
