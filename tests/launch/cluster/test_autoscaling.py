"""What a cluster may become: its autoscaler's configuration, and what is refused because of it."""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.scheduler import (
    ResourceRequestSource,
    SchedulingNode,
    SchedulingNodeStatus,
)
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.common_pb2 import LabelSelectorOperator
from ray.core.generated.instance_manager_pb2 import NodeKind

from tests.recipes import recipe_with
from vit_ray.launch.cluster import autoscaling
from vit_ray.launch.cluster import connection as module
from vit_ray.launch.cluster.autoscaling import Growth, find_growth, growth_of
from vit_ray.launch.cluster.cluster_checks import check_cluster
from vit_ray.launch.cluster.connection import ClusterShape

SHIPPED = Path(__file__).parents[3] / "cluster" / "ray_up.yaml"


def cluster(growth: Growth | None, cpus: float = 0.0, gpus: float = 0.0) -> ClusterShape:
    return ClusterShape(1, cpus, gpus, 0.0, growth=growth)


def recipe_of(num_workers: int, **workers: Any) -> Any:
    return recipe_with(
        "r", workers={"num_workers": num_workers, "use_gpu": "auto", **workers},
        train={"global_batch_size": 256}, data={"cpus_per_task": 1.0},
    )  # fmt: skip


def shipped() -> Growth:
    return growth_of(yaml.safe_load(SHIPPED.read_text()))


def test_the_shipped_definition_may_start_16_gpus_from_a_head_without_cpus() -> None:
    found = shipped()
    assert (found.total("GPU"), found.most_nodes) == (16.0, 10)
    assert found.holds({"GPU": 1.0, "CPU": 8.0}) == 16
    assert found.holds({"GPU": 1.0, "CPU": 96.0}) == 4
    # The largest ten of ten nodes.
    assert found.total("CPU") == 2 * 192 + 8 * 32


def test_the_readmes_own_command_for_it_is_taken_and_trains_on_gpus() -> None:
    assert check_cluster(recipe_of(16), cluster(shipped())) is True
    # CPU nodes that are up first, and no GPU yet: not a training on CPUs without a word.
    assert check_cluster(recipe_of(16), cluster(shipped(), cpus=64)) is True


