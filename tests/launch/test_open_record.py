"""How the record of a run ends, whatever ends the run; it is a fake one."""

import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from mlflow import MlflowClient

from tests.launch.resolved import resolved_run
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.keys import PARENT_TAG, RUN_FOLDER
from vit_ray.config.loading import parse_yaml
from vit_ray.config.recipe import Training
from vit_ray.launch import run
from vit_ray.launch import run_record as module
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.run import RunResult
from vit_ray.launch.run_record import OpenRun, add_to_ended, end_record, open_record
from vit_ray.launch.terminal import RunStoppedError
from vit_ray.tracking.metrics_log import RunOpening, Status, lock_log, metrics_log_path
from vit_ray.tracking.recorder import Recorder
from vit_ray.tracking.tracker import Tracker

RECIPE = "recipe.yaml"


class Record:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.openings: list[RunOpening] = []
        self.error: Exception | None = None
        """Of the end."""
        self.problem = ""
        """What MLflow does not have."""
        self.log_path, self.run_name, self.command = Path("log"), "run", "vit-ray pretrain"

    def open(self, opening: RunOpening) -> None:
        self.openings.append(opening)

    def text(self, *args: Any, **_: Any) -> None:
        self.calls.append(("text", *args))

    def tag(self, *args: Any) -> None:
        self.calls.append(("tag", *args))
        if self.error:
            raise self.error

    def finish(self, status: Status) -> bool:
        self.calls.append(("finish", status))
        if self.error:
            raise self.error
        return self.problem

    def ended(self) -> list[Any]:
        return [args[0] for name, *args in self.calls if name == "finish"]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    made = Record()

    monkeypatch.setattr(module, "start_recorder", lambda *_: made)
    monkeypatch.setattr(module, "log_models_later", lambda *_: made.calls.append(("models",)))
    return made


def opened(kind: str = "pretrain", changes: tuple[str, ...] = (), **options: Any) -> Any:
    recipe = load_recipe("digits", ["tracking.uri=sqlite:///x.db", *changes])
    return open_record(recipe, kind, resolved_run(), ClusterShape(1, 2, 0, 0.0), **options)


@pytest.mark.parametrize(
    ("kind", "sections"),
    [
        ("pretrain", set()),
        ("sweep", {"sweep"}),
        ("evaluate", {"benchmark"}),
        ("study", {"study"}),
        ("vtab", {"vtab", "sweep"}),
    ],
)
def test_the_recipe_of_a_run_has_the_sections_that_the_run_needs(kind, sections, record):
    experiments = ("study={models: [{label: a}]}", "sweep={seeds: 2}", "verify.path=x")
    others = ("convert={source: a, destination: b}", "benchmark.kind=imagenet_real")
    vtab = "vtab={data: a, tasks: [{name: b, group: natural}]}"
    with opened(kind, (*experiments, *others, vtab)):
        pass
    (text,) = [args[1] for name, *args in record.calls if name == "text" and args[0] == RECIPE]
    assert set(parse_yaml(text, "here")) - set(Training.model_fields) == sections


def test_work_that_is_done_is_finished_and_work_that_is_not_was_stopped(record):
    with opened() as run:
        run.is_complete = True
    with opened():
        pass
    assert record.ended() == ["FINISHED", "KILLED"]
    assert record.calls[-1] == ("models",)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("no rate came to its end"), "FAILED"),
        (RunStoppedError("stopped"), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
    ],
)
@pytest.mark.parametrize("is_complete", [False, True])
def test_an_error_ends_the_record_and_passes(record, error, status, is_complete):
    def work(run: OpenRun) -> None:
        run.is_complete = is_complete
        raise error

    with pytest.raises(type(error)), opened() as run:
        work(run)
    assert record.ended() == [status]
    reasons = [args for name, *args in record.calls if name == "tag"]
    assert reasons == ([["vit_ray.failure", str(error)]] if status == "FAILED" else [])


def test_a_trial_shows_the_command_of_its_sweep_and_not_that_of_rays_process(monkeypatch):
    found: list[RunOpening] = []
    monkeypatch.setattr(Recorder, "open", lambda _, opening: found.append(opening))
    sweep = Recorder(MagicMock(), Path("sweep.jsonl"), "sweep", "vit-ray sweep digits_sweep")
    monkeypatch.setattr(sys, "argv", ["default_worker.py", "--node-ip-address=192.0.2.2"])
    monkeypatch.setattr(Recorder, "finish", lambda *_: "")
    with opened(parent=OpenRun(sweep)) as run:
        assert run.record.actor is sweep.actor
    (opening,) = found
    assert opening.parent_log == Path("sweep.jsonl")
    assert opening.tags["mlflow.source.name"] == "vit-ray sweep digits_sweep"
    assert "    vit-ray sweep digits_sweep\n" in opening.tags["mlflow.note.content"]


