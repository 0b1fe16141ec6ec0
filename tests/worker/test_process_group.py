"""One training after another in the same processes, each as if they were new."""

import contextlib
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests import hosts
from tests.training.engine_runs import GLOBAL_BATCH, build_engine, run_steps
from tests.training.ranks import run_ranks
from vit_ray.config.training_sections import TrainConfig
from vit_ray.worker.process_group import (
    RankPlace,
    joined_process_group,
    leave_process_group,
    open_store,
)

MICRO, STEPS = 2, 3
STAGES = (1, 3, 0, 1, 2, 3, 1)
"""Each after another one; stages 1 and 3 come again."""


def train_config(stage: int) -> TrainConfig:
    return TrainConfig(
        zero_stage=stage, precision="fp32", global_batch_size=GLOBAL_BATCH, averaging=0.9
    )


def train(rank: int, world_size: int, stages: tuple[int, ...]) -> Iterator[list[float]]:
    """The losses of one training after another, in a process that has left the test's group."""
    store = torch.distributed.distributed_c10d._get_default_store()
    leave_process_group()
    for number, stage in enumerate(stages):
        yield _train(RankPlace(rank, world_size, rank, world_size, 0), store, number, stage)


def _train(place: RankPlace, store: Any, number: int, stage: int) -> list[float]:
    own = open_store("127.0.0.1", 300) if place.rank == 0 else None
    if own is not None:
        store.set(f"address {number}", f"127.0.0.1:{own.port}")
    address = store.get(f"address {number}").decode()
    cpu = torch.device("cpu")
    with joined_process_group(
        place, cpu, address, own, host="127.0.0.1", backend="gloo", timeout_s=300
    ):
        engine = build_engine(train_config(stage), place.world_size, MICRO)
        losses = run_steps(engine, 0, STEPS, MICRO)
        engine.close()
    assert not torch.distributed.is_initialized()
    return losses


def train_one_after_another(rank: int, stages: tuple[int, ...]) -> list[list[float]]:
    return list(train(rank, 2, stages))


def test_deepspeed_is_told_the_gpu_that_ray_gave_and_not_the_place_in_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "")
    # Of 16 GPUs, sorted as text: 0, 1, 10, 11, ...
    place, device = RankPlace(0, 1, 2, 16, 0), torch.device("cuda", 10)
    for where, local_rank in ((device, "10"), (torch.device("cpu"), "2")):
        store = open_store("127.0.0.1", 60)
        address = f"127.0.0.1:{store.port}"
        with joined_process_group(
            place, where, address, store, host="127.0.0.1", backend="gloo", timeout_s=60
        ):
            assert os.environ["LOCAL_RANK"] == local_rank


JOIN = """
import sys, torch
from vit_ray.worker.process_group import RankPlace, joined_process_group, open_store
rank, own, first, port = int(sys.argv[1]), *sys.argv[2:4], sys.argv[4]
store = open_store(own, 60) if rank == 0 else None
if store is not None:
    open(port, "x").write(str(store.port))
address = f"{first}:{open(port).read()}"
place = RankPlace(rank, 2, 0, 1, rank)
with joined_process_group(place, torch.device("cpu"), address, store, host=own, backend="gloo",
                          timeout_s=60):
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    print("sum", total.item())
"""


def test_nodes_whose_names_lead_to_themselves_train_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Debian, which gives a host's own name the address 127.0.1.1."""
    hosts.require()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with hosts.network() as net:
        pair = [net.join("one"), net.join("two")]
        port, running = tmp_path / "port", []
        for rank, host in enumerate(pair):
            own_names = tmp_path / host.name
            own_names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
            assert host.run("mount", "--bind", str(own_names), "/etc/hosts")[0] == 0
            words = [str(rank), host.address, pair[0].address, str(port)]
            running.append(host.start(sys.executable, "-c", JOIN, *words))
            deadline = time.monotonic() + 60
            while not (port.exists() and port.read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        for one in running:
            output, _ = one.communicate(timeout=120)
            assert (one.returncode, "sum 2.0" in output) == (0, True), output


def test_the_store_listens_on_the_address_that_the_ranks_use_alone() -> None:
    store = open_store("127.0.0.1", 60)
    socket.create_connection(("127.0.0.1", store.port), 60).close()
    with pytest.raises(ConnectionRefusedError):  # a second address of the same machine
        socket.create_connection(("127.0.0.2", store.port), 60)


def test_places_of_ranks_follow_from_their_hosts() -> None:
    """As torchrun numbers them: 2 hosts of 2 processes, then one of 1."""
    hosts = ["a", "a", "b", "b", "c"]
    places = [RankPlace.of(rank, hosts) for rank in range(5)]
    assert [one.local_rank for one in places] == [0, 1, 0, 1, 0]
    assert [one.local_world_size for one in places] == [2, 2, 2, 2, 1]
    assert [one.node_rank for one in places] == [0, 0, 1, 1, 2]
    assert [one.host_ranks for one in places][2:4] == [range(2, 4)] * 2


@pytest.mark.slow
def test_a_training_after_others_is_bit_equal_to_the_first_of_its_process() -> None:
    in_one = run_ranks(2, train_one_after_another, STAGES)[0]
    alone = {stage: run_ranks(2, train_one_after_another, (stage,))[0][0] for stage in (0, 1, 2, 3)}
    assert in_one == [alone[stage] for stage in STAGES]


def memory_after_trainings(rank: int, count: int) -> list[float]:
    return [_resident_mib() for _ in train(rank, 1, (1,) * count)]


def _resident_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.slow
def test_memory_does_not_grow_over_fifty_trainings() -> None:
    (used,) = run_ranks(1, memory_after_trainings, 50)
    grown: Any = used[-1] - used[9]
    assert grown < 8, used


def trained_again_after_failures(rank: int) -> tuple[list[Any], list[int]]:
    """Losses of three attempts, and graphs captured so far; compiled code goes after the second."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().set_compile_backend("aot_eager")
    store = torch.distributed.distributed_c10d._get_default_store()
    leave_process_group()
    counters.clear()
    losses, graphs = [], []
    for number, keeps_compiled in enumerate((True, False, False)):
        own = open_store("127.0.0.1", 300) if rank == 0 else None
        if own is not None:
            store.set(f"address {number}", f"127.0.0.1:{own.port}")
        address = store.get(f"address {number}").decode()
        place, cpu = RankPlace(rank, 2, rank, 2, 0), torch.device("cpu")
        with (
            contextlib.suppress(ConnectionError),
            joined_process_group(
                place, cpu, address, own, host="127.0.0.1", backend="gloo", timeout_s=300
            ),
        ):
            config = train_config(1).model_copy(update={"compile": True})
            engine = build_engine(config, 2, MICRO)
            losses.append(run_steps(engine, 0, STEPS, MICRO))
            engine.close()
            raise ConnectionError  # another rank has died
        leave_process_group(keeps_compiled=keeps_compiled)
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, graphs


@pytest.mark.slow
def test_an_attempt_after_a_failure_computes_the_same_with_the_code_that_is_there() -> None:
    for losses, graphs in run_ranks(2, trained_again_after_failures):
        assert losses[0] == losses[1] == losses[2]
        assert 0 < graphs[0] == graphs[1] < graphs[2]
