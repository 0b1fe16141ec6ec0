"""The actor that runs the streams of a host's ranks, and the iterators of these ranks.

One actor on each host serves training and every evaluation of a worker group, and ends with the
group: it executes the Ray Data datasets of the host's ranks and deals their blocks to them. Which
images a block holds is arithmetic (`order`), so servers need not communicate with each other. A
rank asks for one block after another. The decoded blocks of evaluations are cached if they are
small: a run evaluates on the same images repeatedly.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import ray
import ray.util
from ray.data import DataContext
from ray.data.block import Block

from vit_ray.data.order import Partition
from vit_ray.data.stream.batches import Batch, StreamSpec
from vit_ray.data.stream.ray_datasets import Segment, cut, segments_of, warm_up
from vit_ray.ray_internals import give_datasets, keep_no_dataset_statistics, near_by

# Maximum size of the blocks of an evaluation that are kept: 850 images of 224 pixels.
_KEPT_BYTES: Final = 128 << 20
# Ray namespace of the servers' names.
_NAMESPACE: Final = "vit_ray"


class StreamLostError(RuntimeError):
    """A rank and its server disagree about a stream; a new attempt resumes at a checkpoint."""


class RankBlock(NamedTuple):
    """A block of a stream, the rank that it is for (`Segment.ranks`), and its size in bytes."""

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
    """One pass over a stream: a thread makes its blocks in order and queues them for the ranks.

    The thread makes blocks only while a rank waits, so that Ray Data sees how fast they are taken.

    Args:
        read: returns the blocks of the stream; called by the thread.
        ranks: to which blocks are dealt.
    """

    def __init__(self, read: Callable[[], Blocks], ranks: range) -> None:
        self._read, self._ranks = read, ranks
        lock = threading.Lock()
        self._queues = {rank: _Queue(lock) for rank in ranks}
        # Ranks that have asked for a block and found their queue empty.
        self._waiting: set[int] = set()
        # Its lock guards all fields; notified when a rank waits, and at the end.
        self._asked = threading.Condition(lock)
        self._has_ended = False
        # Why it ended before the stream did.
        self._error: BaseException | None = None
        threading.Thread(target=self._make_blocks, name="blocks", daemon=True).start()

    def next_block(self, rank: int, index: int) -> ray.ObjectRef[Block] | None:
        """The rank's next block, or None after its last; called by one thread for each rank.

        Args:
            index: how many blocks the rank has received.

        Raises:
            StreamLostError: the rank has taken another number of blocks, or this was closed.
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
                # In every rank: for a rank, None would be the end of the stream. Without the
                # traceback, to which each rank would add lines.
                raise self._error.with_traceback(None)
            return None

    def close(self) -> None:
        """Stop reading, after the block that is being made; queued blocks can still be taken."""
        self._end(StreamLostError("the stream was closed before its end"))

    def _make_blocks(self) -> None:
        error: BaseException | None = None
        try:
            with contextlib.closing(self._read()) as blocks:
                while self._is_wanted() and (block := next(blocks, None)) is not None:
                    with self._asked:
                        queue = self._queues[block.rank]
                        queue.blocks.append(block.block)
                        self._waiting.discard(block.rank)
                        queue.changed.notify()
        except BaseException as raised:
            error = raised
        self._end(error)

    def _is_wanted(self) -> bool:
        """Wait until a rank needs a block; False at the end."""
        with self._asked:
            # no limit: a rank asks or leaves, or the next pass of its stream closes this one
            self._asked.wait_for(lambda: self._waiting or self._has_ended)
            return not self._has_ended

    def _end(self, error: BaseException | None) -> None:
        with self._asked:
            if self._has_ended:
                return
            self._has_ended, self._error = True, error
            self._asked.notify()
            for queue in self._queues.values():
                queue.changed.notify_all()


