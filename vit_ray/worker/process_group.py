"""The process group of one attempt: joined before it, left and cleaned up after it."""

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

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented; not in __all__

from vit_ray.deepspeed_internals import destroy_process_groups

_LINEAR: Final = torch.nn.functional.linear


@dataclass(frozen=True)
class RankPlace:
    """The position of a rank in its group."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int

    @classmethod
    def of(cls, rank: int, hosts: Sequence[str]) -> RankPlace:
        """The place of `rank`, from the host of every rank."""
        mine = hosts[rank]
        nodes = list(dict.fromkeys(hosts))
        return cls(rank, len(hosts), hosts[:rank].count(mine), hosts.count(mine), nodes.index(mine))

    @property
    def host_ranks(self) -> range:
        """The ranks on this rank's host, which Ray Train numbers consecutively."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Rank 0's store, by which the ranks find each other.

    The system chooses and holds a port: a port that was only found free could be taken before use.
    The store has no password, and torch's own socket would listen on every network of the node;
    this one listens only on `host`'s.

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


def interface_of(address: str) -> str | None:
    """The network interface of this node that has the address, IPv4 or IPv6."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (one.address for one in addresses):
            return name
    return None


@contextlib.contextmanager
def joined_process_group(
    place: RankPlace,
    device: torch.device,
    address: str,
    store: TCPStore | None,
    *,
    host: str,
    backend: str,
    timeout_s: float,
) -> Iterator[None]:
    """A process group inside the block, without traces in this process afterwards.

    After an error in the block nothing is cleaned up: the process ends, or leaves the group.

    Args:
        device: where this rank computes.
        address: host and port of rank 0's store.
        store: rank 0's store on rank 0.
        host: the address of this rank's node, as the other nodes reach it.
        backend: `nccl` or `gloo`.
        timeout_s: a collective operation that takes longer fails.
    """
    timeout = timedelta(seconds=timeout_s)
    store_host, _, port = address.rpartition(":")
    store = store or TCPStore(store_host, int(port), timeout=timeout)
    # By itself Gloo takes the address of the host's name: on Debian 127.0.1.1, which no other node
    # reaches, and of several networks any.
    if interface := interface_of(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # DeepSpeed computes on the GPU with this number. Ray sorts the GPUs of its workers as text, so
    # with more than ten GPUs the worker of local rank 2 has GPU 10.
    local_rank = place.local_rank if device.index is None else device.index
    # As torchrun sets them; DeepSpeed reads some.
    os.environ |= {
        "MASTER_ADDR": store_host,
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

    Also after a failure: Gloo's connections close, which ends the waiting of other ranks.

    Args:
        keeps_compiled: keep compiled code for another model with the same structure.
    """
    destroy_process_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    # ZeRO 3 replaces it with its own (0.19.8), which sums in another order.
    torch.nn.functional.linear = _LINEAR
    if "torch._dynamo" in sys.modules and not keeps_compiled:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
