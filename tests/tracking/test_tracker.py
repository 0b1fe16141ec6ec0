"""The writer of MLflow runs, against real SQLite files and a real MLflow server."""

import contextlib
import fcntl
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
import sqlalchemy
from alembic.runtime.migration import HeadMaintainer
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow.store.db import utils as db_utils
from mlflow.tracking import MlflowClient

from tests.commands.command_line import run_cli
from tests.ports import free_ports
from vit_ray.addresses import absolute_uri, sqlite_file
from vit_ray.commands.tracking_store import run_replay
from vit_ray.config.keys import RUN_FOLDER, tags_of
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.experiments.write_page import keep_page
from vit_ray.outcomes import EventKind
from vit_ray.report.page import Written
from vit_ray.tracking import mlflow_client, store_requests
from vit_ray.tracking import tracker as sender
from vit_ray.tracking.metrics_log import MetricsLog, RunOpening, Sent
from vit_ray.tracking.mlflow_client import (
    experiment_id,
    open_client,
    page_hint,
    share_view,
)
from vit_ray.tracking.mlflow_run import RunWriter
from vit_ray.tracking.store_requests import redact_uri, safe_uri
from vit_ray.tracking.tracker import Tracker, replay

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens


def started(config, name, log_path, wait_s=10.0, **fields):
    return Tracker.begin(RunOpening(config, name, log_path, **fields), wait_s=wait_s)


def stop(tracker):
    """As where its process dies."""
    tracker.stop(30)


@pytest.fixture
def config(tmp_path):
    return TrackingConfig(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="trials")


@pytest.fixture
def log_path(tmp_path):
    return tmp_path / "tracking" / "metrics.jsonl"


class Hanging:
    """Calls of a method wait until `may_answer` is set; the first one sets `has_begun`."""

    def __init__(self, monkeypatch, owner, name, hangs=lambda *_: True):
        self.has_begun, self.may_answer = threading.Event(), threading.Event()
        method = getattr(owner, name)

        def hanging(*args, **fields):
            if hangs(*args):
                self.has_begun.set()
                assert self.may_answer.wait(60)
            return method(*args, **fields)

        monkeypatch.setattr(owner, name, hanging)


def _losses(tracker, steps):
    """Each step's number is its loss."""
    for step in steps:
        tracker.log.metrics(step, {"train/loss": float(step)})


def _history(uri, run_id, key="train/loss"):
    points = MlflowClient(uri).get_metric_history(run_id, key)
    return sorted((point.step, point.value) for point in points)


def _only_run(uri, experiment="trials"):
    client = MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert len(found) == 1
    return found[0]


def test_a_run_holds_what_was_recorded(config, log_path, tmp_path):
    table = log_path.with_name("table.csv")
    table.parent.mkdir()
    table.write_text("a,b\n1,2\n")
    params = {f"section.key_{i}": str(i) for i in range(250)}  # more than one request takes
    tracker = started(config, "first", log_path, params=params, tags={"vit_ray.kind": "pretrain"})
    tracker.log.metrics(10, {"train/loss": 2.5, "train/lr": 1e-3})
    tracker.log.metrics(20, {"train/loss": 2.0})
    tracker.log.tag("vit_ray.cluster", "2 CPUs")
    tracker.log.text("recipe.yaml", "name: first\n")
    tracker.log.artifact(table, "tables")
    assert tracker.finish()

    client = MlflowClient(config.uri)
    run = client.get_run(tracker.run_id)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == params
    assert run.data.tags["vit_ray.kind"] == "pretrain"
    assert run.data.tags["vit_ray.cluster"] == "2 CPUs"
    assert _history(config.uri, tracker.run_id) == [(10, 2.5), (20, 2.0)]
    assert _history(config.uri, tracker.run_id, "train/lr") == [(10, 1e-3)]
    kept = {f.path for f in client.list_artifacts(tracker.run_id)}
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
    assert first.flush(20)
    # The first attempt dies here; its checkpoint is of step 20. A new node has no old log.
    assert first.finish("FAILED")
    second = started(
        config,
        "long",
        tmp_path / "elsewhere.jsonl",
        run_id=first.run_id,
        params={"seed": "0", "workers": "4", "new": "1"},
    )
    assert second.flush(20)
    assert MlflowClient(config.uri).get_run(first.run_id).info.status == "RUNNING"
    for step in (30, 40):
        second.log.metrics(step, {"train/loss": 100.5 - step})
    second.log.metrics(40, {"eval/top1": 0.6})
    assert second.finish()

    assert second.run_id == first.run_id == _only_run(config.uri).info.run_id
    assert _history(config.uri, first.run_id) == [
        (10, 90.0),
        (20, 80.0),
        (30, 70.0),
        (40, 60.5),
    ]
    assert _history(config.uri, first.run_id, "eval/top1") == [(20, 0.5), (40, 0.6)]
    run = MlflowClient(config.uri).get_run(first.run_id)
    assert run.data.params == {"seed": "0", "workers": "2", "new": "1"}
    assert tags_of(run.data.tags)["vit_ray.changed_params"] == '{"workers": "4"}'
    back = {"seed": "0", "workers": "2", "new": "1"}
    third = started(config, "long", tmp_path / "3", run_id=first.run_id, params=back)
    assert third.finish()
    run = MlflowClient(config.uri).get_run(first.run_id)
    assert tags_of(run.data.tags)["vit_ray.changed_params"] == "{}"
    assert run.info.status == "FINISHED"


def test_workers_that_repeat_steps_within_one_opening_add_nothing(config, log_path):
    tracker = started(config, "run", log_path)
    for steps in ((1, 2, 3), (2, 3, 4), (4, 5)):
        for step in steps:
            tracker.log.metrics(step, {"train/loss": 10.0 * steps[0] + step})
        assert tracker.flush(30)
    assert tracker.finish()
    expected = [(1, 11.0), (2, 12.0), (3, 13.0), (4, 24.0), (5, 45.0)]
    assert _history(config.uri, tracker.run_id) == expected


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
    run = MlflowClient(config.uri).get_run(first.run_id)
    assert run.data.metrics == {"eval/top1": 0.4, "failed": 0.0}
    assert replay(log, config.uri).num_points == 0


