"""The process that runs the streams of a host's ranks, and the iterators of these ranks.

One actor on each host serves training and every evaluation of a worker group: it executes the Ray
Data sets of the host's ranks and deals their blocks to them in turn. Which images a block holds is
arithmetic (`partition`), so servers need not communicate with each other. A rank asks for one
block after another. The decoded blocks of evaluations are kept if they are small: a run evaluates
on the same images repeatedly.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import ray
import ray.util
from ray import cloudpickle
from ray.data.block import Block

from vit_ray.data.stream.batches import Batch, StreamSpec
from vit_ray.data.stream.blocks import cut
from vit_ray.data.stream.rank_blocks import (
    Blocks,
    KeptBlocks,
    Reading,
    StreamLostError,
    blocks_of,
)
from vit_ray.data.stream.ray_datasets import HostRanks, segments_of, warm_up
from vit_ray.ray_internals import give_datasets, keep_no_dataset_statistics

KEPT_SHARE: Final = 0.02
"""Largest share of its node's object store for decoded evaluation images that a server keeps."""
NAMESPACE: Final = "vit_ray"
"""Ray namespace of the servers' names."""
ANSWER_LIMIT_S: Final = 120.0
"""Time limit for a server's name to be known, which is before its process has started."""
LOOK_S: Final = 0.1


class PassName(NamedTuple):
    """Which reading of a stream by which worker group."""

    group: str
    """The start of a worker group."""
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
    """One reading of a stream from start to end by the ranks of one host."""

    name: PassName
    specs: ray.ObjectRef[dict[str, StreamSpec]]
    """What each stream reads, by its name."""
    ranks: range
    """Ranks of the host, in a group of `world_size`."""
    world_size: int
    batch_size_per_rank: int
    start: int = 0
    """Training: samples seen before; positions over all epochs joined."""
    stop: int = 0
    """Training: samples seen after."""

    def content(self, spec: StreamSpec) -> str:
        """Digest of everything that decides the blocks."""
        how = replace(spec, manifest=None)  # type: ignore[arg-type]
        is_training = self.name.stream == "train"
        which = self.world_size, self.batch_size_per_rank, self.start, self.stop, is_training
        rows = hashlib.sha256(spec.manifest.rows.tobytes()).digest()  # of a part
        what = spec.manifest.fingerprint, rows, how, which
        return hashlib.sha256(cloudpickle.dumps(what)).hexdigest()  # type: ignore[no-untyped-call]


class StreamServer:
    """A thread of its actor runs each call: at most two per rank at a time."""

    def __init__(
        self, *, keeps_statistics: bool = True, warms_up: bool = True, cpus_per_rank: float = 0.0
    ) -> None:
        """Start without reading anything.

        Args:
            keeps_statistics: Ray Data's, for a dashboard, in an additional process.
            warms_up: the processes of reading tasks import in advance; not needed after
                `start_beside_server`.
            cpus_per_rank: CPUs that are not for reading.
        """
        self._warms_up, self._cpus_per_rank = warms_up, cpus_per_rank
        # Its actor would stay for good on the node of the first server, which is then never idle.
        os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
        if not keeps_statistics:
            keep_no_dataset_statistics()
        self._open: dict[PassName, Reading] = {}
        self._has_ended: set[str] = set()
        """Groups that were replaced."""
        self._kept = KeptBlocks(KEPT_SHARE * float(_own_resources().get("object_store_memory", 0)))
        self._lock, self._opening = threading.Lock(), threading.Lock()

    def next_block(self, one: Pass | PassName, rank: int, index: int) -> list[ray.ObjectRef[Block]]:
        """The block of a rank after its first `index` ones in a list, empty after its last.

        The first call for a pass starts reading it, and ends the passes that it replaces. Later
        calls only give its name, which costs the server less.
        """
        name = one.name if isinstance(one, Pass) else one
        if isinstance(one, Pass):
            self._begin(one)
        with self._lock:
            reading = self._open.get(name)
        if reading is None:
            raise StreamLostError(f"{name} is not read here, or no longer")
        block = reading.next_block(rank, index)
        return [] if block is None else [block]

    def close(self) -> None:
        """Stop all reading."""
        with self._lock:
            readings, self._open = list(self._open.values()), {}
        _close(readings)

    def _begin(self, one: Pass) -> None:
        with self._opening:  # other passes are read meanwhile
            with self._lock:
                if one.name in self._open or one.name.group in self._has_ended:
                    return
                replaced = [other for other in self._open if one.name.replaces(other)]
                self._has_ended |= {other.group for other in replaced} - {one.name.group}
                readings = [self._open.pop(other) for other in replaced]
            _close(readings)
            # no limit: the driver has put it there before the stream started
            spec = ray.get(one.specs)[one.name.stream]
            reading = Reading(self._read_of(one, spec), one.ranks)
            with self._lock:
                self._open[one.name] = reading

    def _read_of(self, one: Pass, spec: StreamSpec) -> Callable[[], Blocks]:
        """A function that reads a stream."""
        name = "/".join(map(str, one.name))
        readers = HostRanks(name, one.ranks, one.world_size)
        give_datasets(readers.share, one.world_size * self._cpus_per_rank)
        size = one.batch_size_per_rank

        def read() -> Blocks:
            if self._warms_up:
                warm_up(spec, readers.share)
            stop = one.stop if one.name.stream == "train" else None
            return blocks_of(segments_of(spec, readers, size, one.start, stop))

        if one.name.stream == "train" or spec.object_store_mib is not None:
            return read
        key = pickle.dumps((one.name.group, _nodes_alive(), one.ranks, one.content(spec)))
        return lambda: self._kept.blocks(key, read)


