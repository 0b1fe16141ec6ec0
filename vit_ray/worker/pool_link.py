"""A worker's link to its pool: the next training, its ranks, and whether the pool has ended."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import ray

from vit_ray.worker.job import TrainJob

ANSWER_LIMIT_S: Final = 120.0
"""The server answers within seconds, even if there is no new training."""
REASSIGNED_S: Final = 10.0
"""How long a worker whose group has failed waits until the death of another is known."""


class Streams(Protocol):
    """One rank's streams; `batches` in `data/` describes the batches."""

    def training_batches(self, share: int, start: int, stop: int) -> Iterator[Any]:
        """Positions [start, stop) of the run in batches of `share` rows of a global batch."""

    def evaluation_batches(self, name: str, batch_size: int) -> Iterator[Any]:
        """An evaluation stream: each image once, in order."""


class OpensStreams(Protocol):
    """Opens the streams of a training for a worker."""

    def for_rank(self, group: str, rank: int, world_size: int, ranks: range) -> Streams:
        """`group` names the start of the worker group and the training; `ranks`: of this host."""


@dataclass(frozen=True)
class Assignment:
    """A training for all workers of a pool."""

    number: int
    """Counted from 0 in the pool; a training that is assigned again after a failure gets a new
    number."""
    job: TrainJob
    use_gpu: bool
    streams: OpensStreams
    """What the workers read."""


class Member(NamedTuple):
    """A rank's process, as the other ranks and the pool's server know it."""

    host: str
    """The address of its node."""
    node: str
    """Ray's id of its node."""
    pid: int
    store: str
    """On rank 0: address of the store by which the ranks find each other; else empty."""


class Meeting(NamedTuple):
    """All ranks of a group that is about to train."""

    group: str
    """The start of the workers, and after a space the number of the assignment."""
    members: tuple[Member, ...]
    """By rank."""


class GroupBrokenError(RuntimeError):
    """Another rank has died before all ranks were there."""


class PoolLink:
    """One worker's side of the link."""

    def __init__(self, server: Any, rank: int, world_size: int) -> None:
        """`server`: handle of the pool's actor."""
        self._server, self._rank, self._world_size = server, rank, world_size

    def assignments(self) -> Iterator[Assignment]:
        """The training in progress when this group was started, if there is one, and all later
        ones.

        Waits for each as long as the pool is open: the driver owns the pool, which ends with it.
        """
        last = -1
        while True:
            is_open, found = self._ask("next_assignment", last)
            if not is_open:
                return
            if found is not None:
                yield found
                last = found.number

    def meet(self, assignment: Assignment, member: Member, limit_s: float) -> Meeting:
        """Wait for the other ranks.

        Raises:
            GroupBrokenError: the training has been assigned again.
            TimeoutError: some rank is not there in time.
        """
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            meeting: Meeting | None = self._ask(
                "meet", assignment.number, self._rank, self._world_size, member
            )
            if meeting is not None:
                return meeting
        raise TimeoutError(f"not all {self._world_size} workers have started in {limit_s:g} s")

    def is_reassigned(self, assignment: Assignment, wait_s: float = 0.0) -> bool:
        """Whether the training is assigned again, now or within the time.

        This is the case if another worker's process has died, and is replaced.
        """
        return bool(self._ask("is_reassigned", assignment.number, wait_s))

    def end_silent(self, assignment: Assignment, ranks: list[int]) -> bool:
        """Have the processes of hanging ranks ended; False if that cannot help."""
        return bool(self._ask("end_silent", assignment.number, ranks))

    def end(self, assignment: Assignment) -> None:
        """Report that this rank has finished the training."""
        self._ask("end_rank", assignment.number, self._rank, self._world_size)

    def _ask(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self._server, method).remote(*arguments), timeout=ANSWER_LIMIT_S)
