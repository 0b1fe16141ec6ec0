"""What Ray Train runs on every worker; a driver can name it without importing torch."""

import contextlib
import os
from typing import Any

import ray
import ray.train
import ray.util

from vit_ray.tracking.recorder import Recorder


def work(config: dict[str, Any]) -> None:
    """See `worker.work`."""
    from vit_ray.worker import worker

    worker.work(**config)


def introduce(record: Recorder) -> None:
    """Give this worker's place to the run's record, as in `WorkerPlace`, before it imports torch.

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
