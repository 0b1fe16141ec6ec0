"""The process that runs the streams of a host's ranks, and the iterators of these ranks.

One actor on each host serves training and every evaluation of a worker group, and ends with the
group: it executes the Ray Data sets of the host's ranks and deals their blocks to them. Which
images a block holds is arithmetic (`partition`), so servers need not communicate with each other. A
rank asks for one block after another. The decoded blocks of evaluations are kept if they are small:
a run evaluates on the same images repeatedly.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import ray
import ray.util
from ray.data.block import Block

from vit_ray.data.stream.batches import Batch, StreamSpec
from vit_ray.data.stream.ray_datasets import (
    HostRanks,
    cut,
    run_tasks_near_by,
    segments_of,
    warm_up,
)
from vit_ray.ray_internals import give_datasets, keep_no_dataset_statistics

KEPT_SHARE: Final = 0.02
"""Largest share of its node's object store for decoded evaluation images that a server keeps."""
NAMESPACE: Final = "vit_ray"
"""Ray namespace of the servers' names."""


class Pass(NamedTuple):
    """One reading of a stream from start to end by the ranks of a group."""

    stream: str
    """`train`, or the name of an evaluation stream."""
    number: int
    """How often the group has read the stream before."""
    batch_size: int
    """Rows of a rank that belong together."""
    start: int = 0
    """Training: samples seen before; positions over all epochs joined."""
    stop: int | None = None
    """Training: samples seen after; None for an evaluation."""


class StreamServer:
    """A thread of its actor runs each call."""

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
        """Start without reading anything.

        Args:
            group: the same on all hosts, and new at each start of a worker group.
            specs: what each stream reads, by its name.
            ranks: of this host, in a group of `world_size`.
            keeps_statistics: Ray Data's, for a dashboard, in an additional process.
            warms_up: the processes of reading tasks import in advance.
            cpus_per_rank: CPUs that are not for reading.
        """
        self._group, self._specs, self._warms_up = group, specs, warms_up
        self._ranks, self._world_size = ranks, world_size
        # Its actor would stay for good on the node of the first server, which is then never idle.
        os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
        if not keeps_statistics:
            keep_no_dataset_statistics()
        give_datasets(len(ranks) / world_size, world_size * cpus_per_rank)
        if len(ranks) < world_size:
            run_tasks_near_by()
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Pass, Reading]] = {}
        """The last pass of each stream."""
        self._kept = KeptBlocks(KEPT_SHARE * float(_own_resources().get("object_store_memory", 0)))

    def next_block(self, one: Pass, rank: int, index: int) -> list[ray.ObjectRef[Block]]:
        """The block of a rank after its first `index` ones in a list, empty after its last.

        The first call for a pass starts reading it, and ends the one before of its stream.
        """
        block = self._reading(one).next_block(rank, index)
        return [] if block is None else [block]

    def leave(self, one: Pass) -> None:
        """Stop reading for ranks that have left a pass before its end."""
        with self._lock:
            last, reading = self._open.get(one.stream, (None, None))
        if reading is not None and last == one:
            reading.close()

    def _reading(self, one: Pass) -> Reading:
        with self._lock:
            last, reading = self._open.get(one.stream, (None, None))
            if reading is not None and last == one:
                return reading
            if last is not None and last.number >= one.number:
                raise StreamLostError(f"{one} is not read here, or no longer")
            if reading is not None:
                reading.close()
            reading = Reading(lambda: self._blocks(one), self._ranks)
            self._open[one.stream] = one, reading
            return reading

    def _blocks(self, one: Pass) -> Blocks:
        """The blocks of a pass, read now or kept from an evaluation on the same nodes."""
        spec = self._specs[one.stream]
        if one.stop is not None or spec.object_store_mib is not None:
            return self._read(one, spec)
        key = one.stream, one.batch_size, _nodes_alive()
        return self._kept.blocks(key, lambda: self._read(one, spec))

    def _read(self, one: Pass, spec: StreamSpec) -> Blocks:
        name = f"{self._group}/{one.stream}/{one.number}"
        readers = HostRanks(name, self._ranks, self._world_size)
        if self._warms_up:
            warm_up(spec, readers.share)
        return blocks_of(segments_of(spec, readers, one.batch_size, one.start, one.stop))


def _own_resources() -> dict[str, float]:
    here = ray.get_runtime_context().get_node_id()
    (found,) = [one["Resources"] for one in ray.nodes() if one["NodeID"] == here]  # type: ignore[no-untyped-call]
    return dict(found)


def _nodes_alive() -> tuple[str, ...]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return tuple(sorted(node["NodeID"] for node in nodes if node["Alive"]))


class RankStreams:
    """The streams of one rank, read through the `StreamServer` of its host."""

    def __init__(self, server: Any, rank: int) -> None:
        """Reads nothing yet.

        Args:
            server: handle of an actor that has `StreamServer.next_block`.
        """
        self._server, self._rank = server, rank
        self._num_passes: Counter[str] = Counter()

    def training_blocks(self, share: int, start: int, stop: int) -> Iterator[Block]:
        """Blocks of positions [start, stop), of `share` rows of a global batch for each rank."""
        return self._blocks("train", share, start, stop)

    def training_batches(self, share: int, start: int, stop: int) -> Iterator[Batch]:
        """Batches of `share` rows, as `batches` describes them; do not write to them."""
        return cut(self.training_blocks(share, start, stop), share)

    def evaluation_batches(self, name: str, batch_size: int) -> Iterator[Batch]:
        """An evaluation stream in batches of equal size with weights."""
        return cut(self._blocks(name, batch_size), batch_size)

    def _blocks(
        self, stream: str, size: int, start: int = 0, stop: int | None = None
    ) -> Iterator[Block]:
        one = Pass(stream, self._num_passes[stream], size, start, stop)
        self._num_passes[stream] += 1
        ask = self._server.next_block.remote
        # no limit: train.step_timeout_s ends a step that waits for images
        found = ray.get(ask(one, self._rank, 0))
        for index in itertools.count(1):
            if not found:
                return
            asked = ask(one, self._rank, index)
            try:
                yield ray.get(found[0])  # no limit: as above
            except GeneratorExit:
                if ray.is_initialized():
                    self._server.leave.remote(one)
                raise
            found = ray.get(asked)  # no limit: as above


@dataclass(frozen=True)
class StreamSource:
    """What the worker groups of a run read, and how they serve it on their hosts."""

    specs: ray.ObjectRef[dict[str, StreamSpec]]
    options: Mapping[str, Any]
    """Of each `StreamServer`."""

    def for_rank(self, group: str, rank: int, world_size: int, ranks: range) -> RankStreams:
        """The streams of a rank of this host, read through the server of its ranks.

        The first that asks starts it, and it ends with that process.

        Args:
            group: as in `StreamServer`.
            ranks: of this host, by its address, as Ray Train counts them.
        """
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        actor: Any = ray.remote(StreamServer)
        named = actor.options(
            name=f"{group} {address}",
            namespace=NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            # Two calls of each rank, and two that close a pass which others still wait for.
            max_concurrency=2 * len(ranks) + 2,
            scheduling_strategy="DEFAULT",  # not in the place of the rank
            label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        )
        # Ray gives the actor what the reference stands for.
        server = named.remote(group, self.specs, ranks, world_size, **self.options)
        return RankStreams(server, rank)
