"""What a run that cannot start leaves behind: nothing."""

from pathlib import Path

import pytest
import ray

from tests.recipes import recipe_with
from vit_ray.launch import run
from vit_ray.launch.cluster.connection import ClusterShape

SET = Path(__file__).parents[1] / "net" / "kept" / "set"


@pytest.mark.parametrize(
    ("address", "cluster", "message"),
    [
        ("foo", None, "RAY_ADDRESS=foo is not an address"),
        (None, ClusterShape(2, 2, 0, 0.0), "leave 0 of 2 CPUs for reading data"),
    ],
)
def test_a_new_run_that_its_cluster_refuses_leaves_no_folder(
    address: str | None,
    cluster: ClusterShape | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refused run would otherwise be listed as one that has begun."""
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
    else:
        monkeypatch.setattr(run, "connect", lambda _: cluster)
    recipe = recipe_with(
        "refused", output=str(tmp_path / "runs"), data={"train": str(SET), "eval": None},
        optim={"steps": 4}, train={"global_batch_size": 4, "micro_batch_size": 2},
        workers={"num_workers": 2},
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        run.train(recipe)
    assert not (tmp_path / "runs").exists()
