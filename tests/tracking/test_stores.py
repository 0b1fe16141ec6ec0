"""Where MLflow keeps runs, and `vit-ray replay`: a run's log sent again, or to another store."""

import contextlib
import json
import re
import shutil
import time
from functools import partial

import pytest
import sqlalchemy
from alembic.runtime.migration import HeadMaintainer
from mlflow.store.db import utils as db_utils
from mlflow.tracking import MlflowClient

from tests.commands.command_line import run_cli
from tests.tracking.tracked import (
    NOWHERE,
    history,
    losses,
    only_run,
    recorded,
    run_of,
    started,
)
from vit_ray.addresses import absolute_uri, sqlite_file
from vit_ray.commands.tracking_store import run_replay
from vit_ray.tracking import tracker as sender
from vit_ray.tracking.metrics_log import MetricsLog
from vit_ray.tracking.mlflow_client import experiment_id, open_client
from vit_ray.tracking.tracker import replay


def wait_for_failures(tracker, num):
    """Until an attempt to send points has failed so many times."""
    last, deadline_s = tracker.points.num_failed + num, time.monotonic() + 60
    while tracker.points.num_failed < last:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@contextlib.contextmanager
def full_disk():
    """SQLite may not add a page to a file, as on a full disk."""
    pages = [1]  # or as many as the file has

    def limit(connection):
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages[-1]}")

    sqlalchemy.event.listen(sqlalchemy.Engine, "begin", limit)
    try:
        yield partial(pages.append, 2**30)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "begin", limit)


