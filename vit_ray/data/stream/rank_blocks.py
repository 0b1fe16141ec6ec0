"""Reads a stream once and deals its blocks to the ranks of a host, each at its own pace."""

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
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


class _Queue:
    def __init__(self, lock: threading.Lock) -> None:
        self.blocks: deque[ray.ObjectRef[Block]] = deque()
        self.num_taken = 0
        self.changed = threading.Condition(lock)


class Reading:
    """One reading of a stream: a thread makes its blocks in their order and queues them.

    It makes more only while a rank waits, so that Ray Data sees how fast they are taken.

    Args:
        read: gives the blocks of the stream; called by the thread.
        ranks: that blocks are dealt to.
    """

    def __init__(self, read: Callable[[], Blocks], ranks: range) -> None:
        self._read, self._ranks = read, ranks
        lock = threading.Lock()
        self._queues = {rank: _Queue(lock) for rank in ranks}
        # Ranks that have asked for a block that is not there.
        self._waiting: set[int] = set()
        # Its lock guards all fields; notified when a rank waits, and at the end.
        self._asked = threading.Condition(lock)
        self._has_ended = False
        # Why it ended before the stream did; and the traceback as it was, because each rank that
        # the error is raised to adds its own lines.
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        threading.Thread(target=self._make_blocks, name="blocks", daemon=True).start()

    def next_block(self, rank: int, index: int) -> ray.ObjectRef[Block] | None:
        """The rank's next block, or None after its last; called by one thread for each rank.

        Args:
            index: how many blocks the rank has had.

        Raises:
            StreamLostError: it was given another number of blocks, or the reading was closed.
            Exception: any error of a reading task.
        """
        with self._asked:
            if rank not in self._ranks:
                raise StreamLostError(
                    f"rank {rank} asked the server of ranks {self._ranks.start} to "
                    f"{self._ranks.stop - 1}: several Ray nodes have the same address, and their "
                    "ranks are not consecutive; give each node its own address"
                )
            queue = self._queues[rank]
            if index != queue.num_taken:
                raise StreamLostError(
                    f"rank {rank} has had {index} blocks, but was given {queue.num_taken}"
                )
            if not queue.blocks:
                self._waiting.add(rank)
                self._asked.notify()
            # no limit: the thread deals a block or ends, and train.step_timeout_s ends the step
            queue.changed.wait_for(lambda: queue.blocks or self._has_ended)
            if queue.blocks:
                queue.num_taken += 1
                return queue.blocks.popleft()
            if self._error is not None:
                # To every rank: a stream that failed has not ended.
                raise self._error.with_traceback(self._traceback)
            return None

    def close(self) -> None:
        """Stop reading, after the block that is being made; those that wait can be taken."""
        self._end(StreamLostError("the stream was closed before its end"))

    def _make_blocks(self) -> None:
        error: BaseException | None = None
        try:
            with contextlib.closing(self._read()) as blocks:
                while True:
                    with self._asked:
                        # no limit: a rank asks or leaves, or the next pass of its stream closes
                        # this one
                        self._asked.wait_for(lambda: self._waiting or self._has_ended)
                        if self._has_ended:
                            break
                    if (block := next(blocks, None)) is None:
                        break
                    with self._asked:
                        queue = self._queues[block.rank]
                        queue.blocks.append(block.block)
                        self._waiting.discard(block.rank)
                        queue.changed.notify()
        except BaseException as raised:
            error = raised
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._asked:
            if self._has_ended:
                return
            self._has_ended, self._error = True, error
            self._traceback = None if error is None else error.__traceback__
            self._asked.notify()
            for queue in self._queues.values():
                queue.changed.notify_all()


def blocks_of(segments: Iterator[Segment]) -> Blocks:
    """The blocks of consecutive sets; each set starts while the last tasks of the previous one run.

    Closing it drops the executions in progress, which ends their tasks.
    """

    # The execution of a set ends when its iterator is dropped.
    def start_next() -> tuple[Segment, Iterator[Any]] | None:
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
        self._readings: OrderedDict[Hashable, list[RankBlock]] = OrderedDict()
        self._lock = threading.Lock()

    def blocks(self, key: Hashable, read: Callable[[], Blocks]) -> Blocks:
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
