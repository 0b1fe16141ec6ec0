"""Which local files other nodes must see, and what is said of nodes that do not."""

from collections.abc import Mapping
from typing import Any

import pytest
import ray

from tests.recipes import recipe_with
from vit_ray.launch import cluster_checks
from vit_ray.launch.cluster_checks import check_shared, paths_of
from vit_ray.launch.connection import ClusterShape


def node(name: str, number: int, **held: float) -> dict[str, Any]:
    return {
        "NodeID": name, "Labels": {}, "Resources": held,
        "NodeManagerHostname": name, "NodeManagerAddress": f"10.0.0.{number}",
    }  # fmt: skip


NODES = (node("head", 1, CPU=0.0), node("gpu", 2, CPU=8.0, GPU=2.0), node("cpu", 3, CPU=8.0))
CLUSTER = ClusterShape(3, 16.0, 2.0, 0.0, nodes=NODES)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The paths that each node was asked for; only `cpu` sees none of them."""
    found: dict[str, list[str]] = {}

    def unseen_by(nodes: Mapping[str, Any], paths: list[str]) -> dict[str, list[str]]:
        found.update(dict.fromkeys(nodes, paths))
        return {name: paths for name in nodes if name == "cpu"}

    here = type("Here", (), {"get_node_id": lambda _: "head"})
    monkeypatch.setattr(ray, "get_runtime_context", here)
    monkeypatch.setattr(cluster_checks, "unseen_by", unseen_by)
    return found


def test_a_run_reads_its_sets_and_its_weights():
    one = recipe_with(
        "run", data={"train": "a", "eval": "b"}, init_from="c",
        evaluate={"few_shot_train": "d", "few_shot_test": "e"},
    )  # fmt: skip
    sets = [("evaluate.few_shot_train", "d"), ("evaluate.few_shot_test", "e"), ("init_from", "c")]
    assert paths_of(one) == [("data.train", "a"), ("data.eval", "b"), *sets]
    assert paths_of(one, trains=False) == [("data.eval", "b"), *sets]
    held_out = one.with_changes(data={"eval": None, "held_out_fraction": 0.1})
    assert paths_of(held_out, trains=False) == [("data.train", "a"), *sets]


def test_nodes_that_see_neither_are_named_with_what_to_change(tmp_path, asked):
    (tmp_path / "set").mkdir()
    read = [("data.train", f"{tmp_path}/set"), ("init_from", "s3://weights/vit.npz"),
            ("convert.source", f"{tmp_path}/*.tar")]  # fmt: skip
    with pytest.raises(ValueError, match="give folders that all nodes share") as raised:
        check_shared(CLUSTER, read)
    assert f"data.train={tmp_path}/set: not on cpu (10.0.0.3); give" in str(raised.value)
    paths = [f"{tmp_path}/set"]
    assert asked == {"gpu": paths, "cpu": paths}  # no task runs on the head
    asked.clear()
    for cluster in (
        ClusterShape(1, 8, 0, 0.0, nodes=NODES[1:2]), ClusterShape(3, 8, 0, 0.0, is_private=True),
    ):  # fmt: skip
        check_shared(cluster, read)
    assert asked == {}  # nothing is asked on one node


def test_a_real_node_says_what_it_does_not_see(ray_cluster, tmp_path):
    (own,) = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
    gone = f"{tmp_path}/gone"
    assert cluster_checks.unseen_by([own], [str(tmp_path)]) == {}
    assert cluster_checks.unseen_by([own], [str(tmp_path), gone]) == {own: [gone]}
