"""What a run's tracker sends to MLflow, in real SQLite files."""

import json
import shutil
import socket
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tests.commands.command_line import run_cli
from tests.tracking.tracked import (
    NOWHERE,
    Hanging,
    event_texts,
    history,
    losses,
    only_run,
    recorded,
    run_of,
    started,
)
from vit_ray.outcomes import PARENT_TAG, RUN_FOLDER, EventKind
from vit_ray.tracking import tracker as sender
from vit_ray.tracking.metrics_log import MetricsLog, RunOpening, Sent
from vit_ray.tracking.mlflow_run import RunWriter
from vit_ray.tracking.tracker import Tracker, replay


def test_a_run_holds_what_was_recorded(config, log_path, tmp_path):
    """Also more parameters, and more points of a step, than one request takes."""
    table = log_path.with_name("table.csv")
    table.parent.mkdir()
    table.write_text("a,b\n1,2\n")
    params = {f"section.key_{i}": str(i) for i in range(250)}
    wide = {f"system/node-{i}/cpu": float(i) for i in range(1500)}
    tracker = started(config, "first", log_path, params=params, tags={"vit_ray.kind": "pretrain"})
    tracker.log.metrics(10, {"train/loss": 2.5, "train/lr": 1e-3})
    tracker.log.metrics(20, {"train/loss": 2.0})
    tracker.log.metrics(20, wide)
    tracker.log.metrics(20, {f"more/node-{i}": float(i) for i in range(700)})
    tracker.log.tag("vit_ray.cluster", "2 CPUs")
    tracker.log.text("recipe.yaml", "name: first\n")
    tracker.log.artifact(table, "tables")
    assert tracker.finish()

    run = run_of(config.uri, tracker.run_id)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == params
    assert run.data.tags["vit_ray.kind"] == "pretrain"
    assert run.data.tags["vit_ray.cluster"] == "2 CPUs"
    assert history(config.uri, tracker.run_id) == [(10, 2.5), (20, 2.0)]
    assert history(config.uri, tracker.run_id, "train/lr") == [(10, 1e-3)]
    assert wide.items() <= run.data.metrics.items()
    assert len(run.data.metrics) == 2202
    kept = {f.path for f in MlflowClient(config.uri).list_artifacts(tracker.run_id)}
    assert kept == {"recipe.yaml", "tables"}
    assert (tmp_path / "mlruns" / "trials").is_dir()
    assert config.uri in tracker.hint


def test_a_restarted_job_continues_its_run_and_repeated_steps_appear_once(
    config, log_path, tmp_path
):
    first = started(config, "long", log_path, params={"seed": "0", "workers": "2"})
    for step in (10, 20, 30):
        first.log.metrics(step, {"train/loss": 100.0 - step})
    first.log.metrics(20, {"eval/top1": 0.5})
    # The first attempt dies here; its checkpoint is of step 20. A new node has no old log.
    assert first.finish("FAILED")
    changed = {"seed": "0", "workers": "4", "new": "1"}
    second = started(config, "long", tmp_path / "2", run_id=first.run_id, params=changed)
    assert second.flush(20)
    assert run_of(config.uri, first.run_id).info.status == "RUNNING"
    for step in (20, 30, 40):
        second.log.metrics(step, {"train/loss": 100.5 - step})
    second.log.metrics(40, {"eval/top1": 0.6})
    assert second.finish()

    run = only_run(config.uri)
    assert second.run_id == first.run_id == run.info.run_id
    assert history(config.uri, first.run_id) == [(10, 90.0), (20, 80.0), (30, 70.0), (40, 60.5)]
    assert history(config.uri, first.run_id, "eval/top1") == [(20, 0.5), (40, 0.6)]
    assert run.data.params == {"seed": "0", "workers": "2", "new": "1"}
    assert run.data.tags["vit_ray.changed_params"] == '{"workers": "4"}'
    recorded(config, "long", tmp_path / "3", run_id=first.run_id, params=run.data.params)
    run = only_run(config.uri)
    assert run.data.tags["vit_ray.changed_params"] == "{}"
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize("has_log", [True, False])
def test_an_outcome_stands_in_the_place_of_an_earlier_starts(config, log_path, tmp_path, has_log):
    first = started(config, "sweep", log_path, awaited_metric="eval/top1")
    first.log.results(0, {"eval/top1": 0.5, "failed": 1.0})
    assert first.finish()
    time.sleep(0.002)  # MLflow's times are milliseconds
    log = log_path if has_log else tmp_path / "elsewhere.jsonl"
    second = started(config, "sweep", log, run_id=first.run_id, awaited_metric="eval/top1")
    second.log.results(0, {"eval/top1": 0.4, "failed": 0.0})
    assert second.finish()
    metrics = run_of(config.uri, first.run_id).data.metrics
    assert metrics == {"eval/top1": 0.4, "failed": 0.0}
    assert replay(log, config.uri).num_points == 0


