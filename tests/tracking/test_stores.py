"""Where MLflow keeps runs: SQLite files, whole, damaged and deleted, and their addresses."""

import contextlib
import fcntl
import json
import shutil
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import sqlalchemy
from alembic.runtime.migration import HeadMaintainer
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow.store.db import utils as db_utils
from mlflow.tracking import MlflowClient

from tests.tracking.tracked import history, losses, only_run, recorded, started
from vit_ray.addresses import absolute_uri, sqlite_file
from vit_ray.tracking import mlflow_client
from vit_ray.tracking import tracker as sender
from vit_ray.tracking.mlflow_client import experiment_id, open_client, page_hint, share_view
from vit_ray.tracking.store_requests import redact_uri, safe_uri


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
    losses(tracker, range(10))
    assert tracker.flush(30)
    with broken(Path(config.uri.removeprefix("sqlite:///"))) as mend:
        losses(tracker, range(10, 500))  # more than there is room for in the pages of the file
        wait_for_tries(tracker, 1, lambda: tracker._points.error)
        wait_for_tries(tracker, 8)
        mend()
        assert tracker.finish(timeout_s=60)
    expected = [(step, float(step)) for step in range(500)]
    assert history(config.uri, tracker.run_id) == expected


def test_a_sqlite_file_that_another_process_keeps_locked_is_given_up(config, monkeypatch):
    monkeypatch.setattr(mlflow_client, "LOCK_S", 0.1)
    path = config.uri.removeprefix("sqlite:///")
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"mlflow.db.lock"):
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


def test_a_deleted_experiment_is_the_reason_that_is_given(config, log_path):
    client = open_client(config.uri)
    client.delete_experiment(experiment_id(client, config.uri, "trials"))
    tracker = started(config, "run", log_path)
    assert not tracker.finish(timeout_s=5)
    assert "has been deleted in MLflow; restore it with" in tracker.problem


@pytest.mark.parametrize(
    ("uri", "safe"),
    [
        ("http://u:long-pw@pw@host:5000/x", "http://host:5000/x"),
        ("postgresql://u:pw@db/mlflow?password=pw", "postgresql://db/mlflow"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
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
    tags = MlflowClient(config.uri).get_experiment(only_run(config.uri).info.experiment_id).tags
    (text,) = (text for name, text in tags.items() if name.startswith("mlflow.sharedViewState."))
    charts = json.loads(text)["compareRunCharts"]
    scatters = [one for one in charts if one["type"] == "SCATTER"]
    found = [(one["xaxis"]["key"], one["yaxis"]["key"]) for one in scatters]
    assert found == ([axes] if axes else [])
    assert [one["metricKey"] for one in charts if one["type"] == "LINE"] == ["train/loss"]


def test_without_the_right_to_keep_a_view_the_link_has_none(config, monkeypatch):
    client = open_client(config.uri)
    experiment = client.create_experiment("e")
    share_view(client, experiment, "pretrain")
    refused = Mock(side_effect=MlflowException("no right", error_code=PERMISSION_DENIED))
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refused)
    assert share_view(client, experiment, "pretrain") == "runs"  # it is there already
    assert share_view(client, experiment, "sweep") == ""
    assert "pw" not in page_hint("http://u:pw@host/x/", "7")