def blocks_of(segments: Iterator[Segment]) -> Blocks:
    """The blocks of consecutive segments; each starts while the last tasks of the previous one run.

    Closing this generator drops the executions in progress, which ends their tasks.
    """

    # The execution of a dataset ends when its iterator is dropped.
    def start_next() -> tuple[Segment, Iterator[Any]] | None:
        if (segment := next(segments, None)) is None:
            return None
        bundles = segment.dataset.iter_internal_ref_bundles()
        return segment, (entry for bundle in bundles for entry in bundle.blocks)

    with ThreadPoolExecutor(1, "segments") as planner:
        started = planner.submit(start_next)
        while (execution := started.result()) is not None:  # no limit: planning reads nothing
            segment, entries = execution
            remaining = range(len(segment.ranks) - 1, -1, -1)
            for rank, entry, num_remaining in zip(segment.ranks, entries, remaining, strict=True):
                if num_remaining == segment.next_at:
                    started = planner.submit(start_next)
                yield RankBlock(rank, entry.ref, entry.metadata.size_bytes or 0)


class Pass(NamedTuple):
    """One pass over a stream by the ranks of a group.

    Attributes:
        stream: `train`, or the name of an evaluation stream.
        number: earlier passes of the group over the stream.
        batch_size: rows of a rank's batch.
        start: training: samples seen before; positions over all epochs joined.
        stop: training: samples seen after; None for an evaluation.
    """

    stream: str
    number: int
    batch_size: int
    start: int = 0
    stop: int | None = None


class StreamServer:
    """Reads the streams of a host's ranks; a thread of its actor runs each call.

    Args:
        group: name of the worker group, the same on all hosts and new at each start of workers.
        specs: what each stream reads, by name.
        ranks: ranks of this host, in a group of `world_size`.
        keeps_statistics: whether an extra process keeps statistics of Ray Data for a dashboard.
        warms_up: whether processes of reading tasks import packages in advance.
        cpus_per_rank: CPUs of each rank that are not for reading.
    """

    def __init__(
        self,
        group: str,
        specs: Mapping[str, StreamSpec],
        ranks: range,
        world_size: int,
        *,
        keeps_statistics: bool = True,
        warms_up: bool = True,
        cpus_per_rank: float = 0.0,
    ) -> None:
        self._group, self._specs, self._warms_up = group, specs, warms_up
        self._ranks, self._world_size = ranks, world_size
        # The actor for usage statistics would keep the first server's node from ever being idle.
        os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
        if not keeps_statistics:
            keep_no_dataset_statistics()
        give_datasets(len(ranks) / world_size, world_size * cpus_per_rank)
        if len(ranks) < world_size:
            # Without labels, reading tasks prefer this node: blocks made here cross no network. Ray
            # Data's default would spread the tasks.
            DataContext.get_current().scheduling_strategy = near_by()
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Pass, Reading]] = {}  # the last pass of each stream
        # By stream: batch size and nodes of the last evaluation that was small, and its blocks.
        self._kept: dict[str, tuple[Hashable, list[RankBlock]]] = {}

    def next_block(self, stream_pass: Pass, rank: int, index: int) -> list[ray.ObjectRef[Block]]:
        """The block of a rank after its first `index` blocks, as a list, empty after the last.

        The first call for a pass starts reading it, and closes the stream's previous pass.
        """
        with self._lock:
            last, reading = self._open.get(stream_pass.stream, (None, None))
            if reading is None or last != stream_pass:
                if last is not None and last.number >= stream_pass.number:
                    raise StreamLostError(f"{stream_pass} is not read here, or no longer")
                if reading is not None:
                    reading.close()
                reading = Reading(lambda: self._blocks(stream_pass), self._ranks)
                self._open[stream_pass.stream] = stream_pass, reading
        block = reading.next_block(rank, index)
        return [] if block is None else [block]

    def leave(self, stream_pass: Pass) -> None:
        """Stop reading a pass that its ranks have left before its end."""
        # A single access needs no lock.
        last, reading = self._open.get(stream_pass.stream, (None, None))
        if reading is not None and last == stream_pass:
            reading.close()

    def _blocks(self, stream_pass: Pass) -> Blocks:
        """The blocks of a pass; a small evaluation is read once on the same nodes."""
        stream = stream_pass.stream
        if stream_pass.stop is not None or self._specs[stream].object_store_mib is not None:
            yield from self._read(stream_pass)
            return
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        alive = tuple(sorted(node["NodeID"] for node in nodes if node["Alive"]))
        key = stream_pass.batch_size, alive
        kept_key, kept = self._kept.get(stream, (None, []))
        if kept_key == key:
            yield from kept
            return
        self._kept.pop(stream, None)
        blocks, size = list[RankBlock](), 0
        for block in self._read(stream_pass):
            size += block.size
            if size <= _KEPT_BYTES:
                blocks.append(block)
            else:
                blocks.clear()
            yield block
        if size <= _KEPT_BYTES:
            self._kept[stream] = key, blocks

    def _read(self, stream_pass: Pass) -> Blocks:
        spec = self._specs[stream_pass.stream]
        name = f"{self._group}/{stream_pass.stream}/{stream_pass.number}"
        partition = Partition(self._world_size, stream_pass.batch_size)
        if self._warms_up:
            warm_up(spec, len(self._ranks) / self._world_size)
        start, stop = stream_pass.start, stream_pass.stop
        return blocks_of(segments_of(name, spec, self._ranks, partition, start, stop))


