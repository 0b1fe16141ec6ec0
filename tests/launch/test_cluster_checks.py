"""What a cluster has room for and which of its nodes see a run's files, before anything starts."""

from typing import Any

import pytest
import ray

from tests.data.converted_set import converted_set
from tests.recipes import recipe_with
from vit_ray.launch import cluster_checks, run
from vit_ray.launch.cluster_checks import check_cluster, check_room
from vit_ray.launch.connection import ClusterShape

HEAD = ClusterShape(1, 0.0, 0.0, 0.0)  # the other nodes are still to come


def recipe_of(num_workers: int, **workers: Any) -> Any:
    return recipe_with(
        "r", workers={"num_workers": num_workers, "use_gpu": "auto", **workers},
        train={"global_batch_size": 256}, data={"cpus_per_task": 1.0},
    )  # fmt: skip


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


def test_a_group_is_waited_for_on_a_cluster_of_others_and_not_on_one_of_the_command_alone():
    asks = recipe_of(16, use_gpu=True)
    assert check_cluster(asks, HEAD) is True
    assert check_cluster(recipe_of(16, use_gpu=False), HEAD) is False
    with pytest.raises(ValueError, match="and a GPU each: the nodes that are up hold at most 0"):
        check_cluster(asks, ClusterShape(1, 64.0, 0.0, 0.0, is_private=True))


def test_where_no_node_is_up_the_recipe_says_whether_gpus_are_meant():
    no_such_node = recipe_of(4, label_selector={"gpu": "B200"})
    for recipe, cluster in ((recipe_of(4), HEAD), (no_such_node, mixed())):
        with pytest.raises(ValueError, match=r"workers\.use_gpu"):
            check_cluster(recipe, cluster)
    assert check_cluster(recipe_of(64), mixed()) is True
    assert check_cluster(recipe_of(64, label_selector={"pool": "read"}), mixed()) is False


@pytest.mark.parametrize(("num_workers", "trains", "reads", "told"), [
    (8, {"gpu": "H100"}, {"pool": "read"}, None),
    (16, {"pool": "!read", "gpu": "!A100"}, {}, "with 2 CPU and a GPU each: .* hold at most 8 "),
    (8, {"gpu": "B200"}, {}, "workers.label_selector=.*: no node .*gpu=H100"),
    (8, {}, {"pool": "reed"}, "data.label_selector=.*pool=read"),
    # They train on all CPUs that may read.
    (8, {"gpu": "H100"}, {"gpu": "H100"}, "leave 0 of 16 CPUs for reading"),
    (8, {"pool": "read"}, {}, "the nodes that are up hold at most 2"),
])  # fmt: skip
def test_only_nodes_with_the_labels_are_counted(num_workers, trains, reads, told):
    recipe = recipe_of(num_workers, label_selector=trains, cpus_per_worker=2.0)
    recipe = recipe.with_changes(data={"label_selector": reads})
    if told is None:
        assert check_room(recipe, mixed()) is True
        return
    with pytest.raises(ValueError, match=told):
        check_room(recipe, mixed())


def test_a_real_node_says_what_it_does_not_see(ray_cluster, tmp_path):
    (own,) = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
    gone = f"{tmp_path}/gone"
    assert cluster_checks.unseen_by([own], [str(tmp_path)]) == {}
    assert cluster_checks.unseen_by([own], [str(tmp_path), gone]) == {own: [gone]}


@pytest.mark.parametrize("has_address", [True, False])
def test_a_new_run_that_its_cluster_refuses_leaves_no_folder(has_address, tmp_path, monkeypatch):
    """A refused run would otherwise be listed as one that has begun."""
    monkeypatch.setenv("RAY_ADDRESS", "foo")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    if not has_address:
        cluster = ClusterShape(1, 2, 0, 0.0, is_private=True)
        monkeypatch.setattr(run, "connect", lambda _: cluster)
    recipe = recipe_with(
        "refused", output=str(tmp_path / "runs"),
        data={"train": str(converted_set()), "eval": None},
        optim={"steps": 4}, train={"global_batch_size": 4, "micro_batch_size": 2},
        workers={"num_workers": 2},
    )  # fmt: skip
    told = "RAY_ADDRESS=foo is not an address" if has_address else "leave 0 of 2 CPUs for reading"
    with pytest.raises(ValueError, match=told):
        run.train(recipe)
    assert not (tmp_path / "runs").exists()
