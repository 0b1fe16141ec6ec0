"""The process group of one attempt: joined before it, left and forgotten after it."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented; not in __all__

from vit_ray.deepspeed_internals import destroy_process_groups

_LINEAR: Final = torch.nn.functional.linear


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in its group."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int

    @classmethod
    def of(cls, rank: int, hosts: Sequence[str]) -> RankPlace:
        """By the host of every rank."""
        mine = hosts[rank]
        nodes = list(dict.fromkeys(hosts))
        return cls(rank, len(hosts), hosts[:rank].count(mine), hosts.count(mine), nodes.index(mine))

    @property
    def host_ranks(self) -> range:
        """The ranks on this rank's host, which Ray Train numbers one after the other."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Rank 0's store, by which the ranks find each other.

    The system chooses a port and holds it: one that was only found free can be lost. The store has
    no password, and torch's own socket listens on every network of the node; this one only on
    `host`'s.

    Args:
        host: the address of this rank's node, as the other nodes reach it.
    """
    family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(place[:2], family=family)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


@contextlib.contextmanager
def joined_process_group(
    place: RankPlace,
    device: torch.device,
    address: str,
    store: TCPStore | None,
    *,
    backend: str,
    timeout_s: float,
) -> Iterator[None]:
    """A process group of its own inside the block, and nothing of it in this process afterwards.

    After an error in the block nothing is cleaned up: the process ends, or leaves the group.

    Args:
        device: where this rank computes.
        address: host and port of rank 0's store.
        store: the same on rank 0.
        backend: `nccl` or `gloo`.
        timeout_s: a collective operation that takes longer fails.
    """
    timeout = timedelta(seconds=timeout_s)
    host, _, port = address.rpartition(":")
    store = store or TCPStore(host, int(port), timeout=timeout)
    # DeepSpeed computes on the GPU of this number. Ray sorts the GPUs of its workers as text, by
    # which the worker of local rank 2 has GPU 10 where there are more than ten.
    local_rank = place.local_rank if device.index is None else device.index
    # As torchrun sets them; DeepSpeed reads some.
    os.environ |= {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "NODE_RANK": str(place.node_rank),
    }
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    yield
    leave_process_group()


def leave_process_group(*, keeps_compiled: bool = False) -> None:
    """Destroy the group, and what libraries keep of it and of the models that it trained.

    After a failure too: Gloo's connections close, which ends what other ranks wait for.

    Args:
        keeps_compiled: compiled code stays, for another model that is built alike.
    """
    destroy_process_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    # ZeRO 3 puts its own in place (0.19.8), whose sums are taken in another order.
    torch.nn.functional.linear = _LINEAR
    if "torch._dynamo" in sys.modules and not keeps_compiled:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
