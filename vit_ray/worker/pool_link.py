"""A worker's link to its pool: which training is next, and that it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import ray

from vit_ray.worker.job import TrainJob

ANSWER_LIMIT_S: Final = 120.0
"""The server answers within seconds, also when there is no new training."""


class Streams(Protocol):
    """One rank's streams; `batches` of the data room has the batch contract."""

    def training_blocks(self, share: int, start: int, stop: int) -> Iterator[Any]:
        """Positions [start, stop) of the run as they travel, `share` rows of a global batch."""

    def training_batches(self, share: int, start: int, stop: int) -> Iterator[Any]:
        """The same in batches of `share` rows."""

    def evaluation_batches(self, name: str, batch_size: int, start: int = 0) -> Iterator[Any]:
        """An evaluation stream without its first `start` images."""


class OpensStreams(Protocol):
    """Opens the streams of a training for a worker."""

    def for_rank(self, group: str, rank: int, world_size: int, ranks: range) -> Streams:
        """`group` names the start of the worker group and the training; `ranks`: of this host."""


@dataclass(frozen=True)
class Assignment:
    """A training for all workers of a pool."""

    number: int
    """Counted from 0 in the pool."""
    job: TrainJob
    use_gpu: bool
    streams: OpensStreams
    """What the workers read."""


class PoolLink:
    """One worker's side; `server` is the handle of the pool's actor."""

    def __init__(self, server: Any, group: str, rank: int, world_size: int) -> None:
        """`group`: names this start of the worker group."""
        self.server, self.group = server, group
        self._rank, self._world_size = rank, world_size

    def assignments(self) -> Iterator[Assignment]:
        """The training under way when this group was started, if there is one, and all later ones.

        Waits for each as long as the pool is open: the driver owns it, and ends it with itself.
        """
        last = -1
        while True:
            is_open, found = ray.get(
                self.server.next_assignment.remote(last), timeout=ANSWER_LIMIT_S
            )
            if not is_open:
                return
            if found is not None:
                yield found
                last = found.number

    def end(self, assignment: Assignment) -> None:
        """Report that this rank has finished the training."""
        ray.get(
            self.server.end_rank.remote(
                assignment.number, self.group, self._rank, self._world_size
            ),
            timeout=ANSWER_LIMIT_S,
        )
