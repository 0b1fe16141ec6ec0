"""The actor that records runs: what it records, and what its death costs."""

import gzip
import os
import pickle
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray
from mlflow import MlflowClient

from tests.tracking.recorders import Here, recorded_here
from tests.tracking.tracked import NOWHERE, history
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.outcomes import EventKind, Failure
from vit_ray.tracking import metrics_log, tracker
from vit_ray.tracking.metrics_log import MetricsLog, RunOpening
from vit_ray.tracking.recorder import Recorder, start_recorder
from vit_ray.tracking.run_state import Orders
from vit_ray.worker.run_link import RunLink

pytestmark = pytest.mark.usefixtures("answers_here")


def opening_of(folder: Path, parent: Recorder | None = None, name: str = "run") -> RunOpening:
    config = TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", system_metrics=False)
    parent_log = parent.log_path if parent else None
    return RunOpening(config, name, folder / name / "metrics.jsonl", parent_log=parent_log)


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(f"sqlite:///{tmp_path}/mlflow.db")


@pytest.fixture
def store(tmp_path: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")


def test_a_log_has_one_writer_and_the_next_waits_until_it_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_log, "RELEASE_S", 0.2)
    first = recorded_here(opening_of(tmp_path))
    with pytest.raises(RuntimeError, match="the recorder of the run's last driver"):
        recorded_here(opening_of(tmp_path))
    first.finish("FINISHED")
    recorded_here(opening_of(tmp_path)).finish("FINISHED")


def test_what_ray_repeats_in_a_new_process_is_recorded_once(here, tmp_path):
    opening = opening_of(tmp_path)
    run = recorded_here(opening, here)
    run.request_resize()
    given = (run.log_path, "metrics", {"step": 1, "values": {"a/b": 1.0}}, "id", "")
    for _ in range(2):
        assert here.actor.write(*given) == ""
    here.die()
    run.open(opening)
    assert run.heartbeat(0, 1) == Orders(None, True)
    assert here.actor.write(*given) == ""
    log = MetricsLog(run.log_path)
    assert len(list(log.records("start"))) == 1
    assert [one["step"] for one in log.records("metrics")] == [1]
    run.finish("FINISHED")


def test_a_run_whose_opener_died_is_continued_by_the_next_in_the_same_actor(here, tmp_path):
    first = recorded_here(opening_of(tmp_path), here)
    first.metrics(1, {"train/loss": 1.0})
    run_id = first.run_id()
    # Of a trial that was started again.
    second = recorded_here(replace(opening_of(tmp_path), run_id=run_id), here)
    assert second.run_id() == run_id
    second.metrics(3, {"train/loss": 1.0})
    assert not second.finish("FINISHED")
    assert history(here.uri, run_id) == [(1, 1.0), (3, 1.0)]


def started(opening: RunOpening, parent: Recorder | None = None) -> Recorder:
    """A recorder in a process of Ray's."""
    path, name = opening.log_path, opening.run_name
    if parent is None:
        run = start_recorder(opening.config.uri, path, name, "")
    else:
        run = replace(parent, log_path=path, run_name=name)
    run.open(opening)
    return run


