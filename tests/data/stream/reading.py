"""Whole streams read by ranks that are tasks of their own, through a stream server."""

import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import ray
from numpy.typing import NDArray

from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.stream_server import RankStreams, StreamServer

Batches = list[dict[str, NDArray[Any]]]


@ray.remote(num_cpus=0)
def _take(streams: RankStreams, how: str, *arguments: Any) -> Batches:
    batches = getattr(streams, how)(*arguments)
    return [{name: column.copy() for name, column in batch.items()} for batch in batches]


def _read(streams: list[RankStreams], how: str, *arguments: Any) -> list[Batches]:
    return ray.get([_take.remote(one, how, *arguments) for one in streams])


def read_training(
    spec: StreamSpec,
    world_size: int,
    share: int,
    start: int,
    stop: int,
    hosts: Sequence[range] = (),
) -> list[Batches]:
    """What each rank gets of positions [start, stop), in order, in batches of `share`."""
    streams = streams_of(spec, world_size, hosts)
    return _read(streams, "training_batches", share, start, stop)


def read_evaluation(
    spec: StreamSpec, world_size: int, batch_size: int, hosts: Sequence[range] = ()
) -> list[Batches]:
    """What each rank gets of an evaluation stream."""
    return _read(streams_of(spec, world_size, hosts), "evaluation_batches", "eval", batch_size)


def start_stream_server(specs: dict[str, StreamSpec], ranks: range, world_size: int) -> Any:
    """Handle of an actor that serves the ranks of one host in a group of its own."""
    server = ray.remote(StreamServer).options(num_cpus=0, max_concurrency=2 * len(ranks) + 2)
    return server.remote(uuid.uuid4().hex, specs, ranks, world_size)


class _SharedServer:
    """One server after another in one process, which takes seconds to start."""

    def start(self, specs: dict[str, StreamSpec], world_size: int) -> None:
        self._server = StreamServer(uuid.uuid4().hex, specs, range(world_size), world_size)

    def next_block(self, *asked: Any) -> Any:
        return self._server.next_block(*asked)

    def leave(self, *asked: Any) -> None:
        self._server.leave(*asked)


@lru_cache(maxsize=1)
def _shared_server(cluster: str) -> Any:
    return ray.remote(_SharedServer).options(num_cpus=0, max_concurrency=10).remote()


def streams_of(spec: StreamSpec, world_size: int, hosts: Sequence[range] = ()) -> list[RankStreams]:
    """The streams of each rank of a group of its own; the ranks of each host have a server."""
    specs = {"train": spec, "eval": spec}
    if hosts:
        servers = [(start_stream_server(specs, ranks, world_size), ranks) for ranks in hosts]
    else:
        server = _shared_server(ray.get_runtime_context().get_job_id())
        ray.get(server.start.remote(specs, world_size))
        servers = [(server, range(world_size))]
    return [RankStreams(server, rank) for server, ranks in servers for rank in ranks]
