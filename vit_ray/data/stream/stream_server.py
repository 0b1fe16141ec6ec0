"""The process that runs the streams of a host's ranks, and the iterators of these ranks.

One actor on each host serves training and every evaluation, for one training after another: it
executes the Ray Data sets of the host's ranks and deals their blocks to them in turn. Which images
a block holds is arithmetic (`order.partition`), so servers need not know of each other. A rank asks
for one block after the other. The decoded blocks of evaluations are kept while they are small: a
run, and the trials of a sweep, evaluate on the same images again and again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pickle
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import ray
import ray.util
from ray.data.block import Block

from vit_ray.data.stream.batches import Batch, StreamSpec
from vit_ray.data.stream.blocks import cut
from vit_ray.data.stream.ray_datasets import (
    HostRanks,
    Segment,
    segments_of,
    warm_up,
)
from vit_ray.ray_internals import give_datasets, keep_no_dataset_statistics

KEPT_SHARE: Final = 0.02
"""Of its node's object store, for decoded evaluation images that a server keeps at most."""
ANSWER_LIMIT_S: Final = 120.0
"""For the handle of a server, which is given before its process has started."""


class PassName(NamedTuple):
    """Which reading of a stream by which worker group."""

    group: str
    """The start of a worker group, and after a space its training where it takes several."""
    stream: str
    """`train`, or the name of an evaluation stream."""
    number: int
    """How often this group has read the stream before."""

    def replaces(self, other: PassName) -> bool:
        """Whether `other` is no longer read once this one is."""
        if self.group != other.group:
            return True
        return self.stream == other.stream and self.number > other.number


@dataclass(frozen=True)
class Pass:
    """One reading of a stream from its start to its end by the ranks of one host."""

    name: PassName
    specs: ray.ObjectRef[dict[str, StreamSpec]]
    """What each stream reads, by its name."""
    ranks: range
    """Of the host, in a group of `world_size`."""
    world_size: int
    batch_size_per_rank: int
    start: int = 0
    """Training: samples seen before; positions over all epochs joined. Evaluation: left out."""
    stop: int = 0
    """Training: samples seen after."""


class StreamLostError(RuntimeError):
    """A stream and its ranks no longer agree; a new attempt starts at a checkpoint."""


class RankBlock(NamedTuple):
    """A block of a stream, whose rank it is, and its bytes."""

    rank: int
    block: ray.ObjectRef[Block]
    size: int


