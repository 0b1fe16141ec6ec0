"""The actor that records runs: what it records and knows of workers, and what its death costs."""

import gzip
import logging
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import ray
from mlflow import MlflowClient

from tests.tracking.tracked import NOWHERE, Here, history, recorded_here
from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.config import load_recipe
from vit_ray.config.loading import write_yaml
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.run_record import (
    OpenRun,
    add_to_ended,
    command_line,
    data_inputs,
    run_facts,
    trained_params,
)
from vit_ray.outcomes import RUN_FOLDER, EventKind, RunFailedError, WorkerPlace
from vit_ray.report.page import write_report
from vit_ray.report.runs import load_runs
from vit_ray.tracking import metrics_log, mlflow_run, run_records, tracker
from vit_ray.tracking.metrics_log import MetricsLog, RunOpening, metrics_log_path
from vit_ray.tracking.mlflow_client import SystemMetricsMonitor, experiment_id, open_client
from vit_ray.tracking.recorder import Orders, Recorder
from vit_ray.tracking.run_records import NodeSampler, RunState, start_recorder
from vit_ray.worker.run_link import RunLink
from vit_ray.worker.saving import make_position

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


def test_what_ray_repeats_in_a_new_process_is_recorded_once(here, store, tmp_path):
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
    run_id = str(run.run_id())
    here.die()
    log.append("finish", status="FINISHED")  # as noted before it died
    assert store.get_run(run_id).info.status == "RUNNING"
    assert not run.finish("FINISHED")
    assert store.get_run(run_id).info.status == "FINISHED"


def test_a_run_whose_opener_died_is_continued_by_the_next_in_the_same_actor(here, tmp_path):
    first = recorded_here(opening_of(tmp_path), here)
    first.metrics(1, {"train/loss": 1.0})
    run_id = first.run_id()
    first.heartbeat(0, 0, WorkerPlace("10.0.0.1", "a", "", 0, "00"))
    # Of a trial that was started again.
    opening = replace(opening_of(tmp_path), run_id=run_id)
    second = Recorder(here, opening.log_path, opening.run_name)
    assert [second.open(opening) for _ in range(2)] == ["00", ""]
    assert second.run_id() == run_id
    second.metrics(3, {"train/loss": 1.0})
    assert not second.finish("FINISHED")
    assert history(here.uri, run_id) == [(1, 1.0), (3, 1.0)]


def test_a_restarted_actor_continues_the_run_of_the_checkpoint(here, tmp_path, monkeypatch):
    """MLflow was away, so that the log names no run yet."""
    first = recorded_here(opening_of(tmp_path, name="first"), here)
    run_id = first.run_id()
    first.finish("KILLED")
    opening = replace(opening_of(tmp_path, name="second"), run_id=run_id)
    with monkeypatch.context() as away:
        away.setattr(mlflow_run, "RunWriter", Mock(side_effect=OSError("away")))
        record = recorded_here(opening, here)
        assert record.run_id() is None
        here.die()
    assert record.flush(60)
    assert record.run_id() == run_id
    record.finish("FINISHED")


def test_a_record_that_cannot_be_written_costs_only_itself(here, tmp_path):
    record = recorded_here(opening_of(tmp_path), here)
    record.append("metrics", step=1, values={"train/loss": {1}})  # no JSON
    with pytest.raises(TypeError, match="pickle"):
        record.append("tag", key="a", value=threading.Lock())  # cannot be sent
    record.metrics(2, {"train/loss": 2.0})
    here.die()
    record.metrics(3, {"train/loss": 3.0})
    run_id = record.run_id()
    assert not record.finish("FINISHED")
    assert history(here.uri, run_id) == [(2, 2.0), (3, 3.0)]


def test_a_signal_within_a_call_may_record(here, tmp_path):
    """Its handler runs between two steps of the interrupted thread."""
    record, interrupted = recorded_here(opening_of(tmp_path), here), []

    def write(*given: Any) -> str:
        if not interrupted:
            interrupted.append(given)
            record.request_stop("SIGINT")
        return here.actor.write(*given)

    slow = replace(record, actor=SimpleNamespace(write=SimpleNamespace(remote=write)))
    slow.metrics(1, {"train/loss": 1.0})
    log = MetricsLog(record.log_path)
    assert [one["kind"] for one in log.records("metrics", "stop")] == ["stop", "metrics"]
    record.finish("KILLED")