def test_a_process_that_dies_with_records_unsent_leaves_them_to_the_next(config, log_path):
    first = started(config, "died", log_path)
    losses(first, (1, 2, 3))
    assert first.flush(20)
    later = round(time.time() * 1000)
    with open(log_path, "a") as file:  # as the process writes, whose thread does not come to send
        for step, value in ((3, 99.0), (4, 4.0), (5, 5.0)):
            record = {"kind": "metrics", "step": step, "values": {"train/loss": value}}
            file.write(json.dumps({**record, "time_ms": later}) + "\n")
        file.write('{"kind": "event", "te')  # and half a line
    first.stop(30)
    second = started(config, "died", log_path)
    second.log.metrics(5, {"train/loss": 98.0})
    second.log.metrics(6, {"train/loss": 6.0})
    second.log.event(EventKind.RESUMED, "from step 5", 5)
    assert second.finish()
    assert event_texts(config.uri, first.run_id) == ["from step 5"]
    assert history(config.uri, first.run_id) == [(step, float(step)) for step in range(1, 7)]
    assert replay(log_path, config.uri).num_points == 0


def test_a_run_that_a_slow_mlflow_creates_after_the_records_end_is_the_next_openings(
    config, log_path, monkeypatch
):
    slow = Hanging(monkeypatch, MlflowClient, "create_run")
    first = started(config, "rungs", log_path, wait_s=0.0)
    first.log.metrics(10, {"train/loss": 2.0})
    assert slow.has_begun.wait(30)
    with monkeypatch.context() as patch:
        patch.setattr(sender, "FIRST_TRY_S", 0.1)
        assert not first.finish("KILLED", timeout_s=0.1)
    second = started(config, "rungs", log_path, wait_s=0.0)
    second.log.metrics(20, {"train/loss": 1.0})
    time.sleep(1.0)  # so that it could create another
    slow.may_answer.set()
    assert second.finish()
    first.stop(30)
    run = only_run(config.uri)
    assert run.info.status == "FINISHED"
    assert history(config.uri, run.info.run_id) == [(10, 2.0), (20, 1.0)]


def test_what_is_on_its_way_at_the_end_is_not_noted_for_the_training_that_replaces_it(
    config, log_path, monkeypatch
):
    slow = Hanging(monkeypatch, RunWriter, "send", lambda _, some: some[0]["kind"] == "metrics")
    first = started(config, "hangs", log_path, training_id="one")
    losses(first, [1])
    assert slow.has_begun.wait(30)
    assert not first.finish(timeout_s=0.1)
    MetricsLog(log_path).open(RunOpening(config, "hangs", log_path, training_id="two"))
    slow.may_answer.set()
    first.stop(30)
    assert MetricsLog(log_path).read_sent() == Sent()


