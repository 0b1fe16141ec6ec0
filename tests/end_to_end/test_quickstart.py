"""`make quickstart` in a part of its steps: convert, pre-train, sweep, scratch; and all again."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data.converting import run_in_this_process
from vit_ray.commands import trainings
from vit_ray.commands.trainings import run_quickstart
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data import open_dataset


def _shorter(recipe: str, changes: Mapping[str, Any]) -> Recipe:
    found = load_recipe(recipe, changes).with_changes(optim={"steps": 20})
    rates = {"sweep": {"learning_rates": [0.03, 1e-6]}}
    return found.with_changes(**rates) if found.sweep else found


@pytest.mark.slow
def test_the_quickstart_learns_and_its_second_start_trains_nothing(
    ray_cluster, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(trainings, "load_recipe", _shorter)
    recipe = load_recipe("digits").with_changes(
        output=str(tmp_path / "runs"),
        data={"train": str(tmp_path / "train"), "eval": str(tmp_path / "test")},
        optim={"epochs": 12},
        tracking={"uri": f"sqlite:///{tmp_path / 'mlflow.db'}"},
    )
    run_quickstart(recipe)
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
    assert (
        len(made) >= 5
    )  # of the pre-training, two trials, the retraining and the one from scratch
    run_quickstart(recipe)
    second = capsys.readouterr().out
    assert second.count("it was complete before") == 2
    assert _tables(second) == _tables(first)
    assert _weight_files(tmp_path) == made


def test_a_conversion_that_was_interrupted_is_completed(tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "connect", lambda _: None)
    monkeypatch.setattr(trainings, "_train_and_compare", lambda *_: None)
    run_in_this_process(monkeypatch)
    sets = {"train": str(tmp_path / "train"), "eval": str(tmp_path / "test")}
    (tmp_path / "train" / "_staging").mkdir(parents=True)
    recipe = load_recipe("digits").with_changes(output=str(tmp_path / "runs"), data=sets)
    run_quickstart(recipe)
    assert [open_dataset(one).num_images for one in sets.values()] == [1497, 300]


def _weight_files(folder: Path) -> dict[Path, int]:
    """When each was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


def _tables(output: str) -> list[str]:
    """What was reached; goodput and the time to the first step are of the first start alone, and
    without that row a column is narrower.
    """
    lines = [" ".join(line.split()) for line in output.splitlines()]
    return [line for line in lines if "%" in line and not re.search("step|goodput", line)]


@pytest.mark.parametrize(("output", "place"), [("~/runs", "home/runs"), ("s3://bucket/runs", "")])
def test_the_digits_are_written_in_a_home_and_for_a_store_in_a_temporary_folder(
    output, place, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sources: list[Path] = []
    counts: list[int] = []

    def convert(config: ConvertConfig, _: int) -> SimpleNamespace:
        sources.append(Path(config.source))
        counts.append(len(list(sources[-1].rglob("*.png"))))
        return SimpleNamespace(num_images=counts[-1], num_shards=1)

    monkeypatch.setattr(trainings, "convert", convert)
    monkeypatch.setattr(trainings, "connect", lambda _: None)
    monkeypatch.setattr(trainings, "_train_and_compare", lambda *_: None)
    changes = {"output": output, "data.train": "~/train", "data.eval": "~/test"}
    run_quickstart(load_recipe("digits", changes))
    assert counts == [1497, 300]
    assert sources[0].exists() == bool(place)
    assert not place or sources[0] == tmp_path / place / "digits_images" / "train"
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}
