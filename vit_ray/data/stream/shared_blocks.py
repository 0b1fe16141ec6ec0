"""Reads a stream once and deals its blocks to the ranks of one training, or of several.

The order of a stream is arithmetic, so trainings with equal streams can use the same blocks. Each
takes them at its own pace; blocks that a slow one has not taken yet stay in the object store. If
they reach a limit, the others wait for it. If it then takes no block for 20 s, it gets its own
reading, and the others continue.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import ray
from ray.data.block import Block

from vit_ray.data.stream.ray_datasets import Segment

PATIENCE_S: Final = 20.0
"""How long others wait for a reader that takes no block."""
GATHER_S: Final = 20.0
"""How long a reading waits for expected readers before they would miss its first blocks."""
LOOK_S: Final = 1.0
"""How often those limits are checked."""


class StreamLostError(RuntimeError):
    """A stream and its ranks no longer agree; a new attempt starts at a checkpoint."""


class RankBlock(NamedTuple):
    """A block of a stream, its rank or piece of a rank (`Segment.ranks`), and its bytes."""

    rank: int
    block: ray.ObjectRef[Block]
    size: int


Blocks = Generator[RankBlock, None, None]


class Reader:
    """One training's part of a reading: a queue of blocks for each of its ranks."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.num_waiting = 0
        """Ranks that have asked for a block and found none in their queue."""
        self.has_all = False
        """Whether the stream has ended and only its queues are left to take."""
        self.num_ended = 0
        """Ranks that have taken their last block."""
        self.held_bytes = 0
        """Size of the blocks in its queues."""
        self.behind_s = time.monotonic()
        """When it last took a block, or, if later, when its queues reached the limit."""
        self.waiting: dict[int, threading.Event] = {}
        """Of each rank that waits: set when its block is there, or no thread makes blocks."""
        self._ready: defaultdict[int, deque[RankBlock]] = defaultdict(deque)
        self._num_taken: Counter[int] = Counter()

    def put(self, block: RankBlock, most_bytes: float = 0.0) -> None:
        """Add a block to the queue of its rank; `most_bytes` is the limit."""
        if self.held_bytes < most_bytes <= self.held_bytes + block.size:
            self.behind_s = time.monotonic()
        self._ready[block.rank].append(block)
        self.held_bytes += block.size
        if waiting := self.waiting.get(block.rank // self.reading.pieces):
            waiting.set()

    def has(self, rank: int) -> bool:
        """Whether the next block of a rank is there."""
        return bool(self._queue(rank))

    def _queue(self, rank: int) -> deque[RankBlock]:
        """The queue of a rank, or of the piece whose turn it is."""
        pieces = self.reading.pieces
        return self._ready[rank * pieces + self._num_taken[rank] % pieces]

    def take(self, rank: int) -> ray.ObjectRef[Block]:
        """The next block of a rank that has one."""
        block = self._queue(rank).popleft()
        self.held_bytes -= block.size
        self._num_taken[rank] += 1
        self.behind_s = time.monotonic()
        return block.block

    def check(self, rank: int, index: int) -> None:
        """
        Raises:
            StreamLostError: the rank was not given `index` blocks.
        """
        if index != self._num_taken[rank]:
            raise StreamLostError(
                f"rank {rank} has had {index} blocks, but was given {self._num_taken[rank]}"
            )

    def next_block(self, rank: int, index: int) -> ray.ObjectRef[Block] | None:
        """The rank's next block, or None after its last; called by one thread for each rank.

        Args:
            index: how many blocks the rank has had.

        Raises:
            StreamLostError: it was given another number of blocks, or the reader was closed.
            Exception: any error of a reading task.
        """
        return self.reading.next_block(self, rank, index)

    def close(self) -> None:
        """Stop taking blocks."""
        self.reading.leave(self)


class Reading:
    """Makes the blocks of a stream once, for all of its readers."""

    def __init__(
        self,
        read: Callable[[int], Blocks],
        ranks: range | None = None,
        *,
        most_bytes: Callable[[], float] = lambda: 0.0,
        expected: int = 1,
        first: int = 0,
        pieces: int = 1,
        changed: threading.Condition | None = None,
    ) -> None:
        """
        Args:
            read: `read(n)` gives the blocks of the stream from block n on.
            ranks: that blocks are dealt to; another rank is refused, because its blocks would
                accumulate.
            most_bytes: returns the limit on how far a reader may be behind the fastest one; a new
                reader can join until this many bytes have been read.
            expected: readers that will join; reading waits for them at that point.
            first: number of the block to begin with.
            pieces: of each rank's share of a batch; a rank takes a block of each in turn.
            changed: the condition of the reading whose reader this one takes over.
        """
        self._read, self._ranks, self._most_bytes = read, ranks, most_bytes
        self.pieces = pieces
        self._blocks, self._num_read = _begun_later(read, first), first
        self._is_busy = False
        """Whether a thread makes the next block."""
        self._changed = changed or threading.Condition()
        self._readers: list[Reader] = []
        self._since_start: list[RankBlock] | None = []
        """All blocks so far, for a new reader; None once it would be too late."""
        self._bytes_since_start = 0
        self._expected, self._gathered_s = expected, time.monotonic() + GATHER_S
        self._has_ended = False
        self._error: BaseException | None = None

    @property
    def can_be_joined(self) -> bool:
        """Whether a new reader still gets every block."""
        return self._since_start is not None and self._error is None

    def new_reader(self) -> Reader | None:
        """Add a reader that gets every block; None if it is too late."""
        with self._changed:
            if self._since_start is None or self._error is not None:
                return None
            reader = Reader(self)
            for block in self._since_start:
                reader.put(block)
            self._readers.append(reader)
            self._changed.notify_all()
            return reader

    def leave(self, reader: Reader) -> None:
        """Remove a reader. After the last one is removed, reading stops with the current block."""
        with self._changed:
            mine = reader.reading
            if reader in mine._readers:
                mine._readers.remove(reader)
                mine._expected -= 1
                for waiting in reader.waiting.values():
                    waiting.set()
            if not mine._readers:
                mine._has_ended, mine._since_start = True, None
            self._changed.notify_all()
        mine._stop_if_ended()

    def _stop_if_ended(self) -> None:
        """Stop reading; a thread that is making a block stops after it."""
        with self._changed:
            if not self._has_ended or self._is_busy:
                return
            self._is_busy = True
        try:
            self._blocks.close()
        finally:
            self._give_turn()

    def next_block(self, reader: Reader, rank: int, index: int) -> ray.ObjectRef[Block] | None:
        """As `Reader.next_block`."""
        if self._ranks is not None and rank not in self._ranks:
            raise StreamLostError(
                f"rank {rank} asked the server of ranks {self._ranks.start} to "
                f"{self._ranks.stop - 1}: several Ray nodes have the same address, and their ranks "
                "are not consecutive; give each node its own address"
            )
        with self._changed:
            reader.check(rank, index)
            if reader.has(rank):
                return self._take(reader, rank)
            reading = reader.reading  # which stays as long as a rank waits
            reader.num_waiting += 1
            self._changed.notify_all()
        try:
            if reading._takes_turn(reader, rank):
                try:
                    while not reader.has(rank) and reading._make_one(reader):
                        pass
                finally:
                    reading._give_turn()
        finally:
            with self._changed:
                reader.num_waiting -= 1
            reading._stop_if_ended()
        with self._changed:
            if reader.has(rank):
                return self._take(reader, rank)
            if not reader.has_all:  # it was closed, which is not its end
                raise StreamLostError(f"the stream of rank {rank} was closed before its end")
            reader.num_ended += 1
        if self._ranks is not None and reader.num_ended == len(self._ranks):
            reader.close()
        return None

    def _takes_turn(self, reader: Reader, rank: int) -> bool:
        """Wait until no other thread makes blocks; false: the block came, or the reader closed."""
        while True:
            with self._changed:
                if not self._is_busy:
                    reader.waiting.pop(rank, None)
                    self._is_busy = True
                    return True
                if reader.has(rank) or reader not in self._readers:
                    reader.waiting.pop(rank, None)
                    return False
                waiting = reader.waiting.setdefault(rank, threading.Event())
                waiting.clear()
            waiting.wait()  # no limit: whoever makes blocks sets it

    def _give_turn(self) -> None:
        """Let a waiting rank make blocks, if there is one: of its reader, the one that has waited
        longest.
        """
        with self._changed:
            self._is_busy = False
            for reader in self._readers:
                for waiting in reader.waiting.values():
                    waiting.set()
                    return

    def _take(self, reader: Reader, rank: int) -> ray.ObjectRef[Block]:
        block = reader.take(rank)
        self._changed.notify_all()
        return block

    def _make_one(self, reader: Reader) -> bool:
        """Make the next block and give it to all readers; False if there is none."""
        with self._changed:
            while self._waits(reader):
                self._changed.wait(LOOK_S)
            if reader not in self._readers:
                return False
            if self._error is not None:
                raise self._error  # to every rank: a stream that failed has not ended
        found = None
        if not self._has_ended:
            try:
                found = next(self._blocks, None)
            except BaseException as error:
                self._error = error
                raise
        with self._changed:
            if found is None or not self._readers:
                self._has_ended = True
                for one in self._readers:
                    one.has_all = True
                return False
            self._num_read += 1
            for one in self._readers:
                one.put(found, self._most_bytes())
            if self._since_start is not None:
                self._since_start.append(found)
                self._bytes_since_start += found.size
            return True

    def _waits(self, reader: Reader) -> bool:
        """Whether reading must wait for slow or missing readers; slow ones may get their own
        reading.
        """
        if self._has_ended or reader not in self._readers:
            return False
        now_s, most_bytes = time.monotonic(), self._most_bytes()
        if self._since_start is not None and self._bytes_since_start >= most_bytes:
            if len(self._readers) < self._expected and now_s < self._gathered_s:
                return True
            self._since_start = None
        waits = False
        for one in list(self._readers):
            if one is reader or one.num_waiting or one.held_bytes < most_bytes:
                continue
            if now_s - one.behind_s < PATIENCE_S:
                waits = True
            else:
                self._part(one)
        return waits

    def _part(self, reader: Reader) -> None:
        """Give a reader its own reading, from the next block on."""
        own = Reading(
            self._read,
            self._ranks,
            first=self._num_read,
            pieces=self.pieces,
            changed=self._changed,
        )
        own._since_start = None
        own._readers.append(reader)
        self._readers.remove(reader)
        reader.reading = own


def _begun_later(read: Callable[[int], Blocks], first: int) -> Blocks:
    """The blocks of `read(first)`, which is only called when the first one is taken."""
    yield from read(first)


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