def test_a_log_of_another_run_or_training_is_set_aside_not_mixed_in(config, log_path):
    def train(training_id, steps, name="same-name", **fields):
        fields["training_id"] = training_id
        return recorded(config, name, log_path, steps, **fields).run_id

    first = train("one", range(10))
    assert train("one", range(12)) == first  # it had not come to a checkpoint
    second = train("two", range(10))
    assert second != first
    assert train(None, range(10, 14), run_id=second) == second
    other = recorded(config, "other", log_path.with_name("other.jsonl")).run_id
    assert train(None, [2], "other", run_id=other) == other
    lengths = [len(history(config.uri, run_id)) for run_id in (first, second, other)]
    assert lengths == [12, 14, 1]
    for run_id in (first, second):
        assert log_path.with_name(f"{run_id}.metrics.jsonl").exists()


def test_values_that_are_not_finite_are_counted_across_restarts(config, log_path, tmp_path):
    first = started(config, "bad", log_path)
    for step, loss in enumerate([1.0, float("nan"), float("inf"), 2.0]):
        first.log.metrics(step, {"train/loss": loss})
    assert first.flush(20)
    second = started(config, "bad", tmp_path / "2.jsonl", run_id=first.run_id)
    second.log.metrics(3, {"train/loss": float("nan")})
    assert second.finish()
    assert history(config.uri, first.run_id) == [(0, 1.0), (3, 2.0)]
    assert history(config.uri, first.run_id, "train/loss_nonfinite") == [(1, 1), (2, 2), (3, 3)]


def test_a_record_or_a_users_tag_that_mlflow_refuses_costs_only_itself(config, log_path, caplog):
    config = config.model_copy(update={"tags": {"50%": "x"}})
    tracker = started(config, "odd", log_path, tags={"vit_ray.kind": "pretrain"})
    losses(tracker, [1])
    tracker.log.metrics(2, {"not#allowed": 1.0})
    losses(tracker, [3])
    assert not tracker.finish()
    assert history(config.uri, tracker.run_id) == [(1, 1.0), (3, 3.0)]
    assert only_run(config.uri).data.tags["vit_ray.kind"] == "pretrain"
    assert "2 refused records of" in caplog.messages[-1]
    assert f"vit-ray replay {log_path} URI" in caplog.messages[-1]
    other = f"sqlite:///{log_path.parent}/other.db"
    assert len(replay(log_path, other).refused) == 2
    assert only_run(other).data.tags["vit_ray.kind"] == "pretrain"


def test_an_event_of_a_run_that_lives_is_in_mlflow_and_each_is_there_once(config, log_path):
    """The first process dies; the next one goes on with the same opening, or with another."""
    opening = RunOpening(config, "run", log_path)
    tracker = Tracker.begin(opening)
    tracker.log.event(EventKind.RESUMED, "from step 8", 8)
    assert tracker.flush(30)
    assert event_texts(config.uri, tracker.run_id) == ["from step 8"]
    tracker.log.event(EventKind.HUNG, "no step", 9)  # not sent before the process dies
    tracker.stop(30)
    MetricsLog(log_path).event(EventKind.WORKER_FAILED, "worker 1", 9)
    again = Tracker.begin(opening)
    again.log.event(EventKind.RESUMED, "from step 8 again", 8)
    again.log.tag("vit_ray.failure", "worker 1 has failed")
    again.finish("FAILED")
    other = started(config, "run", log_path)
    other.log.event(EventKind.STOPPED, "SIGTERM", 9)
    assert other.finish("KILLED")
    replay(log_path, config.uri)
    told = ["from step 8", "no step", "worker 1", "from step 8 again", "SIGTERM"]
    assert event_texts(config.uri, tracker.run_id) == told
    # The run is continued on another machine, which has a log of its own.
    elsewhere = started(config, "run", log_path.with_name("other.jsonl"), run_id=tracker.run_id)
    elsewhere.log.event(EventKind.STOPPED, "SIGTERM there", 9)
    assert elsewhere.finish("KILLED")
    assert sorted(event_texts(config.uri, tracker.run_id)) == sorted([*told, "SIGTERM there"])
    tags = run_of(config.uri, tracker.run_id).data.tags
    assert "vit_ray.failure" not in tags  # of a run that has gone on since


