"""What a cluster has room for and which of its nodes see a run's files, before anything starts."""

from contextlib import nullcontext
from typing import Any

import pytest
import ray

from tests.data.converted_set import converted_set
from tests.recipes import recipe_with
from vit_ray.launch import cluster_checks, run
from vit_ray.launch.cluster_checks import check_cluster
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


@pytest.mark.parametrize(("num_workers", "workers", "data", "message"), [
    (2, {}, {}, None),
    (16, {"use_gpu": True}, {}, "16 with 1 CPU and a GPU each: this machine can hold at most 0 "),
    (8, {}, {}, "with 1 CPU each: .* hold at most 4 "),
    (2, {"cpus_per_worker": 2.0}, {}, "leave 0 of 4 CPUs for reading"),
    (2, {"label_selector": {"gpu": "B200"}}, {}, 'workers.label_selector={"gpu": "B200"}: this'),
    (2, {}, {"label_selector": {"pool": "read"}}, "data.label_selector="),
    (2, {"label_selector": {"pool": "!read"}}, {}, None),
])  # fmt: skip
def test_a_group_is_waited_for_on_a_cluster_of_others_and_not_on_one_of_the_command_alone(
    num_workers, workers, data, message
):
    recipe = recipe_of(num_workers, **{"cpus_per_worker": 1.0, "use_gpu": False, **workers})
    recipe = recipe.with_changes(data=data)
    assert check_cluster(recipe, HEAD) is recipe.workers.use_gpu
    node = {"Labels": {}, "Resources": {"CPU": 4.0}}
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_cluster(recipe, ClusterShape(1, 4.0, 0.0, 0.0, is_private=True, nodes=(node,)))


def test_where_no_node_is_up_the_recipe_says_whether_gpus_are_meant():
    no_such_node = recipe_of(4, label_selector={"gpu": "B200"})
    for recipe, cluster in ((recipe_of(4), HEAD), (no_such_node, mixed())):
        with pytest.raises(ValueError, match=r"workers\.use_gpu"):
            check_cluster(recipe, cluster)
    assert check_cluster(recipe_of(64), mixed()) is True
    assert check_cluster(recipe_of(64, label_selector={"pool": "read"}), mixed()) is False


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
    text = "RAY_ADDRESS=foo is not an address" if has_address else "leave 0 of 2 CPUs for reading"
    with pytest.raises(ValueError, match=text):
        run.train(recipe)
    assert not (tmp_path / "runs").exists()
