"""The process that runs the streams of a worker group, and the iterators of its ranks.

One actor serves training and every evaluation, for one training after another: it executes the
Ray Data sets and deals their blocks to the ranks in turn, which is what makes global batches
independent of who reads (`order.partition`). A rank asks for one block after the other. The decoded
blocks of evaluations are kept while they are small: a run, and the trials of a sweep, evaluate on
the same images again and again. That is done on a single node.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pickle
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final

import ray
import ray.data
from ray.data.block import Block

from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.blocks import Batch, cut
from vit_ray.data.stream.ray_datasets import evaluation_datasets, training_datasets, warm_up
from vit_ray.ray_internals import keep_no_dataset_statistics

KEPT_SHARE: Final = 0.02
"""Of the object store, for decoded evaluation images of one lane at most."""


@dataclass(frozen=True)
class Pass:
    """One reading of a stream from its start to its end by one worker group."""

    specs: ray.ObjectRef[dict[str, StreamSpec]]
    """What each stream reads: `train`, and names of evaluation streams."""
    stream: str
    """Which of them."""
    group: str
    """The start of a worker group, and after a space its training where it takes several."""
    number: int
    """How often this group has read the stream before."""
    world_size: int
    batch_size_per_rank: int
    start: int = 0
    """Training: samples seen before; positions over all epochs joined. Evaluation: left out."""
    stop: int = 0
    """Training: samples seen after."""

    def replaces(self, other: Pass) -> bool:
        """Whether nobody reads `other` any more once this one is being read."""
        if self.group != other.group:
            return True
        return self.stream == other.stream and self.number > other.number


class StreamLostError(RuntimeError):
    """A stream cannot go on where its ranks are; a new attempt starts at a checkpoint."""


SizedBlock = tuple[ray.ObjectRef[Block], int]
"""A block and its bytes."""


class DealtBlocks:
    """Block j for rank j mod `world_size`."""

    def __init__(self, blocks: Generator[SizedBlock, None, None], world_size: int) -> None:
        self._blocks = blocks
        self._ready: list[deque[ray.ObjectRef[Block]]] = [deque() for _ in range(world_size)]
        self._num_taken = [0] * world_size
        self._turn = 0
        self._is_closed = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def next_block(self, rank: int, index: int) -> ray.ObjectRef[Block] | None:
        """The rank's next block, or None after its last; called by one thread for each rank.

        Args:
            index: how many blocks the rank has had.

        Raises:
            StreamLostError: it was given another number of them.
            Exception: whatever a reading task raised.
        """
        if index != self._num_taken[rank]:
            raise StreamLostError(
                f"rank {rank} has had {index} blocks, but was given {self._num_taken[rank]}"
            )
        mine = self._ready[rank]
        while not mine:
            with self._lock:
                if not mine and not self._deal():
                    return None
        self._num_taken[rank] += 1
        return mine.popleft()

    def _deal(self) -> bool:
        if self._error is not None:
            raise self._error  # to every rank: a stream that failed has not ended
        try:
            block = next(self._blocks, None)
        except BaseException as error:
            self._error = error
            raise
        if self._is_closed:
            self._blocks.close()
        if block is None or self._is_closed:
            return False
        self._ready[self._turn].append(block[0])
        self._turn = (self._turn + 1) % len(self._ready)
        return True

    def close(self) -> None:
        """Stop reading, at the latest with the block that is being waited for."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            self._blocks.close()
            self._lock.release()


def _blocks_of(datasets: Iterator[ray.data.Dataset]) -> Generator[SizedBlock, None, None]:
    """Of consecutive sets, each made and executed when the one before it has been dealt.

    Closing it drops the execution under way, which ends its tasks.
    """
    for dataset in datasets:
        for bundle in dataset.iter_internal_ref_bundles():
            for entry in bundle.blocks:
                yield entry.ref, entry.metadata.size_bytes or 0


class KeptBlocks:
    """Blocks of whole readings, of at most some bytes in all; the last used stay longest."""

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = most_bytes
        self._readings: OrderedDict[bytes, list[SizedBlock]] = OrderedDict()
        self._lock = threading.Lock()

    def blocks(
        self, key: bytes, read: Callable[[], Generator[SizedBlock, None, None]]
    ) -> Generator[SizedBlock, None, None]:
        """What is kept of the reading `key`, or else what `read` gives."""
        with self._lock:
            kept = self._readings.get(key)
            if kept is not None:
                self._readings.move_to_end(key)
        if kept is not None:
            yield from kept
            return
        reading: list[SizedBlock] = []
        size = 0
        with contextlib.closing(read()) as blocks:
            for block in blocks:
                size += block[1]
                if size <= self._most_bytes:
                    reading.append(block)
                else:
                    reading.clear()
                yield block
        if size <= self._most_bytes:
            self._keep(key, reading)

    def _keep(self, key: bytes, reading: list[SizedBlock]) -> None:
        with self._lock:
            self._readings[key] = reading
            while sum(size for r in self._readings.values() for _, size in r) > self._most_bytes:
                self._readings.popitem(last=False)