def test_a_file_that_cannot_be_stored_holds_up_neither_points_nor_the_end(config, log_path, caplog):
    tracker = started(config, "blocked", log_path)
    store = Path(run_of(config.uri, tracker.run_id).info.artifact_uri[7:])
    store.mkdir(parents=True)
    (store / "tables").write_text("a file where the folder would be")
    table = log_path.with_name("table.csv")
    table.write_text("a,b\n1,2\n")
    tracker.log.append("resize")  # which MLflow does not get
    tracker.log.artifact(table, "tables")
    tracker.log.text("note.txt", "kept")
    losses(tracker, range(28))
    assert not tracker.finish(timeout_s=20)
    assert only_run(config.uri).info.status == "FINISHED"
    assert len(history(config.uri, tracker.run_id)) == 28
    assert f"does not have {table}, note.txt of run" in caplog.messages[-1]

    (store / "tables").unlink()
    assert started(config, "blocked", log_path).finish()
    assert (store / "tables" / "table.csv").read_text() == "a,b\n1,2\n"
    assert (store / "note.txt").read_text() == "kept"


def test_mlflow_away_from_the_start_never_raises_and_warns_once(config, log_path, caplog):
    secret = NOWHERE.replace("://", "://user:hunter2@")
    away = config.model_copy(update={"uri": secret})
    tracker = started(away, "alone", log_path, params={"tracking.uri": secret})
    before_ms = round(time.time() * 1000)
    losses(tracker, range(50))
    tracker.log.event(EventKind.STOPPED, "SIGTERM", 9)
    after_ms = round(time.time() * 1000)
    assert tracker.run_id is None
    assert not tracker.flush(2.5)
    assert not tracker.finish("FAILED", timeout_s=0.1)
    assert len([text for text in caplog.messages if "cannot be used" in text]) == 1
    assert f"run: vit-ray replay {log_path} URI" in caplog.messages[-1]
    assert "hunter2" not in log_path.read_text() + "".join(caplog.messages) + tracker.hint
    done = run_cli("replay", str(log_path), config.uri)
    assert (done.exit_code, done.stdout) == (0, "50 points were new\n")
    run = only_run(config.uri)
    assert run.info.status == "FAILED"
    assert event_texts(config.uri, run.info.run_id) == ["SIGTERM"]
    assert run.data.params["tracking.uri"] == NOWHERE
    points = MlflowClient(config.uri).get_metric_history(run.info.run_id, "train/loss")
    assert all(before_ms <= point.timestamp <= after_ms for point in points)


