"""Run a function on several gloo ranks, each a process of its own, and collect what they return."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank of a fresh process group; results by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_main, args=(world_size, port, queue, function, args), nprocs=world_size, join=False)
    results = dict(queue.get() for _ in range(world_size))
    failures = [r for r in results.values() if isinstance(r, _Failure)]
    if failures:
        raise AssertionError(failures[0].trace)
    return [results[rank] for rank in range(world_size)]


class _Failure:
    def __init__(self, trace: str) -> None:
        self.trace = trace


def _main(
    rank: int, world_size: int, port: int, queue: Any, function: Callable[..., Any], args: Any
) -> None:
    import traceback

    os.environ.update(
        DS_ACCELERATOR="cpu",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        queue.put((rank, function(rank, *args)))
    except BaseException:
        queue.put((rank, _Failure(traceback.format_exc())))
    finally:
        torch.distributed.destroy_process_group()
