"""A sweep: what it chooses, tests and leaves; and the digits that `make quickstart` sweeps on."""

import re
import time

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
from vit_ray.config import load_recipe
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
