"""The process group that Ray Train joins: on which network, and with which GPU."""

import os
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.exceptions
import ray.train.torch
import torch
from ray.train import ControllerError, WorkerGroupError

from tests import hosts
from vit_ray.launch.failures import cause, failing_node
from vit_ray.outcomes import WorkerPlace
from vit_ray.worker.entry import GroupBackend, GroupConfig
from vit_ray.worker.worker import training_device


def test_deepspeed_is_told_the_gpu_that_ray_gave_and_not_the_place_in_the_host(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    # Of 16 GPUs, sorted as text: 0, 1, 10, 11, ...
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cuda", 10))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert training_device(False) == torch.device("cpu")
    assert os.environ["LOCAL_RANK"] == "2"
    assert training_device(True) == torch.device("cuda", 10)
    assert os.environ["LOCAL_RANK"] == "10"
    assert GroupBackend.share_cuda_visible_devices


class Meeting:
    """A group of three workers, of which the second one dies: as far as Ray calls it."""

    def __init__(self, died: Exception, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        self._died, self._error, self.has_given_up = died, error, False
        monkeypatch.setattr(ray, "wait", lambda answers, **_: ([0, 1], [2]))
        monkeypatch.setattr(ray, "get", self._get)

    def execute(self, call: Any, *given: Any) -> None:
        raise self._error

    def execute_async(self, call: Any, *given: Any) -> list[int]:
        return [0, 1, 2]

    def _get(self, answer: Any, timeout: float | None = None) -> int:
        assert answer != 2, "rank 2 waits for the others"
        if answer == 1:
            raise self._died
        return 4711

    def get_worker_group_state(self) -> Any:
        return SimpleNamespace(placement_group_handle=self)

    def shutdown(self) -> None:
        self.has_given_up = True


DIED = ray.exceptions.RayActorError()


@pytest.mark.parametrize(
    ("died", "error"),
    [
        (DIED, DIED),
        (DIED, RuntimeError("Timed out after 121 seconds")),
        (ray.exceptions.OutOfMemoryError("the node runs out of memory"), DIED),
    ],
)
def test_a_worker_that_dies_before_the_group_has_met_is_named(died, error, monkeypatch):
    """Whichever error the others have, and the place of the group is given up."""
    group = Meeting(died, error, monkeypatch)
    config = GroupConfig(backend="gloo", timeout_s=120)
    with pytest.raises(WorkerGroupError) as raised:
        config.backend_cls().on_start(group, config)
    assert group.has_given_up
    assert raised.value.worker_failures == {1: died}
    places = {1: WorkerPlace("10.0.0.2", "b", "pid 7", 0)}
    for arrived in (raised.value, ControllerError(pickle.loads(pickle.dumps(raised.value)))):
        assert cause(arrived, places).startswith("worker 1 on 10.0.0.2 (pid 7, step 0): ")
        assert died is not DIED or failing_node(arrived, places) == places[1]


JOIN = """
import datetime, os, sys, torch
from vit_ray.worker.entry import interface_of
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


def test_nodes_whose_names_lead_to_themselves_train_together(tmp_path, monkeypatch):
    """As on Debian, which gives a host's own name the address 127.0.1.1."""
    hosts.require()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
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
