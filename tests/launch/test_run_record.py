"""The record of a run: what it says of the run, and how it ends, whatever ends the run."""

import os
import pwd
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from mlflow import MlflowClient

from tests.launch.resolved import resolved_run
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.recipe import incompatible_changes
from vit_ray.launch import run_record as module
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.run_record import (
    OpenRun,
    command_line,
    end_record,
    git_commit,
    group_of,
    open_record,
    run_facts,
    trained_params,
)
from vit_ray.outcomes import PARENT_TAG, RUN_FOLDER, RunStoppedError
from vit_ray.tracking import metrics_log
from vit_ray.tracking.metrics_log import RunOpening, Status, metrics_log_path
from vit_ray.tracking.recorder import Recorder
from vit_ray.tracking.tracker import Tracker

CLUSTER = ClusterShape(1, 2, 0, 0.0)
TRIALS = ["init_from=x", "data.train=a/train", "data.eval=a/test"]
COST = {"study/exaflops": 0.5}


@pytest.mark.parametrize("name", ["digits", "digits_sweep", "finetune/cifar10"])
def test_a_recorded_run_is_found_to_be_of_its_recipe_and_of_no_other(name):
    recipe = load_recipe(name)
    before = trained_params(recipe)
    assert incompatible_changes(before, recipe.flat()) == []
    other = recipe.with_changes(data={"eval": "another"}, optim={"weight_decay": 0.77})
    changed = {change.key for change in incompatible_changes(before, other.flat())}
    assert changed == {"data.eval", "optim.weight_decay"}


def test_tags_say_data_stage_user_and_command_and_the_users_own_replace_none(monkeypatch):
    words = ["/x/vit-ray", "sweep", "digits_sweep", "tracking.uri=http://u:hunter2@h"]
    monkeypatch.setattr(sys, "argv", words)
    about = {"description": "Baseline of *May*", "tags": {"team": "vision"}}
    recipe = load_recipe("digits_sweep", TRIALS).with_changes(tracking=about)
    tags = run_facts(recipe, "sweep_trial", resolved_run(), CLUSTER, command_line())
    assert tags["vit_ray.kind"] == "sweep_trial"
    assert tags["vit_ray.run_folder"] == f"{recipe.output}/digits-sweep"
    assert tags["mlflow.source.name"] == "vit-ray sweep digits_sweep tracking.uri=http://h"
    assert tags["mlflow.note.content"].startswith("Baseline of *May*\n\nViT on ")
    assert "vit-ray sweep digits_sweep" in tags["mlflow.note.content"]
    assert "hunter2" not in str(tags)
    assert tags["mlflow.user"] == pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ana")  # who shares an account or a container
    again = run_facts(recipe, "sweep_trial", resolved_run(), CLUSTER, "typed")
    assert again["mlflow.user"] == "ana"


def test_a_group_is_of_runs_that_differ_by_the_seed_alone(monkeypatch):
    def group(commit: str = "abc", fingerprint: str = "f", **changes: Any) -> str:
        monkeypatch.setenv("VIT_RAY_GIT_COMMIT", commit)
        resolved = resolved_run()
        resolved.streams["train"].manifest.fingerprint = fingerprint
        return group_of(load_recipe("digits", changes), resolved)

    one = group()
    assert group(seed=1, name="other", output="elsewhere", **{"data.train": "moved/train"}) == one
    assert group(**{"optim.learning_rate": 0.5}) != one
    assert group(fingerprint="e") != one
    assert group(commit="abd") != one


