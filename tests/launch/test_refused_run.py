"""What a run that cannot start leaves behind: nothing."""

from typing import Any

import pytest
import ray

from tests.data.converted_set import converted_set
from tests.recipes import recipe_with
from vit_ray.launch import run
from vit_ray.launch.connection import ClusterShape


def not_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "foo")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


def no_cpu_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterShape(1, 2, 0, 0.0, is_private=True)
    monkeypatch.setattr(run, "connect", lambda _: cluster)


def unseen_files(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterShape(2, 8, 0, 0.0)

    def refuse(shape: ClusterShape, read: Any) -> None:
        assert (shape, read) == (cluster, [("data.train", str(converted_set()))])
        raise ValueError("not on this node")

    monkeypatch.setattr(run, "connect", lambda _: cluster)
    monkeypatch.setattr(run, "check_shared", refuse)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (not_an_address, "RAY_ADDRESS=foo is not an address"),
        (no_cpu_to_read, "leave 0 of 2 CPUs for reading data"),
        (unseen_files, "not on this node"),
    ],
)
def test_a_new_run_that_its_cluster_refuses_leaves_no_folder(spoil, message, tmp_path, monkeypatch):
    """A refused run would otherwise be listed as one that has begun."""
    spoil(monkeypatch)
    recipe = recipe_with(
        "refused", output=str(tmp_path / "runs"),
        data={"train": str(converted_set()), "eval": None},
        optim={"steps": 4}, train={"global_batch_size": 4, "micro_batch_size": 2},
        workers={"num_workers": 2},
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        run.train(recipe)
    assert not (tmp_path / "runs").exists()