def test_a_note_of_how_far_mlflow_has_a_log_may_have_more_or_less(log_path):
    log = MetricsLog(log_path)
    log.event(EventKind.RESUMED, "a worker has died", 1)
    note = log_path.with_name(log_path.name + ".sent")
    note.write_text('{"offset": 3, "files": 1, "run_id": "r", "more": 7}')
    assert log.read_sent() == Sent("r", 3, 1)
    for damaged in ("[]", "{}", "3", '{"offset": "3"}', ""):
        note.write_text(damaged)
        assert log.read_sent() == Sent()


def test_a_process_that_dies_with_records_unsent_leaves_them_to_the_next(config, log_path):
    first = started(config, "died", log_path)
    _losses(first, (1, 2, 3))
    assert first.flush(20)
    later = round(time.time() * 1000)
    with open(log_path, "a") as file:  # as the process writes, whose thread does not come to send
        for step, value in ((3, 99.0), (4, 4.0), (5, 5.0)):
            record = {"kind": "metrics", "step": step, "values": {"train/loss": value}}
            file.write(json.dumps({**record, "time_ms": later}) + "\n")
        file.write('{"kind": "event", "te')  # and half a line
    stop(first)  # no more work for its thread: the process is gone
    second = started(config, "died", log_path)
    second.log.metrics(5, {"train/loss": 98.0})
    second.log.metrics(6, {"train/loss": 6.0})
    second.log.event(EventKind.RESUMED, "from step 5", 5)
    assert second.finish()
    assert texts_of_history(config.uri, first.run_id) == ["from step 5"]
    expected = [(step, float(step)) for step in range(1, 7)]
    assert _history(config.uri, first.run_id) == expected
    assert replay(log_path, config.uri).num_points == 0


def test_a_run_that_a_slow_mlflow_creates_after_the_records_end_is_the_next_openings(
    config, log_path, monkeypatch
):
    slow = Hanging(monkeypatch, MlflowClient, "create_run")
    first = started(config, "rungs", log_path, wait_s=0.0)
    first.log.metrics(10, {"train/loss": 2.0})
    assert slow.has_begun.wait(30)
    assert not first.finish("KILLED", timeout_s=0.1)
    second = started(config, "rungs", log_path, wait_s=0.0)
    second.log.metrics(20, {"train/loss": 1.0})
    time.sleep(1.0)  # so that it could create another
    slow.may_answer.set()
    assert second.finish()
    first.stop(30)
    run = _only_run(config.uri)
    assert run.info.status == "FINISHED"
    assert _history(config.uri, run.info.run_id) == [(10, 2.0), (20, 1.0)]


def test_the_log_of_another_run_is_set_aside_not_mixed_in(config, log_path):
    first = started(config, "one", log_path)
    first.log.metrics(1, {"train/loss": 1.0})
    assert first.finish()
    other = started(config, "two", log_path.with_name("two.jsonl"))
    assert other.finish()
    again = started(config, "two", log_path, run_id=other.run_id)
    again.log.metrics(1, {"train/loss": 2.0})
    assert again.finish()
    assert _history(config.uri, first.run_id) == [(1, 1.0)]
    assert _history(config.uri, other.run_id) == [(1, 2.0)]
    assert log_path.with_name(f"{first.run_id}.metrics.jsonl").exists()


def test_values_that_are_not_finite_are_counted_across_restarts(config, log_path, tmp_path):
    first = started(config, "bad", log_path)
    for step, loss in enumerate([1.0, float("nan"), float("inf"), 2.0]):
        first.log.metrics(step, {"train/loss": loss})
    assert first.flush(20)
    second = started(config, "bad", tmp_path / "2.jsonl", run_id=first.run_id)
    second.log.metrics(3, {"train/loss": float("nan")})
    assert second.finish()
    assert _history(config.uri, first.run_id) == [(0, 1.0), (3, 2.0)]
    assert _history(config.uri, first.run_id, "train/loss_nonfinite") == [(1, 1), (2, 2), (3, 3)]


def test_a_record_that_mlflow_refuses_costs_only_itself(config, log_path, caplog):
    tracker = started(config, "odd", log_path)
    tracker.log.metrics(1, {"train/loss": 1.0})
    tracker.log.metrics(2, {"not#allowed": 1.0})
    tracker.log.metrics(3, {"train/loss": 3.0})
    assert not tracker.finish()
    assert _history(config.uri, tracker.run_id) == [(1, 1.0), (3, 3.0)]
    assert [r for r in caplog.messages if "refuses" in r and "not#allowed" in r]
    assert [r for r in caplog.messages if "1 refused record of" in r and "run: vit-ray replay" in r]


def texts_of_history(uri, run_id):
    client = MlflowClient(uri)
    files = sorted(file.path for file in client.list_artifacts(run_id, "history"))
    found = [json.loads(Path(client.download_artifacts(run_id, f)).read_text()) for f in files]
    return [event["text"] for events in found for event in events]


def test_an_event_of_a_run_that_lives_is_in_mlflow_and_each_is_there_once(config, log_path):
    """The first process dies; the next one goes on with the same opening, or with another."""
    opening = RunOpening(config, "run", log_path)
    tracker = Tracker.begin(opening)
    tracker.log.event(EventKind.RESUMED, "from step 8", 8)
    assert tracker.flush(30)
    assert texts_of_history(config.uri, tracker.run_id) == ["from step 8"]
    tracker.log.event(EventKind.HUNG, "no step", 9)  # not sent before the process dies
    stop(tracker)
    MetricsLog(log_path).event(EventKind.WORKER_FAILED, "worker 1", 9)
    again = Tracker.begin(opening)
    again.log.event(EventKind.RESUMED, "from step 8 again", 8)
    assert again.flush(30)
    told = ["from step 8", "no step", "worker 1", "from step 8 again"]
    assert texts_of_history(config.uri, tracker.run_id) == told
    tags = tags_of(MlflowClient(config.uri).get_run(tracker.run_id).data.tags)
    assert (tags["vit_ray.events.resumed"], tags["vit_ray.events.hung"]) == ("2", "1")
    again.log.tag("vit_ray.failure", "worker 1 has failed")
    again.finish("FAILED")
    for text in ("SIGTERM", "SIGTERM again"):
        other = started(config, "run", log_path)
        other.log.event(EventKind.STOPPED, text, 9)
        assert other.finish("KILLED")
    assert texts_of_history(config.uri, tracker.run_id) == [*told, "SIGTERM", "SIGTERM again"]
    tags = tags_of(MlflowClient(config.uri).get_run(tracker.run_id).data.tags)
    assert (tags["vit_ray.events.stopped"], tags["vit_ray.events.resumed"]) == ("2", "2")
    replay(log_path, config.uri)
    assert texts_of_history(config.uri, tracker.run_id) == [*told, "SIGTERM", "SIGTERM again"]
    # The run is continued on another machine, which has a log of its own.
    elsewhere = started(config, "run", log_path.with_name("other.jsonl"), run_id=tracker.run_id)
    elsewhere.log.event(EventKind.STOPPED, "SIGTERM there", 9)
    assert elsewhere.finish("KILLED")
    tags = tags_of(MlflowClient(config.uri).get_run(tracker.run_id).data.tags)
    assert (tags["vit_ray.events.stopped"], tags["vit_ray.events.resumed"]) == ("3", "2")
    assert "vit_ray.failure" not in tags  # of a run that has gone on since


