"""A sweep, by itself and in `make quickstart`, which converts, pre-trains, sweeps and compares."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from mlflow import MlflowClient
from ray import tune

from tests.data.converting import run_in_this_process
from tests.end_to_end.runs import runs_of
from tests.recipes import small_recipe
from vit_ray.checkpoints.checkpoint import open_checkpoint
from vit_ray.commands import experiments
from vit_ray.commands.experiments import run_quickstart
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.keys import tags_of
from vit_ray.data import open_dataset
from vit_ray.experiments.search_space import RATE
from vit_ray.experiments.sweep import run_sweep
from vit_ray.experiments.trials import METRIC, STEP
from vit_ray.storage import locate


def test_a_sweep_chooses_on_the_dev_split_and_tests_what_it_retrains(straight, digits, tmp_path):
    recipe = small_recipe(
        "sweep", digits, tmp_path, init_from=straight[0].run_folder,
        model={"image_size": 24, "representation": False}, train={"averaging": 0.0},
        optim={"name": "sgd", "steps": 150, "warmup_steps": 0, "weight_decay": 0.0},
        sweep={
            "learning_rates": [0.1, 1e-60], "dev_fraction": 0.1, "seeds": 1, "max_concurrent": 1,
            "scheduler": "asha", "grace_steps": 30,
        },
    )  # fmt: skip
    result = run_sweep(recipe)
    assert result.best == {RATE: 0.1}  # fp32 has no 1e-60: the new head stays zero
    accuracies = [row.outcome.top1 for row in result.rows]
    assert accuracies[0] > accuracies[1]
    assert [row.outcome.state for row in result.rows] == ["finished", "stopped early"]
    assert [row.outcome.step for row in result.rows] == [150, 30]
    # Ray Tune's own analysis names the rate that won, and its curve.
    place = f"{recipe.output}/tune/sweep-trials"
    known = tune.ExperimentAnalysis(place, default_metric=METRIC, default_mode="max")
    assert known.best_config == {RATE: 0.1}
    # A trial's last result repeats its last evaluation.
    curves = {tuple(dict.fromkeys(curve[STEP])) for curve in known.trial_dataframes.values()}
    assert curves == {(30,), (30, 120, 150)}
    assert len(result.test_top1) == 1

    client = MlflowClient(recipe.tracking.uri)
    parent = client.get_run(result.parent_run_id or "")
    children = [
        run
        for run in runs_of(recipe)
        if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    ]
    kinds = [run.data.tags["vit_ray.kind"] for run in [parent, *children]]
    assert sorted(kinds) == ["finetune", "sweep", "sweep_trial", "sweep_trial"]
    assert sorted(run.info.run_name for run in children) == [
        "sweep-final-lr0.1-seed0", "sweep-lr0.1", "sweep-lr1e-60",
    ]  # fmt: skip
    assert all(next(iter(run.data.metrics)) in ("eval/top1", "dev/top1") for run in children)
    assert next(iter(parent.data.metrics)) == "eval/top1"
    drawn = client.list_artifacts(parent.info.run_id, "figures")
    assert any("learning_rate" in file.path for file in drawn)
    best = tags_of(parent.data.tags)["vit_ray.best_trial_checkpoint"]
    assert open_checkpoint(locate(best)) is not None
    trials = [run for run in children if run.data.tags["vit_ray.kind"] == "sweep_trial"]
    assert all("dev/top1" in trial.data.metrics for trial in trials)
    states = {run.info.status: run.data.tags.get("vit_ray.stopped_early") for run in trials}
    assert states["FINISHED"] is None
    assert re.fullmatch(r"step \d+ of 150", states["KILLED"] or "")
    assert parent.data.metrics["eval/top1"] == pytest.approx(result.mean)
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < 4:  # trials give their reservations back
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.5)
    again = run_sweep(recipe)
    assert again.rows[0].outcome.was_finished
    assert again.rows[0].outcome.run_id == result.rows[0].outcome.run_id
    assert again.test_top1 == result.test_top1


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