def _close(readings: list[Reading]) -> None:
    with contextlib.ExitStack() as all_of_them:
        for reading in readings:
            all_of_them.callback(reading.close)


def _own_resources() -> dict[str, float]:
    here = ray.get_runtime_context().get_node_id()
    (found,) = [one["Resources"] for one in ray.nodes() if one["NodeID"] == here]  # type: ignore[no-untyped-call]
    return dict(found)


def _nodes_alive() -> tuple[str, ...]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return tuple(sorted(node["NodeID"] for node in nodes if node["Alive"]))


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
        """Reads nothing yet.

        Args:
            server: handle of an actor that has `StreamServer.next_block`.
            specs: what each stream reads, by its name.
            group: the same on all ranks, and new at each start of a worker group.
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
        """Batches of `share` rows, as `batches` describes them; do not write to them."""
        return cut(self.training_blocks(share, start, stop), share)

    def evaluation_batches(self, name: str, batch_size: int) -> Iterator[Batch]:
        """An evaluation stream in batches of equal size with weights."""
        return cut(self._blocks(name, batch_size), batch_size)

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
    """What the worker groups of a run read, and how they serve it on their hosts."""

    specs: ray.ObjectRef[dict[str, StreamSpec]]
    server: Mapping[str, Any]
    """Arguments of `StreamServer`."""

    def for_rank(self, group: str, rank: int, world_size: int, ranks: range) -> RankStreams:
        """The streams of a rank of this host, read through the server of its ranks.

        The first of them starts it, and it ends with that process.

        Args:
            group: as in `RankStreams`.
            ranks: of this host, by its address, as Ray Train counts them.

        Raises:
            StreamLostError: the server has not been started in time.
        """
        name = f"{group} {ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
        is_first = rank == ranks.start
        server = self._start(name, len(ranks)) if is_first else _find_server(name)
        return RankStreams(server, self.specs, group, rank, world_size, ranks)

    def _start(self, name: str, num_ranks: int) -> Any:
        actor: Any = ray.remote(StreamServer)
        options = actor.options(
            name=name,
            namespace=NAMESPACE,
            num_cpus=0,
            max_concurrency=2 * num_ranks + 2,
            scheduling_strategy="DEFAULT",  # not in the place of the rank
            label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        )
        return options.remote(**self.server)


def _find_server(name: str) -> Any:
    deadline_s = time.monotonic() + ANSWER_LIMIT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ValueError):
            return ray.get_actor(name, namespace=NAMESPACE)
        time.sleep(LOOK_S)
    raise StreamLostError(f"no stream server of this host in {ANSWER_LIMIT_S:g} s")
