"""Reads a stream once and deals its blocks to the ranks of a host.

Each rank takes its blocks at its own pace, and one of those that wait makes the next ones.
"""

import contextlib
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ray
from ray.data.block import Block

from vit_ray.data.stream.ray_datasets import Segment


class StreamLostError(RuntimeError):
    """A stream and its ranks no longer agree; a new attempt starts at a checkpoint."""


class RankBlock(NamedTuple):
    """A block of a stream, its rank (`Segment.ranks`), and its bytes."""

    rank: int
    block: ray.ObjectRef[Block]
    size: int


Blocks = Generator[RankBlock, None, None]


class Reading:
    """Makes the blocks of a stream, and queues them for each of the ranks."""

    def __init__(self, read: Callable[[], Blocks], ranks: range | None = None) -> None:
        """
        Args:
            read: gives the blocks of the stream; called when the first one is taken.
            ranks: that blocks are dealt to; another rank is refused, because its blocks would
                accumulate.
        """
        self._blocks, self._ranks = _begun_later(read), ranks
        self._lock = threading.Lock()
        self._is_busy = False
        """Whether a thread makes the next block."""
        self._is_closed = False
        self._has_all = False
        """Whether the stream has ended and only its queues are left to take."""
        self._num_ended = 0
        """Ranks that have taken their last block."""
        self._error: BaseException | None = None
        self._ready: defaultdict[int, deque[RankBlock]] = defaultdict(deque)
        self._num_taken: Counter[int] = Counter()
        self.held_bytes = 0
        """Size of the blocks in its queues."""
        self.waiting: dict[int, threading.Event] = {}
        """Of each rank that waits: set when its block is there, or no thread makes blocks."""

    def next_block(self, rank: int, index: int) -> ray.ObjectRef[Block] | None:
        """The rank's next block, or None after its last; called by one thread for each rank.

        Args:
            index: how many blocks the rank has had.

        Raises:
            StreamLostError: it was given another number of blocks, or the reading was closed.
            Exception: any error of a reading task.
        """
        self._check(rank, index)
        if (found := self._taken(rank)) is not None:
            return found
        try:
            if self._takes_turn(rank):
                try:
                    while not self._ready[rank] and self._make_one():
                        pass
                finally:
                    self._give_turn()
        finally:
            self._stop_if_closed()
        if (found := self._taken(rank)) is not None:
            return found
        with self._lock:
            if not self._has_all:  # it was closed, which is not its end
                raise StreamLostError(f"the stream of rank {rank} was closed before its end")
            self._num_ended += 1
        if self._ranks is not None and self._num_ended == len(self._ranks):
            self.close()
        return None

    def close(self) -> None:
        """Stop reading; a thread that is making a block stops after it."""
        with self._lock:
            self._is_closed = True
            for waiting in self.waiting.values():
                waiting.set()
        self._stop_if_closed()

    def _check(self, rank: int, index: int) -> None:
        if self._ranks is not None and rank not in self._ranks:
            raise StreamLostError(
                f"rank {rank} asked the server of ranks {self._ranks.start} to "
                f"{self._ranks.stop - 1}: several Ray nodes have the same address, and their ranks "
                "are not consecutive; give each node its own address"
            )
        if index != self._num_taken[rank]:
            raise StreamLostError(
                f"rank {rank} has had {index} blocks, but was given {self._num_taken[rank]}"
            )

    def _taken(self, rank: int) -> ray.ObjectRef[Block] | None:
        """The next block of a rank; None if it is not there."""
        with self._lock:
            if not (queue := self._ready[rank]):
                return None
            block = queue.popleft()
            self.held_bytes -= block.size
            self._num_taken[rank] += 1
            return block.block

    def _takes_turn(self, rank: int) -> bool:
        """Wait until no other thread makes blocks; False: the block came, or it was closed."""
        while True:
            with self._lock:
                if not self._is_busy or self._ready[rank] or self._is_closed:
                    self.waiting.pop(rank, None)
                    has_turn = not (self._is_busy or self._ready[rank] or self._is_closed)
                    self._is_busy = self._is_busy or has_turn
                    return has_turn
                waiting = self.waiting.setdefault(rank, threading.Event())
                waiting.clear()
            waiting.wait()  # no limit: whoever makes blocks sets it

    def _give_turn(self) -> None:
        """Let the rank that has waited longest make blocks, if one waits."""
        with self._lock:
            self._is_busy = False
            for waiting in self.waiting.values():
                waiting.set()
                return

    def _make_one(self) -> bool:
        """Make the next block and put it in its queue; False if there is none."""
        if self._error is not None:
            raise self._error  # to every rank: a stream that failed has not ended
        if self._is_closed:
            return False
        try:
            found = None if self._has_all else next(self._blocks, None)
        except BaseException as error:
            self._error = error
            raise
        with self._lock:
            if found is None:
                self._has_all = True
                return False
            self._ready[found.rank].append(found)
            self.held_bytes += found.size
            if waiting := self.waiting.get(found.rank):
                waiting.set()
            return True

    def _stop_if_closed(self) -> None:
        with self._lock:
            if not self._is_closed or self._is_busy:
                return
            self._is_busy = True
        try:
            self._blocks.close()
        finally:
            self._give_turn()


def _begun_later(read: Callable[[], Blocks]) -> Blocks:
    """The blocks of `read()`, which is only called when the first one is taken."""
    yield from read()


def blocks_of(segments: Iterator[Segment]) -> Blocks:
    """The blocks of consecutive sets; each set starts while the last tasks of the previous one run.

    Closing it drops the executions in progress, which ends their tasks.
    """

    def start_next() -> tuple[Segment, Iterator[Any]] | None:
        """Plan and execute a set; its execution ends when the iterator is dropped."""
        if (segment := next(segments, None)) is None:
            return None
        bundles = segment.dataset.iter_internal_ref_bundles()
        return segment, (entry for bundle in bundles for entry in bundle.blocks)

    with ThreadPoolExecutor(1, "segments") as planner:
        started = planner.submit(start_next)
        while (found := started.result()) is not None:  # no limit: planning reads nothing
            segment, entries = found
            left = range(len(segment.ranks) - 1, -1, -1)
            for rank, entry, num_left in zip(segment.ranks, entries, left, strict=True):
                if num_left == segment.next_at:
                    started = planner.submit(start_next)
                yield RankBlock(rank, entry.ref, entry.metadata.size_bytes or 0)


class KeptBlocks:
    """Blocks of whole readings, up to a number of bytes; the last used stay longest."""

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = most_bytes
        self._readings: OrderedDict[bytes, list[RankBlock]] = OrderedDict()
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._readings.clear()

    def blocks(self, key: bytes, read: Callable[[], Blocks]) -> Blocks:
        """The kept blocks of the reading `key`, or else those from `read`."""
        with self._lock:
            kept = self._readings.get(key)
            if kept is not None:
                self._readings.move_to_end(key)
        if kept is not None:
            yield from kept
            return
        reading: list[RankBlock] = []
        size = 0
        with contextlib.closing(read()) as blocks:
            for block in blocks:
                size += block.size
                if size <= self._most_bytes:
                    reading.append(block)
                else:
                    reading.clear()
                yield block
        with self._lock:
            if size <= self._most_bytes:
                self._readings[key] = reading
            while sum(b.size for r in self._readings.values() for b in r) > self._most_bytes:
                self._readings.popitem(last=False)
