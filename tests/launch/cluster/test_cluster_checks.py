"""What a cluster has room for, by its nodes' labels, and which group is waited for."""

from typing import Any

import pytest

from tests.recipes import recipe_with
from vit_ray.launch.cluster_checks import check_cluster, check_room
from vit_ray.launch.connection import ClusterShape


def recipe_of(num_workers: int, **workers: Any) -> Any:
    return recipe_with(
        "r", workers={"num_workers": num_workers, "use_gpu": "auto", **workers},
        train={"global_batch_size": 256}, data={"cpus_per_task": 1.0},
    )  # fmt: skip


HEAD = ClusterShape(1, 0.0, 0.0, 0.0)
"""Of a cluster whose other nodes are still to come."""


def test_a_group_is_waited_for_on_a_cluster_of_others_and_not_on_one_of_the_command_alone():
    asks = recipe_of(16, use_gpu=True)
    assert check_cluster(asks, HEAD) is True
    assert check_cluster(recipe_of(16, use_gpu=False), HEAD) is False
    with pytest.raises(ValueError, match="needs 16 GPUs; the cluster has 0"):
        check_cluster(asks, ClusterShape(1, 64.0, 0.0, 0.0, is_private=True))


def test_where_no_node_is_up_the_recipe_says_whether_gpus_are_meant():
    with pytest.raises(ValueError, match=r"set workers\.use_gpu=true, or false to train on CPUs"):
        check_cluster(recipe_of(4), HEAD)
    with pytest.raises(ValueError, match=r"set workers\.use_gpu=true, or false to train on CPUs"):
        check_cluster(recipe_of(4, label_selector={"gpu": "B200"}), mixed())
    assert check_cluster(recipe_of(64), mixed()) is True
    assert check_cluster(recipe_of(64, label_selector={"pool": "read"}), mixed()) is False


def mixed() -> ClusterShape:
    """A head without CPUs, 8 H100s and 8 A100s with CPUs, and a node that has CPUs alone."""
    held = [
        ({}, {"CPU": 0.0, "node:__internal_head__": 1.0}),
        ({"gpu": "H100"}, {"CPU": 16.0, "GPU": 8.0}),
        ({"gpu": "A100"}, {"CPU": 16.0, "GPU": 8.0}),
        ({"pool": "read"}, {"CPU": 4.0}),
    ]
    nodes = tuple({"Labels": labels, "Resources": resources} for labels, resources in held)
    return ClusterShape(4, 36.0, 16.0, 0.0, nodes=nodes)


@pytest.mark.parametrize(
    ("num_workers", "trains", "reads", "told"),
    [
        (8, {"gpu": "H100"}, {"pool": "read"}, None),
        (16, {"pool": "!read", "gpu": "!A100"}, {}, "needs 16 GPUs; the cluster has 8 "),
        (8, {"gpu": "B200"}, {}, r'workers.label_selector=\{"gpu": "B200"\}: no node .*gpu=H100'),
        (8, {}, {"pool": "reed"}, r'data.label_selector=\{"pool": "reed"\}: .*pool=read'),
        # They train on all CPUs that may read.
        (8, {"gpu": "H100"}, {"gpu": "H100"}, "leave 0 of 16 CPUs for reading"),
    ],
)
def test_only_nodes_with_the_labels_are_counted(num_workers, trains, reads, told):
    recipe = recipe_of(num_workers, label_selector=trains, cpus_per_worker=2.0)
    recipe = recipe.with_changes(data={"label_selector": reads})
    if told is None:
        assert check_room(recipe, mixed()) is True
        return
    with pytest.raises(ValueError, match=told):
        check_room(recipe, mixed())
    alone = recipe_of(8, label_selector={"pool": "read"}, use_gpu=False)
    with pytest.raises(ValueError, match="each: the nodes that are up hold at most 4"):
        check_room(alone, mixed())
