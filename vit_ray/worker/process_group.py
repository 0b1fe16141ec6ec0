"""The process group of one training: joined before it, left and forgotten after it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
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

    @property
    def host_ranks(self) -> range:
        """The ranks on this rank's host, which Ray Train numbers one after the other."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


@contextlib.contextmanager
def joined_process_group(
    place: RankPlace,
    host: str,
    device: torch.device,
    broadcast: Callable[[str], str],
    *,
    backend: str,
    timeout_s: float,
) -> Iterator[None]:
    """A process group of its own inside the block, and nothing of it in this process afterwards.

    After an error in the block nothing is cleaned up, and the process must end.

    Args:
        host: the address of this rank's node, as the other nodes reach it.
        device: where this rank computes.
        broadcast: gives every rank what rank 0 gives it.
        backend: `nccl` or `gloo`.
        timeout_s: a collective operation that takes longer fails.
    """
    timeout = timedelta(seconds=timeout_s)
    store = None
    if place.rank == 0:
        # The system chooses a port and holds it: one that was only found free can be lost.
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    address = broadcast(f"{host}:{store.port}" if store else "")
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
    # After an error the process ends, and its group too: leaving could wait for ranks that died.
    leave_process_group()


def leave_process_group() -> None:
    """Destroy the group, and what libraries keep of it and of the models that it trained."""
    destroy_process_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    # ZeRO 3 puts its own in place (0.19.8), whose sums are taken in another order.
    torch.nn.functional.linear = _LINEAR
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
