"""What a worker group has instead of Ray Train's barrier.

`ray.train.report`, `ray.train.get_preemption_info` and `ray.train.collective` need the barrier;
nothing here calls them.
"""

from typing import Any


class NoBarrier:
    """Runs as an actor; workers meet in their own process groups, and report to the run's record.

    Ray Train's imports Ray Train: a second of CPU time while the workers import torch.
    """

    def __init__(self, **_: Any) -> None:
        """Ray Train gives time limits."""

    def reset(self) -> None:
        """Called when a worker is replaced."""

    def set_required_ranks(self, ranks: Any) -> bool:
        """Called when a node is preempted; every set is accepted."""
        return True