@pytest.mark.parametrize(
    ("num_workers", "workers", "told"),
    [
        (32, {}, r"needs 32 GPUs; the cluster has 16 .*2 of gpu \(192 CPU, 8 GPU each\)"),
        (16, {"cpus_per_worker": 96.0}, "leave .* of 640 CPUs for reading"),
        (16, {"cpus_per_worker": 25.0}, "hold at most 14 .*; raise max_workers"),
        (
            1,
            {"use_gpu": False, "cpus_per_worker": 193.0},
            "that are up or may be started hold at most 0",
        ),
    ],
)
def test_what_it_can_never_hold_is_refused_with_its_node_types(
    num_workers: int, workers: Any, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        check_cluster(recipe_of(num_workers, **workers), cluster(shipped()))


def test_eight_nodes_of_one_gpu_are_not_one_node_of_eight() -> None:
    def growth(most: int, gpus: int) -> Growth:
        one = {"max_workers": most, "resources": {"CPU": 16, "GPU": gpus}}
        return growth_of({"available_node_types": {"g": one}})

    asks = recipe_of(8, cpus_per_worker=8.0)
    assert check_cluster(asks, cluster(growth(8, 1))) is True
    with pytest.raises(ValueError, match=r"leave .* of 16 CPUs for reading"):
        check_cluster(asks, cluster(growth(1, 8)))


def test_where_it_is_not_known_what_may_be_started_the_recipe_says_whether_gpus_are_meant() -> None:
    unknown = Growth(None)
    with pytest.raises(ValueError, match=r"set workers\.use_gpu=true, or false to train on CPUs"):
        check_cluster(recipe_of(4), cluster(unknown, cpus=8))
    assert check_cluster(recipe_of(4, use_gpu=True), cluster(unknown)) is True
    assert check_cluster(recipe_of(4, use_gpu=False), cluster(unknown)) is False
    assert check_cluster(recipe_of(4), cluster(unknown, cpus=8, gpus=4)) is True


def test_a_cluster_that_stays_as_it_is_refuses_as_ever() -> None:
    with pytest.raises(ValueError, match="needs 4 GPUs; the cluster has 0"):
        check_cluster(recipe_of(4, use_gpu=True), cluster(None, cpus=64))


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Path]:
    """A process with the command line of an autoscaler, whose configuration this is."""
    script, file = tmp_path / "monitor.py", tmp_path / "config.yaml"
    script.write_text("import time; print('up', flush=True); time.sleep(60)")
    with subprocess.Popen(
        [
            sys.executable,
            str(script),
            f"--autoscaling-config={file}",
            "--gcs-address=10.0.0.1:6379",
        ],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield file
        process.kill()


def test_the_configuration_is_that_of_the_autoscaler_on_this_host(
    monitor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaling, "has_second_autoscaler", lambda: False)
    assert find_growth("10.0.0.1:6379", {}) is None  # its file is not there
    monitor.write_text(SHIPPED.read_text())
    assert find_growth("10.0.0.1:6379", {}) == shipped()
    assert find_growth("10.0.0.1:6380", {}) is None  # another Ray's on the same host
    monitor.unlink()
    monkeypatch.setattr(autoscaling, "has_second_autoscaler", lambda: True)
    unknown = find_growth("10.0.0.1:6379", {})
    assert unknown == Growth(None)
    assert math.isinf(unknown.total("GPU"))


@pytest.mark.parametrize("is_private", [False, True])
def test_a_cluster_of_others_may_grow_and_one_of_this_driver_alone_does_not(
    is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.ray, "cluster_resources", dict)
    monkeypatch.setattr(module.ray, "nodes", list)
    monkeypatch.setattr(module, "_address", lambda: "here")
    monkeypatch.setattr(module, "_STARTED", ["here"] if is_private else [])
    monkeypatch.setattr(module, "find_growth", lambda *_: shipped())
    found = module.shape(0.0)
    assert (found.most_gpus, found.num_gpus) == (0.0 if is_private else 16.0, 0)
    assert found.most_cpus == (0.0 if is_private else 640.0)


def test_what_the_head_has_counts_too() -> None:
    one = {"max_workers": 1, "resources": {"CPU": 16, "GPU": 8}}
    growth = growth_of({"available_node_types": {"g": one}, "max_workers": 1})
    with_head = replace(growth, head={"CPU": 16.0, "GPU": 8.0})
    asks = recipe_of(16, cpus_per_worker=1.0)
    assert check_cluster(asks, cluster(with_head, cpus=16, gpus=8)) is True
    with pytest.raises(ValueError, match="needs 16 GPUs; the cluster has 8"):
        check_cluster(asks, cluster(growth, cpus=16, gpus=8))


def test_workers_without_gpus_that_fit_on_what_is_up_need_no_other_nodes() -> None:
    small = growth_of({"available_node_types": {"s": {"max_workers": 1, "resources": {"CPU": 1}}}})
    asks = recipe_of(4, use_gpu=False, cpus_per_worker=4.0)
    assert check_cluster(asks, cluster(small, cpus=64)) is False


def mixed(growth: Growth | None = None) -> ClusterShape:
    """A head without CPUs, 8 H100s and 8 A100s with CPUs, and a node that has CPUs alone."""
    held = [
        ({}, {"CPU": 0.0, "node:__internal_head__": 1.0}),
        ({"gpu": "H100"}, {"CPU": 16.0, "GPU": 8.0}),
        ({"gpu": "A100"}, {"CPU": 16.0, "GPU": 8.0}),
        ({"pool": "read"}, {"CPU": 4.0}),
    ]
    nodes = tuple({"Labels": labels, "Resources": resources} for labels, resources in held)
    return ClusterShape(4, 36.0, 16.0, 0.0, growth=growth, nodes=nodes)


@pytest.mark.parametrize(
    ("num_workers", "trains", "reads", "told"),
    [
        (16, {}, {}, None),
        (8, {"gpu": "H100"}, {"pool": "read"}, None),
        (16, {"gpu": "in(H100, A100)"}, {"pool": "read"}, None),
        (16, {"pool": "!read", "gpu": "!A100"}, {}, "needs 16 GPUs; the cluster has 8 "),
        (8, {"gpu": "B200"}, {}, r'workers.label_selector=\{"gpu": "B200"\}: no node .*gpu=H100'),
        (8, {}, {"pool": "reed"}, r'data.label_selector=\{"pool": "reed"\}: .*pool=read'),
        # They train on all CPUs that may read.
        (8, {"gpu": "H100"}, {"gpu": "H100"}, "leave 0 of 16 CPUs for reading"),
        (8, {"gpu": "H100"}, {"gpu": "in(H100,A100)"}, None),
    ],
)
def test_only_nodes_with_the_labels_are_counted(
    num_workers: int, trains: dict[str, str], reads: dict[str, str], told: str | None
) -> None:
    recipe = recipe_of(num_workers, label_selector=trains, cpus_per_worker=2.0)
    recipe = recipe.with_changes(data={"label_selector": reads})
    if told is None:
        assert check_cluster(recipe, mixed()) is True
        return
    with pytest.raises(ValueError, match=told):
        check_cluster(recipe, mixed())


def test_workers_without_gpus_find_room_on_their_own_nodes_alone() -> None:
    recipe = recipe_of(8, label_selector={"pool": "read"}, use_gpu=False)
    with pytest.raises(
        ValueError, match="each: the nodes that are up or may be started hold at most 4"
    ):
        check_cluster(recipe, mixed())


IN = LabelSelectorOperator.LABEL_OPERATOR_IN
NOT_IN = LabelSelectorOperator.LABEL_OPERATOR_NOT_IN


@pytest.mark.parametrize("gpu", [None, "H100", "A100"])
@pytest.mark.parametrize(
    ("asked", "operator", "values"),
    [("H100", IN, ["H100"]), ("in(H100,B200)", IN, ["H100", "B200"]), ("!A100", NOT_IN, ["A100"])],
)
def test_a_node_type_counts_where_rays_autoscaler_starts_it(
    gpu: str | None, asked: str, operator: Any, values: list[str]
) -> None:
    key = "ray.io/accelerator-type"
    labels = {} if gpu is None else {key: gpu}
    kind = NodeTypeConfig("t", 0, 1, resources={"CPU": 1.0}, labels=labels)
    status = SchedulingNodeStatus.TO_LAUNCH
    node = SchedulingNode.from_node_config(kind, status, NodeKind.WORKER)
    request = ResourceRequestUtil.make({"CPU": 1.0}, label_selectors=[[(key, operator, values)]])
    refused, _ = node.try_schedule([request], ResourceRequestSource.PENDING_DEMAND)
    own = {"max_workers": 1, "resources": {"CPU": 1}, "labels": labels}
    growth = growth_of({"available_node_types": {"t": own}})
    counted = growth.matching({key: asked}, has_head=False).total("CPU")
    assert counted == 1 - len(refused)


def test_node_types_that_may_be_started_have_the_labels_of_their_definition() -> None:
    types = {
        "h": {"max_workers": 1, "resources": {"CPU": 32, "GPU": 8}, "labels": {"gpu": "B200"}},
        "a": {"max_workers": 1, "resources": {"CPU": 32, "GPU": 8}},
    }
    growth = growth_of({"available_node_types": types})
    told = {"gpu": "B200"}
    assert check_cluster(recipe_of(8, label_selector=told), mixed(growth)) is True
    with pytest.raises(ValueError, match="needs 16 GPUs; the cluster has 8 "):
        check_cluster(recipe_of(16, label_selector=told), mixed(growth))
    # Which GPUs a node has, it says itself only when it is up.
    detected = {"ray.io/accelerator-type": "B200"}
    with pytest.raises(ValueError, match="by `labels` in the definition of the node type"):
        check_cluster(recipe_of(16, label_selector=detected), mixed(growth))
    unknown = mixed(Growth(None))
    assert check_cluster(recipe_of(64, label_selector=told, use_gpu=True), unknown) is True
