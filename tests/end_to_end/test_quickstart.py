"""`make quickstart` in a part of its steps: convert, pre-train, sweep, scratch; and all again."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.data.converting import run_in_this_process
from vit_ray.commands import experiments
from vit_ray.commands.experiments import run_quickstart
from vit_ray.config import Recipe, load_recipe
from vit_ray.data import open_dataset


def _shorter(recipe: str, changes: Mapping[str, Any]) -> Recipe:
    found = load_recipe(recipe, changes).with_changes(optim={"steps": 20})
    rates = {"sweep": {"learning_rates": [0.03, 1e-6]}}
    return found.with_changes(**rates) if found.sweep else found


@pytest.mark.slow
def test_the_quickstart_learns_and_its_second_start_trains_nothing(
    ray_cluster, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(experiments, "load_recipe", _shorter)
    recipe = load_recipe("digits").with_changes(
        output=str(tmp_path / "runs"),
        data={"train": str(tmp_path / "train"), "eval": str(tmp_path / "test")},
        optim={"epochs": 12},
        tracking={"uri": f"sqlite:///{tmp_path / 'mlflow.db'}"},
    )
    assert run_quickstart(recipe) == 0
    first = capsys.readouterr().out
    accuracy = re.search(r"top-1 accuracy +\S +([0-9.]+)%", first)
    assert accuracy is not None
    assert float(accuracy[1]) > 70  # in a quarter of its epochs; 10 is chance
    assert re.search(r"0\.03 .* chosen", first)
    tuned, scratch = (
        float(re.search(rf"{name}, 20 steps at 32 px +\S +([0-9.]+)%", first)[1])
        for name in ("fine-tuned", "from scratch")
    )
    assert tuned > scratch + 20  # as many steps from random weights
    made = _weight_files(tmp_path)
    assert len(made) >= 5  # of the pre-training, two trials, a retraining and one from scratch
    assert run_quickstart(recipe) == 0
    second = capsys.readouterr().out
    assert second.count("it was complete before") == 2
    results = [text.partition("Top-1 accuracy on the test set")[2] for text in (first, second)]
    assert re.findall(r"[0-9.]+%", results[0]) == re.findall(r"[0-9.]+%", results[1]) != []
    assert _weight_files(tmp_path) == made


@pytest.mark.parametrize(("output", "place"), [("~/runs", "home/runs"), ("s3://bucket/runs", "")])
def test_an_interrupted_conversion_is_completed_from_files_in_a_home_or_a_temporary_folder(
    output, place, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(experiments, "connect", lambda recipe: None)
    monkeypatch.setattr(experiments, "_train_and_compare", lambda *_: 3)
    run_in_this_process(monkeypatch)
    sets = [tmp_path / "home" / split for split in ("train", "test")]
    (sets[0] / "_staging").mkdir(parents=True)
    changes = {"output": output, "data.train": "~/train", "data.eval": "~/test"}
    assert run_quickstart(load_recipe("digits", changes)) == 3
    assert [open_dataset(str(one)).num_images for one in sets] == [1497, 300]
    assert [one.name for one in tmp_path.iterdir()] == ["home"]
    assert not place or (tmp_path / place / "digits_images" / "train").is_dir()


def _weight_files(folder: Path) -> dict[Path, int]:
    """When each was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