def kill(record: Recorder) -> None:
    """End the actor's process: `ray.kill` returns before the process has ended."""
    pid = ray.get(record.actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_an_actor_that_dies_comes_back_with_all_that_was_recorded(ray_cluster, tmp_path, store):
    parent = started(opening_of(tmp_path, name="parent"))
    record = started(opening_of(tmp_path, parent), parent)
    record.metrics(1, {"train/loss": 1.0, "eval/top1": 0.5})
    record.event(EventKind.RESUMED, "a worker has died", 1)
    RunLink(record, 0).keep_file("trace.json.gz", gzip.compress(b"a trace"))
    record.request_resize()
    record.fail(Failure("the disk is full", has_diverged=True))
    assert record.flush(60)
    run_id = record.run_id()
    assert run_id is not None
    for step in range(2, 41):
        record.metrics(step, {"train/loss": float(step)}, 60.0 if step == 40 else 0.0)
        if step == 20:
            kill(record)
    status = record.status()
    assert (status.step, status.metrics["eval/top1"]) == (40, 0.5)
    assert [event.text for event in status.events] == ["a worker has died"]
    assert record.heartbeat(1, 40) == Orders(None, True)
    assert record.failure() == Failure("the disk is full", has_diverged=True)
    parent.request_stop("SIGTERM")
    deadline = time.monotonic() + 60
    while record.heartbeat(0, 1) != Orders("SIGTERM", True) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert record.stop_reason() == "SIGTERM"
    assert record.run_id() == run_id
    assert not record.finish("FINISHED")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert history(uri, run_id) == [(step, float(step)) for step in range(1, 41)]
    assert store.get_run(run_id).info.status == "FINISHED"
    path = store.download_artifacts(run_id, "profile/trace.json.gz", str(tmp_path))
    assert gzip.decompress(Path(path).read_bytes()) == b"a trace"
    assert not parent.finish("KILLED")


def send_losses(record: Recorder, key: str, num_steps: int) -> None:
    """As a worker: each step is sent without a wait for its answer."""
    for step in range(num_steps):
        record.metrics(step, {key: float(step)}, 200.0 if step == num_steps - 1 else 0.0)
        time.sleep(0.01)


def test_no_record_is_lost_doubled_or_out_of_order_when_the_actor_dies_under_load(
    ray_cluster, tmp_path
):
    """Ray repeats the calls that were not answered, in any order."""
    record, num_steps, keys = started(opening_of(tmp_path)), 600, ["train/loss", "train/accuracy"]
    send = ray.remote(send_losses).options(num_cpus=0)
    calls = [send.remote(record, key, num_steps) for key in keys]
    for _ in range(4):
        time.sleep(1.0)
        kill(record)
    ray.get(calls)
    run_id = record.run_id()
    assert not record.finish("FINISHED")
    log, uri = MetricsLog(record.log_path), f"sqlite:///{tmp_path}/mlflow.db"
    for key in keys:
        sent = [int(one["step"]) for one in log.records("metrics") if key in one["values"]]
        assert sent == list(range(num_steps))
        assert history(uri, run_id, key) == [(step, float(step)) for step in range(num_steps)]


def test_a_record_that_cannot_be_written_costs_only_itself(here, tmp_path):
    record = recorded_here(opening_of(tmp_path), here)
    record.append("metrics", step=1, values={"train/loss": {1}})  # no JSON
    with pytest.raises(pickle.PicklingError):
        record.append("tag", key="a", value=Mock())  # cannot be sent
    record.metrics(2, {"train/loss": 2.0})
    here.die()
    record.metrics(3, {"train/loss": 3.0})
    run_id = record.run_id()
    assert not record.finish("FINISHED")
    assert history(here.uri, run_id) == [(2, 2.0), (3, 3.0)]


def test_an_end_that_was_noted_before_the_actor_died_reaches_mlflow(store, here, tmp_path):
    record = recorded_here(opening_of(tmp_path), here)
    assert record.flush(60)
    run_id = str(record.run_id())
    here.die()
    MetricsLog(record.log_path).append("finish", status="FINISHED")
    assert store.get_run(run_id).info.status == "RUNNING"
    assert not record.finish("FINISHED")
    assert store.get_run(run_id).info.status == "FINISHED"


def test_a_stop_of_a_sweep_reaches_its_runs_whenever_they_start(here, tmp_path):
    parent = recorded_here(opening_of(tmp_path, name="parent"), here)
    nested = recorded_here(opening_of(tmp_path, parent, "nested"), here)
    early = recorded_here(opening_of(tmp_path, nested, "early"), here)
    assert early.heartbeat(0, 1) == Orders(None, False)
    assert nested.status().step == 1
    parent.request_stop("SIGTERM")
    here.die()
    late = recorded_here(opening_of(tmp_path, nested, "late"), here)
    for run in (early, late):
        assert run.heartbeat(0, 1) == Orders("SIGTERM", False)
    for run in (early, late, nested, parent):
        run.finish("KILLED")


def test_a_trial_has_its_dev_accuracy_under_its_own_name_and_first(store, here, tmp_path):
    data = {"name": "train", "digest": "f" * 32, "source": "/d", "context": "training"}
    opening = replace(
        opening_of(tmp_path),
        datasets=[{**data, "profile": {"num_images": 7}}],
        measured_on="dev",
        awaited_metric="dev/top1",
    )
    record = recorded_here(opening, here)
    record.metrics(1, {"a/loss": 1.0})
    record.metrics(2, {"eval/top1": 0.75, "evaluated": 1.0})
    assert record.status().metrics["eval/top1"] == 0.75
    run_id = str(record.run_id())
    record.finish("FINISHED")
    run = store.get_run(run_id)
    assert next(iter(run.data.metrics.items())) == ("dev/top1", 0.75)
    assert set(run.data.metrics) == {"dev/top1", "a/loss", "evaluated"}
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.profile) == ("train", '{"num_images": 7}')


def test_a_restarted_job_records_its_own_start_and_its_attempts_do_not(here, tmp_path):
    for step in (1, 5):
        record = recorded_here(opening_of(tmp_path), here)
        record.metrics(step, {"startup/first_step_s": float(step)})
        record.metrics(step + 1, {"startup/first_step_s": 100.0})
        run_id = record.run_id()
        assert not record.finish("FINISHED")
    assert history(here.uri, run_id, "startup/first_step_s") == [(1, 1.0), (5, 5.0)]


def record_model(record: Recorder) -> None:
    record.model("net", 7, reference={"classes": []}, card="", params={}, register_as=None)


def test_models_are_logged_once_after_the_end(store, here, tmp_path):
    """Also those of trials that ended before the actor died."""
    sweep = recorded_here(opening_of(tmp_path, name="sweep"), here)
    record = recorded_here(opening_of(tmp_path, sweep), here)
    record_model(record)
    assert record.flush(60)
    run_id = str(record.run_id())
    assert not record.finish("FINISHED")
    assert store.get_run(run_id).outputs.model_outputs == []
    here.die()
    assert not sweep.finish("FINISHED")
    for _ in range(2):
        tracker.log_models_later(here.uri, sweep.log_path).join()
    assert len(store.get_run(run_id).outputs.model_outputs) == 1


def test_a_model_is_not_logged_in_the_run_of_a_folders_original(here, tmp_path, caplog):
    """MLflow never has a run of the copy: the model's log is named."""
    opening = opening_of(tmp_path)
    recorded_here(opening, here).finish("FINISHED")
    shutil.copytree(opening.log_path.parent, tmp_path / "copy")
    copied = tmp_path / "copy" / "metrics.jsonl"
    away = TrackingConfig(uri=NOWHERE, system_metrics=False)
    record = recorded_here(replace(opening, config=away, log_path=copied, key="copy"))
    record_model(record)
    assert record.finish("FINISHED")
    ((_, (run_id, _)),) = tracker.recorded_models(copied)
    assert run_id is None
    tracker.log_models_later(NOWHERE, copied).join()
    assert "a model is not logged (MLflow does not have all of its run)" in caplog.text