def test_points_wait_while_the_database_is_full(config, log_path, monkeypatch):
    """MLflow answers BAD_REQUEST, as for a wrong value."""
    monkeypatch.setattr(sender, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(sender, "LAST_BACKOFF_S", 0.05)
    monkeypatch.setattr(sender, "BATCH_INTERVAL_S", 0.01)
    tracker = started(config, "failover", log_path)
    losses(tracker, range(10))
    assert tracker.flush(30)
    with full_disk() as mend:
        losses(tracker, range(10, 500))  # more than there is room for in the pages of the file
        wait_for_failures(tracker, 8)
        mend()
        assert tracker.finish(timeout_s=60)
    expected = [(step, float(step)) for step in range(500)]
    assert history(config.uri, tracker.run_id) == expected


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
    tracker = recorded(config, "short", log_path, [1], wait_s=0.0)
    assert history(config.uri, tracker.run_id) == [(1, 1.0)]


@pytest.mark.parametrize("change", ["deleted", "another"])
def test_a_store_that_was_deleted_or_changed_gets_the_whole_curve(
    change, config, log_path, tmp_path, caplog
):
    first = recorded(config, "run", log_path, [1])
    if change == "deleted":
        new = open_client(f"sqlite:///{tmp_path}/new.db")
        for client in (new, MlflowClient(config.uri)):  # another process has no connections
            client._tracking_client.store.engine.dispose()
        (tmp_path / "new.db").replace(tmp_path / "mlflow.db")
    else:
        config = config.model_copy(update={"uri": f"sqlite:///{tmp_path}/other.db"})
    second = recorded(config, "run", log_path, [2], run_id=first.run_id)
    assert history(config.uri, second.run_id) == [(1, 1.0), (2, 2.0)]
    assert f"does not have run {first.run_id}" in caplog.text


def test_a_run_that_is_deleted_while_it_trains_is_recorded_again_from_its_start(config, log_path):
    tracker = started(config, "run", log_path)
    losses(tracker, [1])
    assert tracker.flush(30)
    first = tracker.run_id
    MlflowClient(config.uri).delete_run(first)
    losses(tracker, [2])
    assert tracker.finish(timeout_s=60)
    assert only_run(config.uri).info.run_id == tracker.run_id != first
    assert history(config.uri, tracker.run_id) == [(1, 1.0), (2, 2.0)]


def test_a_deleted_experiment_is_the_reason_that_is_given(config, log_path, caplog):
    client = open_client(config.uri)
    client.delete_experiment(experiment_id(client, config.uri, "trials"))
    tracker = started(config, "run", log_path)
    assert not tracker.finish(timeout_s=5)
    assert "has been deleted in MLflow; restore it with" in caplog.messages[-1]
    assert tracker.hint == ""


@pytest.mark.parametrize("name", ["50%25 of it", "why?", "a#b"])
@pytest.mark.parametrize("typed", ["sqlite:///my%20runs.db", "sqlite+pysqlite:///my%20runs.db"])
def test_a_folder_whose_name_looks_like_a_part_of_an_address_holds_the_store(tmp_path, name, typed):
    uri = absolute_uri(typed, tmp_path / name)
    assert sqlalchemy.make_url(uri).database == f"{tmp_path}/{name}/my runs.db"
    assert sqlite_file(uri) == tmp_path / name / "my runs.db"
    assert absolute_uri(uri, tmp_path / "another") == uri


@pytest.fixture
def away(config):
    """The configuration of a run that MLflow missed."""
    return config.model_copy(update={"uri": NOWHERE})


def test_replay_into_another_store_is_complete_and_a_second_one_adds_nothing(
    config, log_path, tmp_path
):
    tracker = started(config, "copy", log_path, params={"seed": "1"}, tags={"a": "b"})
    losses(tracker, range(100))
    tracker.log.metrics(100, {"train/loss": float("nan")})
    assert tracker.finish()
    other = f"sqlite:///{tmp_path}/other.db"
    assert replay(log_path, other).num_points == 101
    assert replay(log_path, other).num_points == 0
    assert replay(log_path, config.uri).num_points == 0
    run = only_run(other)
    assert (run.info.run_name, run.info.status) == ("copy", "FINISHED")
    assert (run.data.params, run.data.tags["a"]) == ({"seed": "1"}, "b")
    for key in ("train/loss", "train/loss_nonfinite"):
        assert history(other, run.info.run_id, key) == history(config.uri, tracker.run_id, key)


def test_a_sweep_that_is_replayed_before_its_trials_has_them_below_it(away, config, tmp_path):
    sweep, trial = logs = [tmp_path / "sweep", tmp_path / "trial"]
    for log, parent_log in ((sweep, None), (trial, sweep)):
        tracker = started(away, log.name, log, wait_s=0.1, parent_log=parent_log)
        tracker.finish(timeout_s=0.1)
    assert replay(trial, config.uri).refused == []
    assert "mlflow.parentRunId" not in only_run(config.uri).data.tags
    for log in logs:
        assert replay(log, config.uri).refused == []
    of_sweep, of_trial = (MetricsLog(log).read_sent().run_id for log in logs)
    assert run_of(config.uri, of_trial).data.tags["mlflow.parentRunId"] == of_sweep
    # What another store has is noted nowhere.
    replay(sweep, f"sqlite:///{tmp_path}/other.db")
    assert MetricsLog(sweep).read_sent().run_id == of_sweep


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("foo://user:hunter2@x", "cannot be used|is not an address"),
        ("sqlite:///:memory:", "cannot be used|is not an address"),
        ("http://user:hunter2@127.0.0.1:9", "MLflow at http://127.0.0.1:9 cannot be used"),
        ("http://[bad", "cannot be used|is not an address"),
        (None, "no such file, or it does not begin with a run's start"),
    ],
)
def test_a_bad_address_or_log_is_a_message(uri, told, away, config, log_path):
    started(away, "missed", log_path).finish(timeout_s=0.1)
    words = (str(log_path), uri) if uri is not None else (f"{log_path}x", config.uri)
    done = run_cli("replay", *words)
    assert done.exit_code in (1, 2)
    assert done.stderr.startswith("error: ")
    assert re.search(told, done.stderr)
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize("way", ["absolute", "dots", "link", "folder with a link"])
def test_neither_replay_nor_a_recorder_sends_a_file_that_is_not_the_runs(
    way, config, log_path, tmp_path
):
    tracker = recorded(config, "victim", log_path)
    folder, secret = log_path.parent, tmp_path / "id_rsa"
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
    (refused,) = replay(log_path, config.uri).refused
    assert "is not in the run's folder" in refused
    assert MlflowClient(config.uri).list_artifacts(tracker.run_id) == []


@pytest.mark.parametrize("line", ['{"kind": "metrics", "step": 1, "val', "half a \r line"])
def test_a_damaged_record_costs_only_itself(line, away, config, log_path):
    started(away, "damaged", log_path).finish(timeout_s=0.1)
    with open(log_path, "a") as file:
        file.write(line + "\n")
        file.write('{"kind": "metrics", "step": 1, "values": {"b": 2.0}, "time_ms": 1}\n')
    result = replay(log_path, config.uri)
    assert (result.num_points, result.refused) == (1, [])


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