def test_what_children_vary_is_no_parameter_of_their_parent(record):
    with opened():
        pass
    with opened(varied=["optim.learning_rate", "data.augment", "data.train"]):
        pass
    everything, rest = (set(opening.params) for opening in record.openings)
    left_out = {key for key in everything if key.startswith("data.augment.")}
    assert everything - rest == {"optim.learning_rate", *left_out}
    assert left_out
    with_place, without = (set(opening.tags) for opening in record.openings)
    assert with_place - without == {"data.train"}


COST = {"study/exaflops": 0.5}


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
    assert tracker.run_id is not None
    return tracker.run_id


def mlflow_run(recipe: Recipe, run_id: str | None) -> Any:
    return MlflowClient(recipe.tracking.uri).get_run(run_id or "")


@pytest.mark.parametrize(
    ("status", "lose"),
    [
        (None, lambda log: None),
        ("FAILED", Path.unlink),
        (None, lambda log: shutil.rmtree(log.parent)),  # as on another machine
        ("FINISHED", lambda log: shutil.rmtree(log.parent)),  # it is not opened again
    ],
)
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


def test_an_end_that_mlflow_was_away_for_is_brought_there(trained):
    away = trained.with_changes(tracking={"uri": "http://127.0.0.1:9"})
    tracker = Tracker.begin(
        RunOpening(away.tracking, away.name, metrics_log_path(away.run_folder)), wait_s=0.0
    )
    tracker.finish("FINISHED", timeout_s=0.0)
    run_id = end_record(trained, None, 10, COST)
    assert mlflow_run(trained, run_id).info.status == "FINISHED"


def test_a_cell_that_trained_while_mlflow_was_away_is_below_its_study(trained, tmp_path):
    study = Recorder(MagicMock(), tmp_path / "study.jsonl", "study")
    for recipe in (trained.with_changes(tracking={"uri": "http://127.0.0.1:9"}), trained):
        path, log = study.log_path, metrics_log_path(recipe.run_folder)
        parent = Tracker.begin(RunOpening(recipe.tracking, "study", path))
        if recipe is not trained:
            child = RunOpening(recipe.tracking, recipe.name, log, parent_log=path)
            Tracker.begin(child, wait_s=0.0).finish("FINISHED", timeout_s=0.0)
            parent.close(0.0)
    run_id = end_record(trained, None, 10, COST, OpenRun(study))
    assert mlflow_run(trained, run_id).data.tags[PARENT_TAG] == parent.run_id
    parent.close()


def test_a_training_that_is_over_is_recorded_below_its_parent(trained, monkeypatch):
    prepared, ended = MagicMock(is_over=True, recipe=trained), MagicMock()
    monkeypatch.setattr(run, "prepared_training", lambda *_: nullcontext(prepared))
    monkeypatch.setattr(run, "end_record", ended)
    monkeypatch.setattr(run, "training_cost", lambda *_: COST)
    monkeypatch.setattr(run, "_recorded", lambda *_: RunResult(None, "run", 10, 10, {}, "folder"))
    parent = OpenRun(MagicMock())
    assert run.train(trained, parent=parent).already_complete
    assert ended.call_args.args[-1] is parent


def test_a_transfer_of_a_copied_cell_is_not_recorded_in_the_originals_run(
    trained, tmp_path, monkeypatch
):
    run_id, copy = driven(trained, "FINISHED"), trained.with_changes(output=str(tmp_path / "copy"))
    shutil.copytree(trained.run_folder, copy.run_folder)
    found: list[RunOpening] = []
    monkeypatch.setattr(Recorder, "open", lambda _, opening: found.append(opening))
    monkeypatch.setattr(Recorder, "append", lambda *_, **__: None)
    monkeypatch.setattr(Recorder, "finish", lambda *_: "")
    add_to_ended(copy, run_id, COST, OpenRun(Recorder(MagicMock(), tmp_path / "log", "study")))
    (opening,) = found
    tracker = Tracker.begin(replace(opening, parent_log=None))
    assert tracker.run_id not in (None, run_id)
    tracker.close()


def test_the_record_of_a_driver_that_still_writes_it_is_left_to_it(trained, monkeypatch, caplog):
    monkeypatch.setattr("vit_ray.tracking.metrics_log.RELEASE_S", 0.0)
    run_id = driven(trained, None)
    with lock_log(metrics_log_path(trained.run_folder)):
        assert end_record(trained, run_id, 10, COST) == run_id
    assert "end that driver's job" in caplog.text.replace("\n", " ")
    assert mlflow_run(trained, run_id).info.status == "RUNNING"


@pytest.mark.parametrize("fault", [None, "away", "died"])
def test_what_mlflow_does_not_have_at_the_end_is_told_with_the_command_that_brings_it(
    fault, record, caplog
):
    record.problem = "MLflow has nothing of it (no answer)" if fault == "away" else ""
    record.error = RuntimeError("the recorder has died") if fault == "died" else None
    with opened() as run:
        run.is_complete = True
    assert (f"run: vit-ray replay {run.record.log_path} URI" in caplog.text) is bool(fault)
    assert ({"away": "no answer", "died": "has died", None: ""}[fault]) in caplog.text
