"""`vit-ray replay`: a run's log sent to MLflow again, or to another one."""

import json
import re
import subprocess
import sys

import pytest
from mlflow.tracking import MlflowClient

from tests.commands.command_line import run_cli
from tests.tracking.tracked import (
    NOWHERE,
    event_texts,
    history,
    losses,
    only_run,
    recorded,
    run_of,
    started,
)
from vit_ray.commands.tracking_store import run_replay
from vit_ray.outcomes import EventKind
from vit_ray.tracking.metrics_log import MetricsLog
from vit_ray.tracking.tracker import replay


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


def test_the_replay_job_sends_what_mlflow_missed(away, config, log_path):
    tracker = started(away, "missed", log_path)
    tracker.log.metrics(1, {"train/loss": 1.0, "train/lr": 0.1})
    tracker.log.event(EventKind.STOPPED, "SIGTERM", 9)
    tracker.finish(timeout_s=0.1)
    words = [sys.executable, "-m", "vit_ray", "replay", str(log_path), config.uri]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2 points were new\n")
    assert event_texts(config.uri, only_run(config.uri).info.run_id) == ["SIGTERM"]


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("foo://user:hunter2@x", "cannot be used|is not an address"),
        ("", "cannot be used|is not an address"),
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
    done = replay(log_path, config.uri)
    assert (done.num_points, done.refused) == (1, [])


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
