"""`vit-ray doctor`: each fault is told with its remedy, and nothing is left behind."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.recipes import recipe_with
from vit_ray.commands import doctor
from vit_ray.commands.cli import vit_ray
from vit_ray.config import Recipe
from vit_ray.tracking.mlflow_client import open_client


def recipe_of(folder: Path, **data: Any) -> Recipe:
    tracking = {"uri": f"sqlite:///{folder}/mlflow.db"}
    return recipe_with("r", output=str(folder / "a" / "runs"), tracking=tracking, data=data)


def findings(recipe: Recipe) -> dict[str, tuple[bool, str]]:
    return {what: (is_good, text) for what, is_good, text in doctor.examine(recipe)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this one has is enough."""
    monkeypatch.setattr(doctor, "LEAST_SHARED_GIB", 0.0)
    monkeypatch.setattr(doctor, "LEAST_FILES", 1)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_machine_that_has_everything_is_told_so_and_left_as_it_was(digits, tmp_path, machine):
    (tmp_path / "empty").mkdir()
    found = findings(recipe_of(tmp_path / "empty", train=digits.train, eval=digits.test))
    assert [text for is_good, text in found.values() if not is_good] == []
    assert "of 10 classes" in found["data.train"][1]
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/m.db"}
    done = CliRunner().invoke(vit_ray, ["doctor", f"output={tmp_path}/runs"], env=store)
    assert done.exit_code == 0, done.output  # no recipe is needed
    assert f"{tmp_path}/m.db will be created" in done.stdout
    assert f"{tmp_path}/runs: writing, reading, listing and deleting work" in done.stdout
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_every_fault_is_told_and_the_exit_code_says_so(tmp_path, machine):
    (tmp_path / "m.db").write_text("no database, and longer than the header of one, which is short")
    words = f"doctor digits output=/sys/x tracking.uri=sqlite:///{tmp_path}/m.db"
    words += f" data.train={tmp_path}"
    done = CliRunner().invoke(vit_ray, words.split(), env={"RAY_ADDRESS": "foo"})
    assert done.exit_code == 1
    bad = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("BAD")}
    assert bad.keys() == {"Ray", "MLflow", "output", "data.train", "data.eval"}
    assert "RAY_ADDRESS=foo is not an address" in bad["Ray"]
    assert "not a database" in bad["MLflow"]
    assert "/sys/" in bad["output"]


def test_low_limits_and_a_deleted_experiment_are_faults(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(doctor, "LEAST_SHARED_GIB", 1e9)
    monkeypatch.setattr(doctor, "LEAST_FILES", 2**62)
    recipe = recipe_of(tmp_path)
    client = open_client(recipe.tracking.uri)
    client.delete_experiment(client.create_experiment(recipe.tracking.experiment))
    found = findings(recipe)
    for what, told in [
        ("shared memory", "GiB free in /dev/shm: give the container more"),
        ("open files", "at a time: raise the limit of the container"),
        ("MLflow", "has been deleted in MLflow; restore it with"),
    ]:
        is_good, text = found[what]
        assert (is_good, told in text) == (False, True), text