def wait_for_tries(tracker, num, is_true=lambda: True):
    """Until points have been sent, or have failed to be, so many times."""
    last, deadline_s = tracker._points.num + num, time.monotonic() + 60
    while tracker._points.num < last or not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@contextlib.contextmanager
def damaged(database):
    whole = database.read_bytes()
    with open(database, "r+b") as file:
        file.write(b"damaged " * 512)

    def mend():
        with open(database, "r+b") as file:
            file.write(whole[:4096])

    yield mend


@contextlib.contextmanager
def full(database):
    """SQLite may not add a page to a file, as on a full disk."""
    pages = [1]  # or as many as the file has

    def limit(connection):
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages[-1]}")

    sqlalchemy.event.listen(sqlalchemy.Engine, "begin", limit)
    try:
        yield partial(pages.append, 2**30)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "begin", limit)


@pytest.mark.parametrize("broken", [damaged, full])
def test_points_wait_while_the_database_is_damaged_or_full(broken, config, log_path, monkeypatch):
    """MLflow answers BAD_REQUEST, as for a wrong value."""
    monkeypatch.setattr(sender, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(sender, "LAST_BACKOFF_S", 0.05)
    monkeypatch.setattr(sender, "BATCH_INTERVAL_S", 0.01)
    tracker = started(config, "failover", log_path)
    for step in range(10):
        tracker.log.metrics(step, {"train/loss": 1.0})
    assert tracker.flush(30)
    with broken(Path(config.uri.removeprefix("sqlite:///"))) as mend:
        for step in range(10, 500):  # more than there is room for in the pages of the file
            tracker.log.metrics(step, {"train/loss": 2.0})
        wait_for_tries(tracker, 1, lambda: tracker._points.error)
        tries_of_files = tracker._files.num
        wait_for_tries(tracker, 8)
        assert tracker._files.num == tries_of_files
        mend()
        assert tracker.finish(timeout_s=60)
    steps = [step for step, _ in _history(config.uri, tracker.run_id, "train/loss")]
    assert steps == list(range(500))


def test_a_training_that_starts_over_is_a_run_of_its_own(config, log_path):
    def train(training_id, steps, **fields):
        tracker = started(config, "same-name", log_path, training_id=training_id, **fields)
        _losses(tracker, steps)
        assert tracker.finish()
        return tracker.run_id

    first = train("one", range(10))
    assert train("one", range(12)) == first  # it had not come to a checkpoint
    second = train("two", range(10))
    assert second != first
    assert train(None, range(10, 14), run_id=second) == second
    assert len(_history(config.uri, first, "train/loss")) == 12
    assert len(_history(config.uri, second, "train/loss")) == 14
    tags = MlflowClient(config.uri).get_run(second).data.tags
    assert tags["vit_ray.started_over_from"] == first
    assert log_path.with_name(f"{first}.metrics.jsonl").exists()


def test_a_file_that_cannot_be_stored_holds_up_neither_points_nor_the_end(config, log_path, caplog):
    tracker = started(config, "blocked", log_path)
    store = Path(MlflowClient(config.uri).get_run(tracker.run_id).info.artifact_uri[7:])
    store.mkdir(parents=True)
    (store / "tables").write_text("a file where the folder would be")
    table = log_path.with_name("table.csv")
    table.write_text("a,b\n1,2\n")
    tracker.log.append("resize")  # which MLflow does not get
    tracker.log.artifact(table, "tables")
    tracker.log.text("note.txt", "kept")
    _losses(tracker, range(28))
    assert not tracker.finish(timeout_s=20)
    run = _only_run(config.uri)
    assert run.info.status == "FINISHED"
    assert len(_history(config.uri, tracker.run_id)) == 28
    assert len([m for m in caplog.messages if "table.csv cannot be stored" in m]) == 1
    assert [m for m in caplog.messages if f"does not have {table}, note.txt of run" in m]

    (store / "tables").unlink()
    again = started(config, "blocked", log_path)
    assert again.finish()
    assert (store / "tables" / "table.csv").read_text() == "a,b\n1,2\n"
    assert (store / "note.txt").read_text() == "kept"


def test_between_two_slow_files_points_and_the_end_are_sent(config, log_path, monkeypatch):
    """What one that hangs holds up is on disk for the next opening."""
    log_path.parent.mkdir()
    files = [log_path.with_name(name) for name in ("first.txt", "second.txt")]
    stores = []
    for file in files:
        file.write_text("text")
        is_it = partial(lambda path, _, record: record["path"] == path, str(file))
        stores.append(Hanging(monkeypatch, RunWriter, "_send_artifact", is_it))
    tracker = started(config, "hangs", log_path)
    for file in files:
        tracker.log.artifact(file)
    assert stores[0].has_begun.wait(30)
    tracker.log.metrics(1, {"train/loss": 1.0})
    tracker.log.append("finish", status="FINISHED")
    stores[0].may_answer.set()
    assert stores[1].has_begun.wait(30)
    assert _only_run(config.uri).info.status == "FINISHED"
    assert _history(config.uri, tracker.run_id) == [(1, 1.0)]
    tracker.log.metrics(2, {"train/loss": 2.0})
    assert not tracker.finish(timeout_s=0.1)
    assert f"does not have the last points, {files[1]} of run" in tracker.problem
    stores[1].may_answer.set()
    tracker.stop(30)
    again = started(config, "hangs", log_path)
    assert again.finish()
    assert _history(config.uri, tracker.run_id) == [(1, 1.0), (2, 2.0)]
    stored = [file.path for file in MlflowClient(config.uri).list_artifacts(again.run_id)]
    assert stored == ["first.txt", "second.txt"]


def test_a_store_of_files_that_fails_is_tried_after_a_pause_and_at_the_end(
    config, log_path, monkeypatch
):
    """Tries before the end do not count, nor do those of points, which have no pause."""
    send, failures, tries = RunWriter.send, ["away"] * 3, []

    def failing(self, records):
        if records[0]["kind"] == "text":
            tries.append(records)
            if failures:
                raise OSError(failures.pop())
        return send(self, records)

    monkeypatch.setattr(RunWriter, "send", failing)
    monkeypatch.setattr(sender, "FIRST_BACKOFF_S", 60.0)
    monkeypatch.setattr(sender, "BATCH_INTERVAL_S", 0.01)
    tracker = started(config, "away", log_path)
    wait_for_tries(tracker, 3)
    tracker.log.text("note.txt", "kept")
    wait_for_tries(tracker, 8, lambda: tries)
    assert len(tries) == 1
    tracker.wait_for_try(10)  # for what there is already
    wait_for_tries(tracker, 8)
    assert len(tries) == 1
    monkeypatch.setattr(sender, "BATCH_INTERVAL_S", 1.0)  # above the pause of those who wait
    assert tracker.flush(60)
    assert failures == []
    failures += ["away"] * 10  # some may come before the last tries begin
    tracker.log.text("more.txt", "kept")
    assert not tracker.finish(timeout_s=60)
    assert "does not have more.txt of run" in tracker.problem


def test_a_run_has_its_id_while_mlflow_hangs_at_its_first_points(config, log_path, monkeypatch):
    mlflow = Hanging(monkeypatch, RunWriter, "send")
    tracker = Tracker.begin(RunOpening(config, "hangs", log_path), wait_s=0.0)
    waiting = threading.Thread(target=tracker.wait_for_try, args=(60.0,), daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
    assert tracker.run_id is not None
    mlflow.may_answer.set()
    tracker.stop(30)


def test_what_is_on_its_way_at_the_end_is_not_noted_for_the_training_that_replaces_it(
    config, log_path, monkeypatch
):
    sends = Hanging(monkeypatch, RunWriter, "send", lambda _, some: some[0]["kind"] == "metrics")
    first = started(config, "hangs", log_path, training_id="one")
    first.log.metrics(1, {"train/loss": 1.0})
    assert sends.has_begun.wait(30)
    assert not first.finish(timeout_s=0.1)
    MetricsLog(log_path).open(RunOpening(config, "hangs", log_path, training_id="two"))
    sends.may_answer.set()
    first.stop(30)
    assert MetricsLog(log_path).read_sent() == Sent()


def test_what_mlflow_has_is_noted_after_each_request(log_path):
    log = MetricsLog(log_path)
    for step in range(5):
        log.metrics(step, {f"key{k}": 1.0 for k in range(400)})
    offset, counts = 0, []
    while (found := sender.next_batch(log, offset))[0]:
        counts.append(len(found[0]))
        offset = found[1]
    assert counts == [2, 2, 1]  # of 1,000 points at most
    assert offset == log.size


@pytest.mark.parametrize("way", ["absolute", "dots", "link", "folder with a link"])
def test_neither_replay_nor_a_recorder_sends_a_file_that_is_not_the_runs(
    way, config, log_path, tmp_path
):
    tracker = started(config, "victim", log_path)
    assert tracker.finish()
    folder = log_path.parent
    secret = tmp_path / "id_rsa"
    secret.write_text("private")
    (folder / "inner").mkdir()
    (folder / "inner" / "link").symlink_to(secret)
    path = {
        "absolute": secret,
        "dots": f"{folder}/../id_rsa",
        "link": folder / "inner" / "link",
        "folder with a link": folder / "inner",
    }[way]
    with open(log_path, "a") as file:
        file.write(json.dumps({"kind": "artifact", "path": str(path), "folder": "", "time_ms": 1}))
        file.write("\n")
    started(config, "victim", log_path).finish()
    done = replay(log_path, config.uri)
    assert ["is not in the run's folder" in text for text in done.refused] == [True]
    assert MlflowClient(config.uri).list_artifacts(tracker.run_id) == []
    assert not [
        p
        for p in tmp_path.rglob("*")
        if p.name in ("id_rsa", "link") and p != secret and not p.is_symlink()
    ]


@pytest.mark.parametrize("line", ['{"kind": "metrics", "step": 1, "val', "half a \r line"])
def test_a_damaged_record_costs_only_itself(line, config, log_path):
    tracker = started(config.model_copy(update={"uri": NOWHERE}), "damaged", log_path)
    tracker.finish(timeout_s=0.1)
    with open(log_path, "a") as file:
        file.write(line + "\n")
        file.write('{"kind": "metrics", "step": 1, "values": {"b": 2.0}, "time_ms": 1}\n')
    done = replay(log_path, config.uri)
    assert (done.num_points, done.refused) == (1, [])


def test_a_sqlite_file_that_another_process_keeps_locked_is_given_up(config, log_path, monkeypatch):
    monkeypatch.setattr(mlflow_client, "LOCK_S", 0.1)
    path = config.uri.removeprefix("sqlite:///")
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"mlflow.db.lock for 0.1 s; end the process that"):
            open_client(config.uri)


def test_a_kill_at_any_migration_leaves_what_the_next_run_can_open(tmp_path, monkeypatch):
    """A kill leaves the files as they are: they are copied at each of MLflow's migrations."""
    original, migrate = tmp_path / "original", HeadMaintainer.update_to_step

    def copy_and_migrate(self, step):
        shutil.copytree(original, tmp_path / f"killed-{len(list(tmp_path.iterdir()))}")
        migrate(self, step)

    real = getattr(db_utils, "make_schema", db_utils._initialize_tables)
    with monkeypatch.context() as patch:
        patch.setattr(HeadMaintainer, "update_to_step", copy_and_migrate)
        patch.setattr(db_utils, "_initialize_tables", real)
        open_client(f"sqlite:///{original}/mlflow.db")
    killed = sorted(tmp_path.glob("killed-*"))
    assert len(killed) > 40
    for folder in [original, *killed]:
        client = open_client(f"sqlite:///{folder}/mlflow.db")
        client.create_run(experiment_id(client, f"sqlite:///{folder}/mlflow.db", "trials"))
        assert {one.name for one in folder.iterdir()} <= {"mlflow.db", "mlflow.db.lock"}


def test_a_run_that_ends_while_the_file_is_made_waits_for_it(config, log_path, monkeypatch):
    monkeypatch.setattr(sender, "NEVER_REACHED_S", 0.0)
    tracker = started(config, "short", log_path, wait_s=0.0)
    tracker.log.metrics(1, {"train/loss": 1.0})
    assert tracker.finish()
    assert _history(config.uri, tracker.run_id) == [(1, 1.0)]


def test_a_step_with_more_values_than_one_request_takes(config, log_path):
    tracker = started(config, "wide", log_path)
    tracker.log.metrics(1, {f"system/node-{i}/cpu": float(i) for i in range(1500)})
    tracker.log.metrics(1, {f"more/node-{i}": float(i) for i in range(700)})
    assert tracker.finish()
    assert len(MlflowClient(config.uri).get_run(tracker.run_id).data.metrics) == 2200


def test_replay_into_another_store_is_complete_and_a_second_one_adds_nothing(
    config, log_path, tmp_path
):
    tracker = started(config, "copy", log_path, params={"seed": "1"}, tags={"a": "b"})
    for step in range(100):
        tracker.log.metrics(step, {"train/loss": float(-step)})
    tracker.log.metrics(100, {"train/loss": float("nan")})
    assert tracker.finish()
    other = f"sqlite:///{tmp_path}/other.db"
    assert replay(log_path, other).num_points == 101
    assert replay(log_path, other).num_points == 0
    assert replay(log_path, config.uri).num_points == 0
    run = _only_run(other)
    assert (run.info.run_name, run.info.status) == ("copy", "FINISHED")
    assert (run.data.params, run.data.tags["a"]) == ({"seed": "1"}, "b")
    for key in ("train/loss", "train/loss_nonfinite"):
        expected = _history(config.uri, tracker.run_id, key)
        assert _history(other, run.info.run_id, key) == expected


def test_a_sweep_that_is_replayed_before_its_trials_has_them_below_it(config, tmp_path):
    """MLflow was away all the time."""
    away, logs = (
        config.model_copy(update={"uri": NOWHERE}),
        [tmp_path / "sweep", tmp_path / "trial"],
    )
    for log, parent_log in zip(logs, (None, logs[0]), strict=True):
        tracker = started(away, log.name, log, wait_s=0.1, parent_log=parent_log)
        tracker.finish(timeout_s=0.1)
    assert replay(logs[1], config.uri).refused == []
    assert "mlflow.parentRunId" not in _only_run(config.uri).data.tags
    for log in logs:
        assert replay(log, config.uri).refused == []
    run_ids = [MetricsLog(log).read_sent().run_id for log in logs]
    assert (
        MlflowClient(config.uri).get_run(run_ids[1]).data.tags["mlflow.parentRunId"] == run_ids[0]
    )
    # What another store has is noted nowhere.
    replay(logs[0], f"sqlite:///{tmp_path}/other.db")
    assert MetricsLog(logs[0]).read_sent().run_id == run_ids[0]


def test_the_replay_job_sends_what_mlflow_missed(config, log_path):
    tracker = started(config.model_copy(update={"uri": NOWHERE}), "missed", log_path)
    tracker.log.metrics(1, {"train/loss": 1.0, "train/lr": 0.1})
    tracker.log.event(EventKind.STOPPED, "SIGTERM", 9)
    tracker.finish(timeout_s=0.1)
    words = [sys.executable, "-m", "vit_ray", "replay", str(log_path), config.uri]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2 points were new\n")
    assert texts_of_history(config.uri, _only_run(config.uri).info.run_id) == ["SIGTERM"]
    wrong = run_cli("replay", f"{log_path}x", config.uri)
    assert wrong.exit_code == 2
    assert "no such file, or it does not begin with a run's start" in wrong.stderr


@pytest.mark.parametrize(
    "uri",
    [
        "foo://user:hunter2@x",
        "",
        "sqlite:///:memory:",
        "http://user:hunter2@127.0.0.1:9",
        "http://[bad",
    ],
)
def test_a_bad_address_for_replay_is_a_message(uri, config, log_path):
    tracker = started(config.model_copy(update={"uri": NOWHERE}), "missed", log_path)
    tracker.finish(timeout_s=0.1)
    done = run_cli("replay", str(log_path), uri)
    assert done.exit_code in (1, 2)
    told = done.stderr
    assert re.match(
        r"error: (MLflow at .* cannot be used: |URI '.*' is not an address; give )", told
    )
    assert "hunter2" not in told


def test_mlflow_away_from_the_start_never_raises_and_warns_once(config, log_path, caplog):
    secret = "http://user:hunter2@127.0.0.1:9"
    tracker = started(
        config.model_copy(update={"uri": secret}),
        "alone",
        log_path,
        params={"tracking.uri": secret},
    )
    before_ms = round(time.time() * 1000)
    for step in range(50):
        tracker.log.metrics(step, {"train/loss": 1.0})
    after_ms = round(time.time() * 1000)
    assert tracker.run_id is None
    assert not tracker.flush(2.5)
    assert not tracker.finish("FAILED", timeout_s=0.1)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([w for w in warnings if "cannot be used" in w]) == 1
    assert f"run: vit-ray replay {log_path} URI" in warnings[-1]
    assert "hunter2" not in log_path.read_text() + "".join(caplog.messages) + tracker.hint
    assert replay(log_path, config.uri).num_points == 50
    run = _only_run(config.uri)
    assert run.info.status == "FAILED"
    assert run.data.params["tracking.uri"] == "http://127.0.0.1:9"
    points = MlflowClient(config.uri).get_metric_history(run.info.run_id, "train/loss")
    assert all(before_ms <= point.timestamp <= after_ms for point in points)


def test_the_limits_of_requests_end_with_the_asking(config, monkeypatch):
    names = ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    monkeypatch.delenv(names[0])
    monkeypatch.setenv(names[1], "3")  # the user's own
    wait_for_no_block()
    before = dict(os.environ)
    open_client(config.uri)
    with contextlib.ExitStack() as earlier, contextlib.ExitStack() as later:  # in two threads
        earlier.enter_context(mlflow_client.asking(config.uri))
        later.enter_context(mlflow_client.asking(config.uri))
        earlier.close()
        assert [os.environ[name] for name in names] == ["10", "3"]
    wait_for_no_block()
    assert dict(os.environ) == before


def wait_for_no_block():
    """A tracker of another test may still ask."""
    deadline_s = time.monotonic() + 30
    while store_requests._open and time.monotonic() < deadline_s:
        time.sleep(0.01)


def test_a_note_on_a_disk_that_hangs_holds_up_no_end(config, log_path, monkeypatch):
    monkeypatch.setattr(sender, "NOTED_S", 0.1)
    disk = Hanging(monkeypatch, MetricsLog, "mark_sent", lambda _, sent: sent.offset)
    tracker = started(config, "run", log_path)
    assert disk.has_begun.wait(30)
    ending = threading.Thread(target=tracker.finish, args=("FINISHED", 0.1), daemon=True)
    ending.start()
    ending.join(30)
    assert not ending.is_alive()
    disk.may_answer.set()
    tracker.stop(30)


def limits_of_flush(monkeypatch):
    """Time limits of the waits for MLflow, as they begin."""
    flush, limits = Tracker.flush, []
    monkeypatch.setattr(Tracker, "flush", lambda self, s: limits.append(s) or flush(self, s))
    return limits


def test_the_time_of_mlflows_import_does_not_count_at_the_end(config, log_path, monkeypatch):
    name, begins, may_end = "vit_ray.tracking.mlflow_run", threading.Event(), threading.Event()

    class Slow:
        @staticmethod
        def find_spec(module, *_):
            if module == name:
                begins.set()
                may_end.wait()

    limits = limits_of_flush(monkeypatch)
    monkeypatch.setattr(name, sys.modules[name])  # what the import below replaces is put back
    monkeypatch.setattr(sys, "meta_path", [Slow, *sys.meta_path])
    monkeypatch.delitem(sys.modules, name)
    tracker = started(config, "short", log_path, wait_s=0.0)
    assert begins.wait(30)
    ending = threading.Thread(target=tracker.finish)
    ending.start()
    ending.join(0.5)
    before = list(limits)
    may_end.set()
    ending.join(60)
    assert (before, limits, tracker.problem) == ([], [30.0], "")


def test_the_reason_at_the_end_is_not_that_of_an_outage_that_is_over(config, log_path, monkeypatch):
    send, failures = RunWriter.send, ["long over"]

    def failing(self, records):
        if failures:
            raise OSError(failures.pop())
        return send(self, records)

    monkeypatch.setattr(sender, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(RunWriter, "send", failing)
    mlflow = Hanging(monkeypatch, RunWriter, "send", lambda _, some: some[0].get("step") == 2)
    tracker = started(config, "run", log_path)
    tracker.log.metrics(1, {"train/loss": 1.0})
    tracker.log.tag("a", "b")  # points after a tag are a batch of their own
    tracker.log.metrics(2, {"train/loss": 2.0})
    assert mlflow.has_begun.wait(30)
    assert not tracker.finish(timeout_s=0.1)
    mlflow.may_answer.set()
    assert "(it did not take it in 0.1 s)" in tracker.problem
    tracker.stop(30)


def test_a_server_that_never_answers_holds_nobody_up(config, log_path, monkeypatch):
    monkeypatch.setattr(sender, "NEVER_REACHED_S", 0.2)
    limits = limits_of_flush(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        away = config.model_copy(update={"uri": uri})
        tracker = started(away, "held", log_path, wait_s=0.2)
        for step in range(1000):
            tracker.log.metrics(step, {"train/loss": 1.0})
        assert tracker.run_id is None
        assert not tracker.finish("FAILED")
    assert limits == [0.2]
    assert replay(log_path, config.uri).num_points == 1000


def test_a_full_disk_is_named_and_mlflow_has_what_was_recorded(config, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    tracker = started(config, "full", blocked / "metrics.jsonl")
    for step in range(1, 6):
        tracker.log.metrics(step, {"train/loss": 1.0})
    assert not tracker.finish(timeout_s=60)
    assert len([m for m in caplog.messages if "cannot be kept" in m]) == 1
    assert f"{blocked}/metrics.jsonl cannot be written" in tracker.problem
    assert "does not have" not in tracker.problem
    assert _only_run(config.uri).info.status == "FINISHED"
    points = [(step, 1.0) for step in range(1, 6)]
    assert _history(config.uri, tracker.run_id) == points


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
    log.metrics(2, {"train/loss": 2.0})
    assert not log.error
    assert [record["step"] for record, _ in log.read(before)] == [1, 2]
    assert len(log_path.read_text().splitlines()) == 3


def test_what_a_full_disk_keeps_in_memory_is_not_noted_as_sent(config, log_path, monkeypatch):
    log = MetricsLog(log_path)
    log.open(RunOpening(config, "full", log_path))
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "_write", Mock(side_effect=OSError("no space")))
        log.metrics(1, {"train/loss": 1.0})
    log.mark_sent(Sent("r", log.size, log.size))
    later = MetricsLog(log_path)  # of the next process
    later.open(RunOpening(config, "full", log_path, params={"a": "x" * 200}))
    left = later.records(offset=later.read_sent().offset)
    assert [record["kind"] for record in left] == ["start"]


def folder_run(config, folder, run_id=None, **fields):
    tags = {RUN_FOLDER: str(folder)}
    return started(config, "run", folder / "metrics.jsonl", run_id=run_id, tags=tags, **fields)


def test_a_copied_folder_has_a_run_of_its_own_and_its_original_keeps_its_curve(config, tmp_path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    first = folder_run(config, original)
    first.log.metrics(1, {"train/loss": 1.0})
    assert first.finish()
    shutil.copytree(original, copy)
    copied = folder_run(config, copy, first.run_id)
    copied.log.metrics(2, {"train/loss": 20.0})
    assert copied.finish()
    # Its checkpoint may still name the original's run.
    again = folder_run(config, copy, first.run_id)
    assert again.finish()
    extended = folder_run(config, original, first.run_id)
    extended.log.metrics(2, {"train/loss": 2.0})
    assert extended.finish()
    assert again.run_id == copied.run_id != first.run_id == extended.run_id
    assert _history(config.uri, first.run_id) == [(1, 1.0), (2, 2.0)]
    assert _history(config.uri, copied.run_id) == [(1, 1.0), (2, 20.0)]


def test_a_trial_of_a_copied_sweep_waits_for_the_copys_own_run(config, tmp_path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    first = folder_run(config, original)
    assert first.finish()
    shutil.copytree(original, copy)
    opening = RunOpening(config, "run", copy / "metrics.jsonl", tags={RUN_FOLDER: str(copy)})
    MetricsLog(opening.log_path).open(opening)  # MLflow has not answered it yet
    child = started(config, "trial", copy / "trial.jsonl", parent_log=opening.log_path)
    assert child.run_id is None
    parent = Tracker.begin(opening)
    assert parent.flush(30)
    assert child.finish()
    tags = MlflowClient(config.uri).get_run(child.run_id).data.tags
    assert tags["mlflow.parentRunId"] == parent.run_id != first.run_id
    assert parent.finish()


@pytest.mark.parametrize("change", ["deleted", "another"])
def test_a_store_that_was_deleted_or_changed_gets_the_whole_curve(
    change, config, log_path, tmp_path, caplog
):
    first = started(config, "run", log_path)
    first.log.metrics(1, {"train/loss": 1.0})
    assert first.finish()
    if change == "deleted":
        new = open_client(f"sqlite:///{tmp_path}/new.db")
        for client in (new, MlflowClient(config.uri)):  # another process has no connections
            client._tracking_client.store.engine.dispose()
        (tmp_path / "new.db").replace(tmp_path / "mlflow.db")
    else:
        config = config.model_copy(update={"uri": f"sqlite:///{tmp_path}/other.db"})
    second = started(config, "run", log_path, run_id=first.run_id)
    second.log.metrics(2, {"train/loss": 2.0})
    assert second.finish()
    assert _history(config.uri, second.run_id) == [(1, 1.0), (2, 2.0)]
    assert f"does not have run {first.run_id}" in caplog.text


def test_a_run_that_is_deleted_while_it_trains_is_recorded_again_from_its_start(config, log_path):
    tracker = started(config, "run", log_path)
    tracker.log.metrics(1, {"train/loss": 1.0})
    assert tracker.flush(30)
    first = tracker.run_id
    MlflowClient(config.uri).delete_run(first)
    tracker.log.metrics(2, {"train/loss": 2.0})
    assert tracker.finish(timeout_s=60)
    assert _only_run(config.uri).info.run_id == tracker.run_id != first
    assert _history(config.uri, tracker.run_id) == [(1, 1.0), (2, 2.0)]


def test_a_deleted_experiment_is_the_reason_that_is_given(config, log_path):
    client = open_client(config.uri)
    client.delete_experiment(experiment_id(client, config.uri, "trials"))
    tracker = started(config, "run", log_path)
    assert not tracker.finish(timeout_s=5)
    assert "has been deleted in MLflow; restore it with" in tracker.problem
    assert tracker.hint == ""


def test_a_users_tag_that_mlflow_refuses_costs_none_of_the_runs_own(config, log_path):
    """The recipe refuses those that are known; MLflow decides."""
    refused = config.model_copy(update={"tags": {"50%": "x"}})
    tracker = started(refused, "run", log_path, tags={"vit_ray.kind": "pretrain"})
    assert not tracker.finish()
    assert _only_run(config.uri).data.tags["vit_ray.kind"] == "pretrain"
    other = f"sqlite:///{log_path.parent}/other.db"
    assert len(replay(log_path, other).refused) == 1
    assert _only_run(other).data.tags["vit_ray.kind"] == "pretrain"


def test_a_replay_without_a_file_that_is_gone_says_so_and_fails(config, log_path):
    log_path.parent.mkdir()
    page = log_path.with_name("report.html")
    page.write_text("x")
    tracker = started(config, "run", log_path)
    tracker.log.artifact(page)
    assert tracker.finish()
    page.unlink()
    other = f"sqlite:///{log_path.parent}/other.db"
    assert run_replay(log_path, other) == 1
    (text,) = replay(log_path, other).refused
    assert "report.html no longer exists" in text


def _record_in_process(uri, folder, name):
    tracker = started(
        TrackingConfig(uri=uri, experiment="trials"),
        name,
        Path(folder) / f"{name}.jsonl",
        wait_s=60,
    )
    _losses(tracker, range(200))
    sys.exit(0 if tracker.finish(timeout_s=60) else 1)


@pytest.mark.slow
def test_processes_that_start_at_once_on_a_new_sqlite_file_all_write_everything(config, tmp_path):
    context = multiprocessing.get_context("spawn")
    names = [f"trial-{i}" for i in range(3)]
    processes = [
        context.Process(target=_record_in_process, args=(config.uri, str(tmp_path), name))
        for name in names
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    client = MlflowClient(config.uri)
    runs = client.search_runs([client.get_experiment_by_name("trials").experiment_id])
    assert sorted(run.info.run_name for run in runs) == names
    for run in runs:
        history = _history(config.uri, run.info.run_id)
        assert history == [(step, float(step)) for step in range(200)]


def test_opening_a_new_store_prints_nothing(tmp_path):
    code = (
        "from vit_ray.tracking.mlflow_client import open_client; "
        f"open_client('sqlite:///{tmp_path}/deep/er/mlflow.db')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "deep/er/mlflow.db").exists()


@pytest.mark.parametrize(
    ("uri", "safe"),
    [
        ("http://u:pw@host:5000/x", "http://host:5000/x"),
        ("http://u:long-pw@pw@host:5000", "http://host:5000"),
        ("http://u:a/pw@host:5000", "http://host:5000"),
        ("http://u:p'pw@host:5000", "http://host:5000"),
        ("postgresql://u:pw@db/mlflow?password=pw", "postgresql://db/mlflow"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("databricks", "databricks"),
    ],
)
def test_secrets_leave_addresses_and_texts(uri, safe):
    assert safe_uri(uri) == safe
    text = redact_uri(f"request to {uri}/api failed; again {uri}", uri)
    assert "pw" not in text
    assert safe in text
    assert redact_uri("denied: correct-horse", "http://u:correct-horse@h") == "denied: "
    assert redact_uri("port 5010 of h", "http://u:10@h") == "port 5010 of h"


@pytest.mark.parametrize("name", ["50%25 of it", "why?", "a#b"])
@pytest.mark.parametrize("typed", ["sqlite:///my%20runs.db", "sqlite+pysqlite:///my%20runs.db"])
def test_a_folder_whose_name_looks_like_a_part_of_an_address_holds_the_store(tmp_path, name, typed):
    uri = absolute_uri(typed, tmp_path / name)
    assert sqlalchemy.make_url(uri).database == f"{tmp_path}/{name}/my runs.db"
    assert sqlite_file(uri) == tmp_path / name / "my runs.db"
    assert absolute_uri(uri, tmp_path / "another") == uri


class Server:
    """A real `mlflow server` on a port that stays its own over restarts."""

    def __init__(self, folder, store=None):
        (self.port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder, self.store = folder, store or f"sqlite:///{folder}/server.db"
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", self.store]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        without_jobs = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self.folder / "server.log", "a") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=without_jobs,  # its runners of jobs are two more processes to start
                start_new_session=True,
            )
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=1).read()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the MLflow server did not come up")

    def stop(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    open_client(f"sqlite:///{tmp_path}/server.db")  # the schema, quicker than the server would
    yield server
    server.stop()


@pytest.mark.slow
def test_a_server_that_stops_and_returns_has_the_whole_curve_once(server, log_path, caplog, capfd):
    server.start()
    uri = server.uri.replace("://", "://user:hunter2@")
    config = TrackingConfig(uri=uri, experiment="trials")
    tracker = started(config, "outage", log_path, wait_s=60)
    run_id = tracker.run_id
    assert run_id is not None
    tracker.log.metrics(0, {"train/loss": 0.0})
    assert tracker.flush(60)
    server.stop()
    _losses(tracker, range(1, 40))
    assert not tracker.flush(2)
    tracker.log.text("note.txt", "kept through the outage")
    server.start()
    tracker.log.metrics(40, {"train/loss": 40.0})
    assert tracker.finish(timeout_s=60)

    # MLflow prints the address at the end of a run, unless it is kept from it.
    assert "hunter2" not in capfd.readouterr().out + caplog.text
    assert [m for m in caplog.messages if run_id in m and "cannot be used" in m]
    expected = [(step, float(step)) for step in range(41)]
    assert _history(server.uri, run_id) == expected
    assert replay(log_path, server.uri).num_points == 0
    assert _history(server.uri, run_id) == expected
    client = MlflowClient(server.uri)
    assert client.get_run(run_id).info.status == "FINISHED"
    assert [f.path for f in client.list_artifacts(run_id)] == ["note.txt"]


@pytest.mark.slow
def test_a_page_that_is_written_again_replaces_its_tables_on_a_server(server, tmp_path):
    server.start()
    client = MlflowClient(server.uri)
    run_id = client.create_run(client.create_experiment("pages")).info.run_id
    page = tmp_path / "report.html"
    page.write_text("<p>result</p>")
    table = pd.DataFrame({"rate": [0.1, 0.2], "top-1 %": [90.0, 91.0]})
    written = Written(page, [], False, tables={"Trainings, the best first": table})
    for _ in range(2):
        keep_page(client, run_id, written)
    kept = client.download_artifacts(run_id, "tables/trainings.json", str(tmp_path))
    assert len(json.loads(Path(kept).read_text())["data"]) == 2


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("pretrain", None),  # of few runs, in which a scatter is some dots
        ("sweep_trial", ("optim.learning_rate", "dev/top1")),
        ("study_cell", ("study/exaflops", "eval/top1")),
    ],
)
def test_the_view_of_the_link_is_kept_with_the_experiment(kind, axes, config, log_path):
    tracker = started(config, "first", log_path, tags={"vit_ray.kind": kind})
    assert tracker.finish()
    assert tracker.hint == f"vit-ray ui {config.uri}"
    client = MlflowClient(config.uri)
    tags = client.get_experiment(_only_run(config.uri).info.experiment_id).tags
    (text,) = (text for name, text in tags.items() if name.startswith("mlflow.sharedViewState."))
    charts = json.loads(text)["compareRunCharts"]
    scatters = [one for one in charts if one["type"] == "SCATTER"]
    found = [(one["xaxis"]["key"], one["yaxis"]["key"]) for one in scatters]
    assert found == ([axes] if axes else [])
    columns = json.loads(text)["selectedColumns"]
    assert {"metrics.`study/steps`", "metrics.`transfer/mean_top1`"} <= {*columns}
    assert [one["metricKey"] for one in charts if one["type"] == "LINE"] == ["train/loss"]
    assert tags["mlflow.note.content"].startswith("Trainings of vit_ray.")


def test_without_the_right_to_keep_a_view_the_link_has_none(config, log_path, monkeypatch):
    client = open_client(config.uri)
    experiment = client.create_experiment("e")
    share_view(client, experiment, "pretrain")
    refused = Mock(side_effect=MlflowException("no right", error_code=PERMISSION_DENIED))
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refused)
    assert share_view(client, experiment, "pretrain") == "runs"  # it is there already
    assert not refused.called
    assert share_view(client, experiment, "sweep") == ""
    assert page_hint("http://u:pw@host/x/", "7") == (
        "http://host/x/#/experiments/7/runs?workflowType=machine_learning"
    )
