"""What Ray Train runs on every worker and in its controller; importing this does not import torch.

The workers join a process group on the network that the nodes use. Ray's torch backend would also
wait, at the end, for each process to leave the group, which is not needed.
"""

import contextlib
import importlib
import os
from dataclasses import dataclass
from typing import Any, Final

import psutil
import ray.train
import ray.util
from ray.train import WorkerGroupError
from ray.train.backend import Backend, BackendConfig

from vit_ray.outcomes import WorkerPlace
from vit_ray.tracking.recorder import Recorder

# Longest wait for Ray to report a dead worker.
DEATH_S: Final = 5.0


def work(config: dict[str, Any]) -> None:
    """Train, or evaluate, to the end of the run or of this worker's group.

    Args:
        config: `group` (the group's name) and `use_gpu`; object references of `job` and `streams`,
            so that Ray Train's controller does not import their modules.
    """
    # no limit: the driver has put both there before
    job, streams = ray.get([config["job"], config["streams"]])
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    first = rank - context.get_local_rank()
    host_ranks = range(first, first + context.get_local_world_size())
    # Before DeepSpeed is imported: meanwhile the process of the stream server starts.
    rank_streams = streams.for_rank(config["group"], rank, world_size, host_ranks)
    from vit_ray.worker import worker

    worker.work(job, rank, world_size, rank_streams, use_gpu=config["use_gpu"])


def introduce(record: Recorder) -> None:
    """Send this worker's info to the run's record, and then import torch.

    Errors name host, GPU, process and log file, since Ray sends standard error to a separate file.
    The driver removes the placement group if the controller dies.
    """
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    log = os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else ""
    parts = [f"GPU {', '.join(gpus)}"] if gpus else []
    parts += [f"pid {os.getpid()}", f"log {log}" if log.endswith(".err") else ""]
    group = ray.util.get_current_placement_group()
    with contextlib.suppress(ray.exceptions.RayError, RuntimeError):  # the worker can do without
        place = WorkerPlace(
            ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            context.get_node_id(),
            ", ".join(filter(None, parts)),
            step=0,
            group=group.id.hex() if group else "",
        )
        record.heartbeat(ray.train.get_context().get_world_rank(), 0, place)
    importlib.import_module("torch")  # takes seconds, also in the controller: at the same time


@dataclass
class GroupConfig(BackendConfig):
    """The fields of Ray's `TorchConfig`, without importing torch.

    Attributes:
        record: receives each worker's info.
    """

    backend: str
    timeout_s: int
    record: Recorder | None = None
    init_method: str = "env"

    @property
    def backend_cls(self) -> type[Backend]:
        return GroupBackend


class GroupBackend(Backend):
    """Runs in Ray Train's controller."""

    # All workers of a node see all of its GPUs, because NCCL links them.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Join the workers to a process group.

        Raises:
            WorkerGroupError: workers have died meanwhile; Ray's own error does not name them.
        """
        try:
            introduced = worker_group.execute_async(introduce, backend_config.record)
            from ray.train.torch import TorchConfig  # imports torch, while the workers do

            ray.get(introduced)  # no limit: the driver looks after a group that is silent
            worker_group.execute(use_own_interface)
            TorchConfig().backend_cls().on_start(worker_group, backend_config)
        except BaseException as error:
            dead: dict[int, Exception] = {}
            with contextlib.suppress(Exception):
                dead = dead_workers(worker_group)
            # Ray Train 2.60 keeps the placement group if a worker dies here.
            with contextlib.suppress(Exception):
                worker_group.get_worker_group_state().placement_group_handle.shutdown()
            if dead:
                raise WorkerGroupError("workers died while the group met", dead) from error
            raise


def dead_workers(worker_group: Any) -> dict[int, Exception]:
    """Ray's errors of dead workers, by rank; living workers may answer, or be busy."""
    answers = worker_group.execute_async(os.getpid)
    answered, _ = ray.wait(answers, num_returns=len(answers), timeout=DEATH_S)
    dead: dict[int, Exception] = {}
    for rank, answer in enumerate(answers):
        try:
            if answer in answered:
                ray.get(answer, timeout=DEATH_S)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            dead[rank] = error
    return dead


def use_own_interface() -> None:
    """Set Gloo's network interface to the interface by which other nodes reach this node.

    Gloo's default is the address of the host's name: on Debian that is 127.0.1.1, which no other
    node reaches, and with several networks it may be any.
    """
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    for name, entries in psutil.net_if_addrs().items():
        if address in [entry.address for entry in entries]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