def test_a_log_that_is_locked_holds_up_no_other_run(here, tmp_path):
    run, locked = opening_of(tmp_path), opening_of(tmp_path, name="locked")
    record = recorded_here(run, here)
    with metrics_log.lock_log(locked.log_path):
        waiting = threading.Thread(target=recorded_here, args=(locked, here))
        waiting.start()
        record.metrics(1, {"train/loss": 1.0})
        assert record.status().step == 1
        assert waiting.is_alive()
    waiting.join(30)
    for opening in (run, locked):
        assert not replace(record, log_path=opening.log_path).finish("FINISHED")


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
    record.fail(RunFailedError("the disk is full"))
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
    failure = record.failure()
    assert (type(failure), str(failure)) == (RunFailedError, "the disk is full")
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


def test_a_trial_has_its_dev_accuracy_under_its_own_name_and_first(store, here, tmp_path):
    opening = replace(opening_of(tmp_path), measured_on="dev", awaited_metric="dev/top1")
    data = {"name": "train", "digest": "f" * 32, "source": "/d", "context": "training"}
    datasets = [{**data, "profile": {"num_images": 7}}]
    record = recorded_here(replace(opening, datasets=datasets), here)
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
    params = {"checkpoint": "x"}
    record.model("net", 7, reference={"classes": []}, card="", params=params, register_as=None)


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
    (model,) = tracker.recorded_models(MetricsLog(copied))
    assert model["run_id"] is None
    tracker.log_models_later(NOWHERE, copied).join()
    assert "a model is not logged (net: MLflow does not have all of its run)" in caplog.text


def test_a_transfer_of_a_copied_cell_is_not_recorded_in_the_originals_run(here, store, tmp_path):
    words = [f"output={tmp_path}/runs", f"tracking.uri={here.uri}", "tracking.system_metrics=false"]
    cell = load_recipe("digits", words)
    copy, log = cell.with_changes(output=f"{tmp_path}/copy"), metrics_log_path(cell.run_folder)
    opening = RunOpening(cell.tracking, cell.name, log, tags={RUN_FOLDER: cell.run_folder})
    original = recorded_here(opening, here)
    run_id = original.run_id()
    original.finish("FINISHED")
    shutil.copytree(cell.run_folder, copy.run_folder)
    study = OpenRun(recorded_here(opening_of(tmp_path, name="study"), here))
    for recipe, is_there in ((copy, False), (cell, True)):
        add_to_ended(recipe, run_id, {"transfer/mean_top1": 0.5}, study)
        assert ("transfer/mean_top1" in store.get_run(str(run_id)).data.metrics) is is_there
    study.record.finish("FINISHED")


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(run_records.time, "monotonic", lambda: now[0])
    return now


def test_of_512_workers_the_one_that_is_silent_is_named_and_the_others_are_a_number(now_s):
    state = RunState()
    for rank in range(512):
        state.heartbeat(rank, 0, WorkerPlace(f"host-{rank // 8}", "node", "", 0))
    state.heartbeat(300, 12)
    now_s[0] += 61
    for rank in range(512):
        if rank != 300:
            state.heartbeat(rank, 12)
    told = [state.hanging(rank, 512, "all_reduce") for rank in range(512) if rank != 300]
    assert told[0] == (
        "worker 300 on host-37 is at step 12, heard 61 s ago; 511 of 512 workers are at step 12"
    )
    assert set(told[1:]) == {""}


def test_a_worker_that_is_behind_or_in_other_calls_or_was_never_there_is_told(now_s):
    state = RunState()
    for rank, step in ((0, 9), (1, 8), (2, 9)):
        state.heartbeat(rank, step, WorkerPlace(f"host-{rank}", "node", "", 0))
    assert state.hanging(0, 4, "all_reduce") == (
        "worker 1 on host-1 is at step 8, heard 0 s ago; worker 3 has never been heard from; "
        "2 of 4 workers are at step 9"
    )
    assert state.hanging(2, 4, "all_reduce") == ""
    assert "worker 1 on host-1 is at step 8" in state.hanging(1, 4, "next_batch")


@pytest.mark.parametrize("kind", [EventKind.RESIZING, EventKind.WORKER_FAILED])
def test_a_group_is_resizing_until_the_next_one_follows(kind):
    """Also if it is asked before its workers have sent a heartbeat."""
    state = RunState()
    state.note({"kind": "resize"})
    for _ in range(2):
        assert state.heartbeat(0, 5).resizes
    state.note({"kind": "event", "event": kind, "text": "", "step": 5, "time_ms": 0})
    assert not state.heartbeat(0, 5).resizes


MEMORY = "system/node-0/system_memory_usage_megabytes"


