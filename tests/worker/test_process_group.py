"""The process group that Ray Train joins: on which network, and with which GPU."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
import ray.train.torch
import ray.util
import torch
from ray.train.torch import TorchConfig

from tests import hosts
from vit_ray.worker import process_group
from vit_ray.worker.process_group import GroupConfig, interface_of
from vit_ray.worker.worker import training_device


def test_deepspeed_is_told_the_gpu_that_ray_gave_and_not_the_place_in_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    # Of 16 GPUs, sorted as text: 0, 1, 10, 11, ...
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cuda", 10))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert training_device(False) == torch.device("cpu")
    assert os.environ["LOCAL_RANK"] == "2"
    assert training_device(True) == torch.device("cuda", 10)
    assert os.environ["LOCAL_RANK"] == "10"


def test_every_worker_chooses_its_network_before_ray_joins_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    joined: list[Any] = []
    monkeypatch.setattr(process_group, "introduce", joined.append)
    rays = TorchConfig().backend_cls
    monkeypatch.setattr(rays, "on_start", lambda _, group, config: joined.append(os.environ[NAME]))
    config: Any = GroupConfig(backend="gloo", timeout_s=120, record="its record")  # type: ignore[arg-type]
    group = SimpleNamespace(execute=lambda call, *given: call(*given))
    config.backend_cls().on_start(group, config)
    assert joined == ["its record", "lo"]
    assert process_group.GroupBackend.share_cuda_visible_devices


def test_a_group_that_dies_before_it_has_met_gives_up_its_place() -> None:
    """Nobody else may know it yet: none of its workers has introduced itself."""
    given_up: list[bool] = []

    def execute(call: Any, *given: Any) -> None:
        raise ray.exceptions.RayActorError

    place = SimpleNamespace(shutdown=lambda: given_up.append(True))
    state = SimpleNamespace(placement_group_handle=place)
    group = SimpleNamespace(execute=execute, get_worker_group_state=lambda: state)
    config = GroupConfig(backend="gloo", timeout_s=120)
    with pytest.raises(ray.exceptions.RayActorError):
        config.backend_cls().on_start(group, config)
    assert given_up == [True]


NAME = "GLOO_SOCKET_IFNAME"
JOIN = """
import datetime, os, sys, torch
from vit_ray.worker.process_group import interface_of
rank, own, first = int(sys.argv[1]), *sys.argv[2:4]
os.environ["GLOO_SOCKET_IFNAME"] = interface_of(own)
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://{first}:29577", rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=60),
)
total = torch.ones(1)
torch.distributed.all_reduce(total)
print("sum", total.item())
"""


def test_nodes_whose_names_lead_to_themselves_train_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Debian, which gives a host's own name the address 127.0.1.1."""
    hosts.require()
    monkeypatch.delenv(NAME, raising=False)
    with hosts.network() as net:
        pair, running = [net.join("one"), net.join("two")], []
        for rank, host in enumerate(pair):
            own_names = tmp_path / host.name
            own_names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
            assert host.run("mount", "--bind", str(own_names), "/etc/hosts")[0] == 0
            words = [str(rank), host.address, pair[0].address]
            running.append(host.start(sys.executable, "-c", JOIN, *words))
        for one in running:
            output, _ = one.communicate(timeout=120)
            assert (one.returncode, "sum 2.0" in output) == (0, True), output


def test_an_address_of_no_interface_has_none() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
