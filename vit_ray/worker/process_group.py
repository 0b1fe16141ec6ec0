"""The process group of a worker group: Ray Train joins it, on the network that the nodes use.

Ray's own torch backend would also wait, at the end, for each process to leave the group; processes
end anyway.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import psutil
import ray.util
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from vit_ray.tracking.recorder import Recorder
from vit_ray.worker.entry import introduce


@dataclass
class GroupConfig(TorchConfig):
    """Ray's configuration of torch, with the network interface chosen on each node."""

    record: Recorder | None = None
    """To which the workers introduce themselves."""

    @property
    def backend_cls(self) -> type[Backend]:
        return GroupBackend


class GroupBackend(Backend):
    """Runs in Ray Train's controller."""

    share_cuda_visible_devices = True
    """GPUs of a node are visible to all of its workers, because NCCL links them."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        try:
            worker_group.execute(introduce, backend_config.record)
            worker_group.execute(use_own_interface)
            TorchConfig().backend_cls().on_start(worker_group, backend_config)
        except BaseException:
            # Ray Train 2.60 keeps the place of a group of which a worker dies here.
            with contextlib.suppress(Exception):
                worker_group.get_worker_group_state().placement_group_handle.shutdown()
            raise


def use_own_interface() -> None:
    """Have Gloo use the interface by which other nodes reach this one.

    By itself it takes the address of the host's name: on Debian 127.0.1.1, which no other node
    reaches, and of several networks any.
    """
    if interface := interface_of(ray.util.get_node_ip_address()):  # type: ignore[no-untyped-call]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """The network interface of this node that has the address, IPv4 or IPv6."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (one.address for one in addresses):
            return name
    return None
