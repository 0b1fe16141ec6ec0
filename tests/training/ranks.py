"""Run a function on several gloo ranks, each a process of its own, and collect what they return.

The ranks are forked off a server that has imported what takes seconds: each is as fresh as a new
process, and is there at once.
"""

import multiprocessing
import os
import pickle
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from queue import Empty
from typing import Any

import torch
import torch.multiprocessing as mp

LIMIT_S = 900

# Both are read when the server starts, at the first use.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
multiprocessing.set_forkserver_preload(["tests.training.preloaded"])


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank of a fresh process group; results by rank."""
    # Its port is chosen and held at once: one found free could be another's when rank 0 listens.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = multiprocessing.get_context("forkserver").Queue()
    ranks = mp.start_processes(
        _main, (world_size, store.port, queue, function, args), world_size, join=False,
        start_method="forkserver",
    )  # fmt: skip
    # Plain pickles: torch would share tensors through processes that are gone by then.
    results: dict[int, Any] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while len(results) < world_size:
        try:
            rank, result = pickle.loads(queue.get(timeout=1.0))
        except Empty:
            ranks.join(timeout=0.0)  # raises what a rank has raised
            if time.monotonic() > deadline_s:
                for process in ranks.processes:
                    process.kill()
                raise AssertionError(
                    f"{LIMIT_S} s passed, and only ranks {sorted(results)} are done"
                ) from None
        else:
            results[rank] = result
    while not ranks.join():
        pass
    return [results[rank] for rank in range(world_size)]


def _main(
    rank: int, world_size: int, port: int, queue: Any, function: Callable[..., Any], args: Any
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )  # fmt: skip
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    try:
        timeout = timedelta(minutes=5)
        store = torch.distributed.TCPStore("127.0.0.1", port, timeout=timeout)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        # A rank that left at once would close connections that another is still making.
        torch.distributed.barrier()
        queue.put(pickle.dumps((rank, function(rank, *args))))
    finally:
        if torch.distributed.is_initialized():  # a function may leave it for others of its own
            torch.distributed.destroy_process_group()