class DealtBlocks:
    """The blocks of some ranks; each rank takes its own."""

    def __init__(
        self, blocks: Generator[RankBlock, None, None], ranks: range | None = None
    ) -> None:
        """`ranks`: that blocks are dealt to; another one is refused, whose blocks would pile up."""
        self._blocks, self._ranks = blocks, ranks
        self._ready: defaultdict[int, deque[ray.ObjectRef[Block]]] = defaultdict(deque)
        self._num_taken: Counter[int] = Counter()
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
        if self._ranks is not None and rank not in self._ranks:
            raise StreamLostError(
                f"rank {rank} asked the server of ranks {self._ranks.start} to "
                f"{self._ranks.stop - 1}: several Ray nodes have one address, and their ranks do "
                "not follow each other; give each node an address of its own"
            )
        if index != self._num_taken[rank]:
            raise StreamLostError(
                f"rank {rank} has had {index} blocks, but was given {self._num_taken[rank]}"
            )
        mine = self._ready[rank]
        while not mine:
            with self._lock:
                if mine:
                    break
                if self._error is not None:
                    raise self._error  # to every rank: a stream that failed has not ended
                try:
                    found = next(self._blocks, None)
                except BaseException as error:
                    self._error = error
                    raise
                if self._is_closed:
                    self._blocks.close()
                if found is None or self._is_closed:
                    return None
                self._ready[found.rank].append(found.block)
        self._num_taken[rank] += 1
        return mine.popleft()

    def close(self) -> None:
        """Stop reading, at the latest with the block that is being waited for."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            self._blocks.close()
            self._lock.release()


def blocks_of(segments: Iterator[Segment]) -> Generator[RankBlock, None, None]:
    """The blocks of consecutive sets; each set starts while the last tasks of the one before run.

    Closing it drops the executions under way, which ends their tasks.
    """

    def start_next() -> tuple[Segment, Iterator[Any]] | None:
        """Plan and execute a set, whose execution ends when the iterator is dropped."""
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
    """Blocks of whole readings, of at most some bytes in all; the last used stay longest."""

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = most_bytes
        self._readings: OrderedDict[bytes, list[RankBlock]] = OrderedDict()
        self._lock = threading.Lock()

    def blocks(
        self, key: bytes, read: Callable[[], Generator[RankBlock, None, None]]
    ) -> Generator[RankBlock, None, None]:
        """What is kept of the reading `key`, or else what `read` gives."""
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


class StreamServer:
    """A thread of its actor runs each call: at most two of a rank at a time."""

    def __init__(
        self, *, keeps_statistics: bool = True, warms_up: bool = True, cpus_per_rank: float = 0.0
    ) -> None:
        """Start without reading anything.

        Args:
            keeps_statistics: Ray Data's, for a dashboard, by a process more.
            warms_up: the processes of reading tasks import before they are needed; not so where
                `start_beside_server` has seen to it.
            cpus_per_rank: that are not for reading.
        """
        self._warms_up, self._cpus_per_rank = warms_up, cpus_per_rank
        if not keeps_statistics:
            keep_no_dataset_statistics()
        self._open: dict[PassName, DealtBlocks] = {}
        self._kept = KeptBlocks(_most_kept_bytes())
        self._lock = threading.Lock()

    def next_block(self, one: Pass | PassName, rank: int, index: int) -> list[ray.ObjectRef[Block]]:
        """The block of a rank after its first `index` ones in a list, empty after its last.

        The first call for a pass starts reading it, and ends the passes that it replaces. Later
        calls give its name alone, which costs the server less.
        """
        name = one.name if isinstance(one, Pass) else one
        with self._lock:
            if name not in self._open:
                if not isinstance(one, Pass):
                    raise StreamLostError(f"{name} has ended here: another one has replaced it")
                for other in [open_one for open_one in self._open if name.replaces(open_one)]:
                    self._open.pop(other).close()
                self._open[name] = DealtBlocks(self._read(one), one.ranks)
            blocks = self._open[name]
        block = blocks.next_block(rank, index)
        return [] if block is None else [block]

    def close(self) -> None:
        """End all reading."""
        with self._lock:
            for blocks in self._open.values():
                blocks.close()
            self._open = {}

    def _read(self, one: Pass) -> Generator[RankBlock, None, None]:
        # no limit: the driver has put it there before the stream began
        spec = ray.get(one.specs)[one.name.stream]
        size = one.batch_size_per_rank
        readers = HostRanks("/".join(map(str, one.name)), one.ranks, one.world_size)
        give_datasets(readers.share, one.world_size * self._cpus_per_rank)

        def read() -> Generator[RankBlock, None, None]:
            if self._warms_up:
                warm_up(spec, readers.share)
            stop = one.stop if one.name.stream == "train" else None
            return blocks_of(segments_of(spec, readers, size, one.start, stop))

        if one.name.stream == "train" or spec.object_store_mib is not None:
            return read()
        # Equal for evaluations of the same blocks by the same start of a worker group. A block may
        # be lost with the node on which it was made, while the group continues.
        nodes = tuple(sorted(node["NodeID"] for node in _nodes_alive()))
        workers = one.name.group.partition(" ")[0]
        what = spec.manifest.fingerprint, spec.augmentation, spec.seed, spec.rows, spec.block_rows
        how = workers, nodes, one.ranks, one.world_size, size, one.start, spec.gives_keys
        return self._kept.blocks(hashlib.sha256(pickle.dumps((what, how))).digest(), read)


def _most_kept_bytes() -> float:
    here = ray.get_runtime_context().get_node_id()
    stores = [n["Resources"] for n in _nodes_alive() if n["NodeID"] == here]
    return KEPT_SHARE * sum(float(store.get("object_store_memory", 0)) for store in stores)


def _nodes_alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


class RankStreams:
    """The streams of one rank, read through a `StreamServer`."""

    def __init__(
        self,
        server: Any,
        specs: ray.ObjectRef[dict[str, StreamSpec]],
        group: str,
        rank: int,
        world_size: int,
        ranks: range | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            server: handle of an actor that has `StreamServer.next_block`.
            specs: what each stream reads, by its name.
            group: the same on all ranks, and new at each start of a worker group or a training.
            rank: in the group.
            world_size: of the group.
            ranks: that use this server; None for all.
        """
        self._server, self._specs, self._group = server, specs, group
        self._rank, self._world_size = rank, world_size
        self._ranks = range(world_size) if ranks is None else ranks
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

    def _blocks(self, stream: str, size: int, start: int = 0, stop: int = 0) -> Iterator[Block]:
        number = self._num_passes.get(stream, 0)
        self._num_passes[stream] = number + 1
        name = PassName(self._group, stream, number)
        one = Pass(name, self._specs, self._ranks, self._world_size, size, start, stop)
        ask = self._server.next_block.remote
        # no limit: train.step_timeout_s ends a step that waits for images
        found = ray.get(ask(one, self._rank, 0))
        for index in itertools.count(1):
            if not found:
                return
            asked = ask(name, self._rank, index)
            yield ray.get(found[0])  # no limit: as above
            found = ray.get(asked)  # no limit: as above


@dataclass(frozen=True)
class StreamSource:
    """What the streams of one training are read from, for any worker group that trains it."""

    servers: Any
    """Handle of an actor that has `stream_server`, which gives the server of a host's ranks."""
    specs: ray.ObjectRef[dict[str, StreamSpec]]

    def for_rank(self, group: str, rank: int, world_size: int, ranks: range) -> RankStreams:
        """The streams of a rank of this host; `group` and `ranks` as in `RankStreams`."""
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        node = ray.get_runtime_context().get_node_id()
        found = self.servers.stream_server.remote(group, host, node, ranks)
        server = ray.get(found, timeout=ANSWER_LIMIT_S) or self.servers
        return RankStreams(server, self.specs, group, rank, world_size, ranks)
