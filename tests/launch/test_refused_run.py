"""What a run that cannot start leaves behind: nothing."""

from typing import Any

import pytest
import ray

from tests.data.converted_set import converted_set
from tests.recipes import recipe_with
from vit_ray.launch import run
from vit_ray.launch.cluster.connection import ClusterShape


@pytest.mark.parametrize(
    ("address", "cluster", "message"),
    [
        ("foo", None, "RAY_ADDRESS=foo is not an address"),
        (None, ClusterShape(1, 2, 0, 0.0, is_private=True), "leave 0 of 2 CPUs for reading data"),
    ],
)
def test_a_new_run_that_its_cluster_refuses_leaves_no_folder(
    address, cluster, message, tmp_path, monkeypatch
):
    """A refused run would otherwise be listed as one that has begun."""
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
    else:
        monkeypatch.setattr(run, "connect", lambda _: cluster)
    recipe = recipe_with(
        "refused", output=str(tmp_path / "runs"),
        data={"train": str(converted_set()), "eval": None},
        optim={"steps": 4}, train={"global_batch_size": 4, "micro_batch_size": 2},
        workers={"num_workers": 2},
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        run.train(recipe)
    assert not (tmp_path / "runs").exists()


def test_a_run_whose_nodes_do_not_see_its_files_is_refused_before_its_folder_is_made(
    tmp_path, monkeypatch
):
    asked: list[Any] = []

    def refuse(cluster: ClusterShape, read: Any) -> None:
        asked.extend((cluster, read))
        raise ValueError("not on this node")

    cluster = ClusterShape(2, 8, 0, 0.0)
    monkeypatch.setattr(run, "connect", lambda _: cluster)
    monkeypatch.setattr(run, "check_shared", refuse)
    recipe = recipe_with(
        "refused", output=str(tmp_path / "runs"),
        data={"train": str(converted_set()), "eval": None},
        optim={"steps": 4}, train={"global_batch_size": 4, "micro_batch_size": 2},
    )  # fmt: skip
    with pytest.raises(ValueError, match="not on this node"):
        run.train(recipe)
    assert asked == [cluster, [("data.train", str(converted_set()))]]
    assert not (tmp_path / "runs").exists()