class RankStreams:
    """The streams of one rank, read through the `StreamServer` of its host.

    Args:
        server: handle of an actor that has `StreamServer.next_block`.
    """

    def __init__(self, server: Any, rank: int) -> None:
        self._server, self._rank = server, rank
        self._num_passes: Counter[str] = Counter()

    def training_blocks(self, share: int, start: int, stop: int) -> Iterator[Block]:
        """This rank's blocks of positions [start, stop); a batch has `share` rows."""
        return self._blocks("train", share, start, stop)

    def training_batches(self, share: int, start: int, stop: int) -> Iterator[Batch]:
        """Batches of `share` rows as described in `batches`; do not write to them."""
        return cut(self.training_blocks(share, start, stop), share)

    def evaluation_batches(self, name: str, batch_size: int) -> Iterator[Batch]:
        """Batches of an evaluation stream, all of `batch_size` rows, with weights."""
        return cut(self._blocks(name, batch_size), batch_size)

    def _blocks(
        self, stream: str, size: int, start: int = 0, stop: int | None = None
    ) -> Iterator[Block]:
        stream_pass = Pass(stream, self._num_passes[stream], size, start, stop)
        self._num_passes[stream] += 1
        ask = self._server.next_block.remote
        # no limit: train.step_timeout_s ends a step that waits for images
        blocks = ray.get(ask(stream_pass, self._rank, 0))
        for index in itertools.count(1):
            if not blocks:
                return
            request = ask(stream_pass, self._rank, index)
            try:
                yield ray.get(blocks[0])  # no limit: as above
            except GeneratorExit:
                if ray.is_initialized():
                    self._server.leave.remote(stream_pass)
                raise
            blocks = ray.get(request)  # no limit: as above


@dataclass(frozen=True)
class StreamSource:
    """What the worker groups of a run read, and how their hosts serve it.

    Attributes:
        options: keyword arguments of each `StreamServer`.
    """

    specs: ray.ObjectRef[dict[str, StreamSpec]]
    options: Mapping[str, Any]

    def for_rank(self, group: str, rank: int, world_size: int, ranks: range) -> RankStreams:
        """The streams of a rank of this host, read through the host's server.

        The first rank that calls this starts the server, which ends with that rank's process.

        Args:
            group: as in `StreamServer`.
            ranks: ranks of this host, by its address, as Ray Train counts them.
        """
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        actor: Any = ray.remote(StreamServer)
        # Ray passes the value of the reference `specs` to the actor.
        server = actor.options(
            name=f"{group} {address}",
            namespace=_NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            # Two calls of each rank, and two that close a pass while other ranks wait for it.
            max_concurrency=2 * len(ranks) + 2,
            scheduling_strategy="DEFAULT",  # not in the place of the rank
            label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        ).remote(group, self.specs, ranks, world_size, **self.options)
        return RankStreams(server, rank)