def test_samples_reach_the_run_through_an_outage_with_steps_that_rise(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = open_client(uri)
    run_id = client.create_run(experiment_id(client, uri, "trials")).info.run_id
    publish, failures = SystemMetricsMonitor.publish_metrics, []

    def failing(self, metrics):
        if len(failures) < 2:
            failures.append(1)
            raise OSError("away")
        publish(self, metrics)

    monkeypatch.setattr(SystemMetricsMonitor, "publish_metrics", failing)
    monkeypatch.setattr(logging.getLogger("mlflow"), "level", logging.INFO)
    metrics = NodeSampler(uri, lambda: run_id, interval_s=0.02)
    metrics.start()
    deadline_s = time.monotonic() + 40
    while len(client.get_metric_history(run_id, MEMORY)) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    history = sorted(client.get_metric_history(run_id, MEMORY), key=lambda one: one.timestamp)
    metrics.stop()
    assert logging.getLogger("mlflow").level == logging.ERROR  # its output is the driver's, too
    assert len(failures) == 2
    assert len(history) >= 3
    assert [p.step for p in history] == sorted({p.step for p in history})
    used = psutil.virtual_memory().used / 1e6
    assert 0.3 * used < history[-1].value < 3 * used  # others use this machine, too


def test_images_that_are_held_out_of_a_data_set_are_counted_apart(config, log_path):
    manifest = SimpleNamespace(path="data/train", fingerprint="f" * 64, num_classes=2, about={})
    streams = {
        use: SimpleNamespace(manifest=manifest, num_images=count)
        for use, count in (("train", 22), ("eval", 2))
    }
    plan: Any = SimpleNamespace(manifest=manifest, streams=streams)
    opening = RunOpening(config, "run", log_path, datasets=data_inputs(plan))
    assert recorded_here(opening).finish("FINISHED") == ""
    assert load_runs(config.uri, "trials")["num_dev"].tolist() == [2]


SECRET = "hunter2"
ADDRESS = f"postgresql://user:{SECRET}@db/mlflow?password={SECRET}"


def _recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run whose recipe, command, data, events, tags and texts all name the address."""
    monkeypatch.setattr(sys, "argv", ["vit-ray", "pretrain", f"tracking.uri={ADDRESS}"])
    recipe = load_recipe("digits", [f"tracking.uri={ADDRESS}", f"init_from=http://{SECRET}@h/x"])
    manifest = SimpleNamespace(
        path=f"http://u:{SECRET}@h/data",
        fingerprint="f" * 64,
        num_images=9,
        num_classes=2,
        about={"source_url": f"http://u:{SECRET}@h/data"},
    )
    streams = {"train": SimpleNamespace(manifest=manifest, num_images=9)}
    plan: Any = SimpleNamespace(manifest=manifest, num_images=9, total_steps=1, streams=streams)
    tags = run_facts(recipe, "pretrain", plan, ClusterShape(1, 2, 0, 0.0), command_line())
    config = TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", system_metrics=False)
    log_path = folder / "run" / "metrics.jsonl"
    params = trained_params(recipe) | recipe.flat()
    opening = RunOpening(
        config, "run", log_path, None, params, tags, None, datasets=data_inputs(plan)
    )
    record = recorded_here(opening)
    record.text("recipe.yaml", write_yaml(recipe.written()))
    record.tag("note", f"it is at {ADDRESS}")
    record.event("restart", f"cannot reach {ADDRESS}", 1)
    record.request_stop(f"cannot reach {ADDRESS}")
    record.metrics(1, {"train/loss": 1.0})
    assert record.finish("FINISHED") == ""
    return recipe


def test_nothing_that_a_run_writes_holds_a_secret(tmp_path, monkeypatch, capfd, caplog):
    """It is planted wherever a run takes a text, and every byte that it leaves is searched."""
    recipe = _recorded(tmp_path, monkeypatch)
    write_report(f"sqlite:///{tmp_path}/mlflow.db", "vit_ray", tmp_path / "report.html")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"mlflow.db", "metrics.jsonl", "recipe.yaml", "report.html"} <= {p.name for p in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert any(b"postgresql://db/mlflow" in path.read_bytes() for path in files)
    job: Any = SimpleNamespace(recipe=recipe, data_fingerprint="f", data_terms={}, init_run_id=None)
    engine: Any = SimpleNamespace(state=SimpleNamespace(applied_steps=0, shapes={}))
    assert SECRET not in str(asdict(make_position(job, engine, Progress())))
    shown = capfd.readouterr()
    assert SECRET not in shown.out + shown.err + caplog.text