def test_a_server_that_never_answers_holds_nobody_up(config, log_path, monkeypatch):
    monkeypatch.setattr(sender, "NEVER_REACHED_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        away = config.model_copy(update={"uri": uri})
        tracker = started(away, "held", log_path, wait_s=0.2)
        losses(tracker, range(1000))
        assert tracker.run_id is None
        start_s = time.monotonic()
        assert not tracker.finish("FAILED")
        assert time.monotonic() - start_s < 20  # of 30 that it would wait for one that answered
    assert replay(log_path, config.uri).num_points == 1000


def test_a_full_disk_is_named_and_mlflow_has_what_was_recorded(config, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    tracker = started(config, "full", blocked / "metrics.jsonl")
    losses(tracker, range(1, 6))
    assert not tracker.finish(timeout_s=60)
    assert len([text for text in caplog.messages if "cannot be kept" in text]) == 1
    assert f"{blocked}/metrics.jsonl cannot be written" in caplog.messages[-1]
    assert "does not have" not in caplog.messages[-1]
    assert only_run(config.uri).info.status == "FINISHED"
    assert history(config.uri, tracker.run_id) == [(step, float(step)) for step in range(1, 6)]


def test_what_a_full_disk_did_not_take_is_written_when_there_is_room_again(config, log_path):
    log = MetricsLog(log_path)
    log.open(RunOpening(config, "full", log_path))
    before = log.size
    log_path.rename(log_path.with_name("aside"))
    log_path.mkdir()  # as if nothing could be written
    log.metrics(1, {"train/loss": 1.0})
    assert log.error
    log_path.rmdir()
    log_path.with_name("aside").rename(log_path)
    assert [record["step"] for record, _ in log.read(before)] == [1]
    log.mark_sent(Sent("r", log.size, log.size))
    assert log.read_sent().points == before  # the next process does not have what is in memory
    log.metrics(2, {"train/loss": 2.0})
    assert not log.error
    assert [record["step"] for record, _ in log.read(before)] == [1, 2]
    assert len(log_path.read_text().splitlines()) == 3


def test_a_copied_folder_has_a_run_of_its_own_and_its_original_keeps_its_curve(config, tmp_path):
    def train_in(folder, steps, run_id):
        fields = {"run_id": run_id, "tags": {RUN_FOLDER: str(folder)}}
        return recorded(config, "run", folder / "metrics.jsonl", steps, **fields).run_id

    original, copy = tmp_path / "original", tmp_path / "copy"
    first = train_in(original, [1], None)
    shutil.copytree(original, copy)
    # A trial of it waits for its own run, which MLflow has not answered yet.
    log = copy / "metrics.jsonl"
    MetricsLog(log).open(RunOpening(config, "run", log, tags={RUN_FOLDER: str(copy)}))
    trial = started(config, "trial", copy / "trial.jsonl", parent_log=log)
    assert trial.run_id is None
    copied = train_in(copy, [3], first)
    assert trial.finish()
    assert run_of(config.uri, trial.run_id).data.tags[PARENT_TAG] == copied
    # Its checkpoint may still name the original's run.
    again = train_in(copy, [], first)
    extended = train_in(original, [2], first)
    assert again == copied != first == extended
    assert history(config.uri, first) == [(1, 1.0), (2, 2.0)]
    assert history(config.uri, copied) == [(1, 1.0), (3, 3.0)]


def test_a_child_waits_for_the_run_of_its_parent_also_after_its_driver_has_died(config, log_path):
    deleted = recorded(config, "sweep", log_path).run_id
    MlflowClient(config.uri).delete_run(deleted)
    for _ in range(2):
        child = started(config, "trial", log_path.with_name("trial.jsonl"), parent_log=log_path)
        assert child.run_id is None
        child.stop(0.0)  # its driver dies
    child = started(config, "trial", log_path.with_name("trial.jsonl"), parent_log=log_path)
    parent = started(config, "sweep", log_path)
    assert child.finish(timeout_s=60)
    assert run_of(config.uri, child.run_id).data.tags[PARENT_TAG] == parent.run_id != deleted
    parent.finish()


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("pretrain", None),  # of few runs, in which a scatter is some dots
        ("sweep_trial", ("optim.learning_rate", "dev/top1")),
        ("study_cell", ("study/exaflops", "eval/top1")),
    ],
)
def test_the_view_of_the_link_is_kept_with_the_experiment(kind, axes, config, log_path):
    tracker = recorded(config, "first", log_path, tags={"vit_ray.kind": kind})
    assert tracker.hint == f"vit-ray ui {config.uri}"
    tags = MlflowClient(config.uri).get_experiment_by_name("trials").tags
    (text,) = (text for name, text in tags.items() if name.startswith("mlflow.sharedViewState."))
    charts = json.loads(text)["compareRunCharts"]
    found = [(c["xaxis"]["key"], c["yaxis"]["key"]) for c in charts if c["type"] == "SCATTER"]
    assert found == ([axes] if axes else [])
    assert [one["metricKey"] for one in charts if one["type"] == "LINE"] == ["train/loss"]
    kept = {"metrics.`study/steps`", "metrics.`transfer/mean_top1`"}
    assert kept <= {*json.loads(text)["selectedColumns"]}
    assert tags["mlflow.note.content"].startswith("Trainings of vit_ray.")
