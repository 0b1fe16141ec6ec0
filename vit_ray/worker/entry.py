"""What Ray Train runs on every worker; driver and controller name it without importing torch."""

import contextlib
import importlib
import os
from typing import Any

import ray
import ray.train
import ray.util

from vit_ray.tracking.recorder import Recorder


def work(config: dict[str, Any]) -> None:
    """Train, or evaluate, to the end of the run or of this worker's group.

    Args:
        config: `group` (its name) and `use_gpu`; references of `job` and `streams`, whose modules
            Ray Train's controller need not import.
    """
    # no limit: the driver has put both there before
    job, streams = ray.get([config["job"], config["streams"]])
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    first = rank - context.get_local_rank()
    host_ranks = range(first, first + context.get_local_world_size())
    # Before DeepSpeed is imported: meanwhile the server's process starts.
    mine = streams.for_rank(config["group"], rank, world_size, host_ranks)
    from vit_ray.worker import worker

    worker.work(job, rank, world_size, mine, use_gpu=config["use_gpu"])


def introduce(record: Recorder) -> None:
    """Give this worker's place to the run's record, as in `WorkerPlace`, and then import torch.

    Errors name host, GPU, process and log file, since Ray sends standard error to a separate file.
    The driver gives its placement group back if the controller dies.
    """
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    log = os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else ""
    parts = [f"GPU {', '.join(gpus)}"] if gpus else []
    parts += [f"pid {os.getpid()}", f"log {log}" if log.endswith(".err") else ""]
    group = ray.util.get_current_placement_group()
    with contextlib.suppress(ray.exceptions.RayError, RuntimeError):  # it works without the record
        record.heartbeat(
            ray.train.get_context().get_world_rank(),
            0,
            ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            context.get_node_id(),
            ", ".join(filter(None, parts)),
            group.id.hex() if group else "",
        )
    importlib.import_module("torch")  # takes seconds, also in the controller: at the same time