def test_the_commit_is_of_this_package_and_not_of_the_repository_around_it(tmp_path, monkeypatch):
    monkeypatch.delenv("VIT_RAY_GIT_COMMIT", raising=False)
    installed = tmp_path / "venv" / "run_record.py"
    installed.parent.mkdir()
    installed.write_text("")
    (tmp_path / "own.py").write_text("")
    for words in (
        ["init"], ["add", "own.py"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "own"],
    ):  # fmt: skip
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    monkeypatch.setattr(module, "__file__", str(installed))
    assert git_commit() == "unknown"
    subprocess.run(["git", "-C", str(tmp_path), "add", "venv"], check=True)
    assert git_commit().endswith("+")


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Stands for the recorder; `finish` returns what MLflow does not have."""
    made = MagicMock(log_path=Path("log"), run_name="run", command="vit-ray pretrain")
    made.open.return_value = made.finish.return_value = ""
    monkeypatch.setattr(module, "start_recorder", lambda *_: made)
    monkeypatch.setattr(module, "log_models_later", lambda *_: made.log_models())
    return made


def opened(**options: Any) -> Any:
    recipe = load_recipe("digits", ["tracking.uri=sqlite:///x.db"])
    return open_record(recipe, "pretrain", resolved_run(), CLUSTER, **options)


@pytest.mark.parametrize(("is_complete", "error", "status"), [
    (True, None, "FINISHED"),
    (False, None, "KILLED"),
    (False, ValueError("no rate came to its end"), "FAILED"),
    (True, ValueError("no rate came to its end"), "FAILED"),
    (True, RunStoppedError("stopped"), "KILLED"),
    (False, KeyboardInterrupt(), "KILLED"),
])  # fmt: skip
def test_a_record_says_how_its_run_has_ended_and_an_error_passes(
    is_complete, error, status, record
):
    passes = pytest.raises(type(error)) if error else nullcontext()
    with passes, opened() as run:
        run.is_complete = is_complete
        if error:
            raise error
    reason = [call.tag("vit_ray.failure", str(error))] if status == "FAILED" else []
    assert record.mock_calls[3:] == [*reason, call.finish(status), call.log_models()]


def test_a_trial_that_starts_again_gives_back_the_place_of_its_dead_process(record, monkeypatch):
    record.open.return_value = "00"
    monkeypatch.setattr(module, "give_back", record.give_back)
    with opened():
        assert record.mock_calls[1] == call.give_back("00")


@pytest.mark.parametrize("fault", [None, "away", "died"])
def test_what_mlflow_does_not_have_at_the_end_is_told_with_the_command_that_brings_it(
    fault, record, caplog
):
    record.finish.return_value = "MLflow has nothing of it (no answer)" if fault == "away" else ""
    record.finish.side_effect = RuntimeError("the recorder has died") if fault == "died" else None
    with opened() as run:
        run.is_complete = True
    log = metrics_log_path(load_recipe("digits").run_folder).absolute()
    assert (f"run: vit-ray replay {log} URI" in caplog.text) is bool(fault)
    assert ({"away": "no answer", "died": "has died", None: ""}[fault]) in caplog.text


@pytest.fixture
def trained(tmp_path: Path) -> Recipe:
    """A run whose workers have come to their end."""
    words = [f"output={tmp_path}", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    return load_recipe("digits", words)


def driven(recipe: Recipe, status: Status | None) -> str:
    log = metrics_log_path(recipe.run_folder)
    tags = {RUN_FOLDER: recipe.run_folder}
    tracker = Tracker.begin(RunOpening(recipe.tracking, recipe.name, log, tags=tags))
    tracker.log.metrics(9, {"train/loss": 1.5})
    if status is None:
        tracker.close()
    else:
        tracker.finish(status)
    return tracker.run_id


def mlflow_run(recipe: Recipe, run_id: str | None) -> Any:
    return MlflowClient(recipe.tracking.uri).get_run(run_id or "")


@pytest.mark.parametrize(("status", "lose"), [
    (None, lambda log: None),
    ("FAILED", Path.unlink),
    (None, lambda log: shutil.rmtree(log.parent)),  # as on another machine
    ("FINISHED", lambda log: shutil.rmtree(log.parent)),  # it is not opened again
])  # fmt: skip
def test_a_run_whose_driver_died_after_its_last_checkpoint_is_ended_by_the_next(
    trained, status, lose, monkeypatch
):
    run_id = driven(trained, status)
    ended = mlflow_run(trained, run_id).info.end_time
    lose(metrics_log_path(trained.run_folder))
    for name in [name for name in os.environ if name.startswith("MLFLOW_HTTP")]:
        monkeypatch.delenv(name)
    before = dict(os.environ)  # of a notebook that trains
    assert end_record(trained, run_id, 10, COST) == run_id
    assert dict(os.environ) == before
    run = mlflow_run(trained, run_id)
    assert run.info.status == "FINISHED"
    assert (run.info.end_time == ended) == (status == "FINISHED")
    cost = {} if status == "FINISHED" else COST
    assert run.data.metrics == {"train/loss": 1.5, **cost}


def test_the_record_of_a_driver_that_still_writes_it_is_left_to_it(trained, monkeypatch, caplog):
    monkeypatch.setattr(metrics_log, "RELEASE_S", 0.0)
    run_id = driven(trained, None)
    with metrics_log.lock_log(metrics_log_path(trained.run_folder)):
        assert end_record(trained, run_id, 10, COST) == run_id
    assert "end that driver's job" in caplog.text.replace("\n", " ")
    assert mlflow_run(trained, run_id).info.status == "RUNNING"


def test_a_cell_that_trained_while_mlflow_was_away_is_brought_there_below_its_study(
    trained, tmp_path
):
    study = Recorder(MagicMock(), tmp_path / "study.jsonl", "study")
    for recipe in (trained.with_changes(tracking={"uri": "http://127.0.0.1:9"}), trained):
        path, log = study.log_path, metrics_log_path(recipe.run_folder)
        parent = Tracker.begin(RunOpening(recipe.tracking, "study", path))
        if recipe is not trained:
            child = RunOpening(recipe.tracking, recipe.name, log, parent_log=path)
            Tracker.begin(child, wait_s=0.0).finish("FINISHED", timeout_s=0.0)
            parent.close(0.0)
    run = mlflow_run(trained, end_record(trained, None, 10, COST, OpenRun(study)))
    assert run.data.tags[PARENT_TAG] == parent.run_id
    assert run.info.status == "FINISHED"
    parent.close()