class StreamServer:
    """A thread of its actor runs each call: at most two of a rank at a time."""

    def __init__(self, *, keeps_statistics: bool = True, warms_up: bool = True) -> None:
        """Start without reading anything.

        Args:
            keeps_statistics: Ray Data's, for a dashboard, by a process more.
            warms_up: the processes of reading tasks import before they are needed; not so where
                `start_beside_server` has seen to it.
        """
        self._warms_up = warms_up
        if not keeps_statistics:
            keep_no_dataset_statistics()
        self._open: dict[Pass, DealtBlocks] = {}
        self._kept = KeptBlocks(_most_kept_bytes())
        self._lock = threading.Lock()

    def next_block(self, one: Pass, rank: int, index: int) -> list[ray.ObjectRef[Block]]:
        """The block of a rank after its first `index` ones in a list, empty after its last.

        The first call for a pass starts reading it, and ends the passes that it replaces.
        """
        block = self._blocks(one, index).next_block(rank, index)
        return [] if block is None else [block]

    def close(self) -> None:
        """End all reading."""
        with self._lock:
            for blocks in self._open.values():
                blocks.close()
            self._open = {}

    def _blocks(self, one: Pass, index: int) -> DealtBlocks:
        with self._lock:
            if one not in self._open and index > 0:
                raise StreamLostError(f"{one} has ended here: another one has replaced it")
            if one not in self._open:
                for other in [p for p in self._open if one.replaces(p)]:
                    self._open.pop(other).close()
                self._open[one] = DealtBlocks(self._read(one), one.world_size)
            return self._open[one]

    def _read(self, one: Pass) -> Generator[SizedBlock, None, None]:
        # no limit: the driver has put it there before the stream began
        spec = ray.get(one.specs)[one.stream]
        world_size, size = one.world_size, one.batch_size_per_rank
        if one.stream == "train":
            self._warm_up(spec)
            datasets = training_datasets(
                spec,
                world_size=world_size,
                batch_size_per_rank=size,
                start=one.start,
                stop=one.stop,
            )
            return _blocks_of(datasets)

        def read() -> Generator[SizedBlock, None, None]:
            self._warm_up(spec)
            datasets = evaluation_datasets(
                spec, world_size=world_size, batch_size=size, start=one.start
            )
            return _blocks_of(datasets)

        if spec.object_store_mib is not None or not _is_one_node():
            return read()
        return self._kept.blocks(_reading_key(one, spec), read)

    def _warm_up(self, spec: StreamSpec) -> None:
        if self._warms_up:
            warm_up(spec)


def _reading_key(one: Pass, spec: StreamSpec) -> bytes:
    """Equal for evaluations of the same blocks by the same start of a worker group."""
    workers = one.group.partition(" ")[0]
    facts = (
        spec.manifest.fingerprint, spec.augmentation, spec.seed, spec.rows, spec.block_rows
    )  # fmt: skip
    how = (workers, one.world_size, one.batch_size_per_rank, one.start, spec.gives_keys)
    return hashlib.sha256(pickle.dumps((facts, how))).digest()


def _is_one_node() -> bool:
    """Where there are more, blocks may be lost with one of them, and a worker group go on."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) == 1  # type: ignore[no-untyped-call]


def _most_kept_bytes() -> float:
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return KEPT_SHARE * float(resources.get("object_store_memory", 0))


class RankStreams:
    """The streams of one rank, read through a `StreamServer`."""

    def __init__(
        self,
        server: Any,
        specs: ray.ObjectRef[dict[str, StreamSpec]],
        group: str,
        rank: int,
        world_size: int,
    ) -> None:
        """`group`: the same on all ranks, and new at each start of a worker group or a training."""
        self._server, self._specs, self._group = server, specs, group
        self._rank, self._world_size = rank, world_size
        self._num_passes: dict[str, int] = {}

    def training_blocks(self, share: int, start: int, stop: int) -> Iterator[Block]:
        """Blocks of positions [start, stop), of `share` rows of a global batch for each rank."""
        return self._blocks("train", share, start, stop)

    def training_batches(self, share: int, start: int, stop: int) -> Iterator[Batch]:
        """Batches of `share` rows: the batch contract of `batches`, not to be written to."""
        return cut(self.training_blocks(share, start, stop), share)

    def evaluation_batches(self, name: str, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """An evaluation stream from an image on, in batches of equal size with weights."""
        return cut(self._blocks(name, batch_size, start), batch_size)

    def _blocks(self, name: str, size: int, start: int = 0, stop: int = 0) -> Iterator[Block]:
        number = self._num_passes.get(name, 0)
        self._num_passes[name] = number + 1
        one = Pass(self._specs, name, self._group, number, self._world_size, size, start, stop)
        ask = self._server.next_block.remote
        # no limit: train.step_timeout_s ends a step that waits for images
        found = ray.get(ask(one, self._rank, 0))
        for index in itertools.count(1):
            if not found:
                return
            asked = ask(one, self._rank, index)
            yield ray.get(found[0])  # no limit: as above
            found = ray.get(asked)  # no limit: as above


@dataclass(frozen=True)
class StreamSource:
    """What the streams of one training are read from, for any worker group that trains it."""

    server: Any
    """Handle of an actor that has `StreamServer.next_block`."""
    specs: ray.ObjectRef[dict[str, StreamSpec]]

    def for_rank(self, group: str, rank: int, world_size: int) -> RankStreams:
        """A rank's streams; `group` as in `RankStreams`."""
        return RankStreams(self.server, self.specs, group, rank, world_size)
