"""The actor that records a run."""

import gzip
import inspect
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from mlflow import MlflowClient

from vit_ray.config.training_sections import TrackingConfig
from vit_ray.outcomes import EventKind, Failure
from vit_ray.tracking import run_actor
from vit_ray.tracking.run_actor import Recorder
from vit_ray.tracking.run_status import RunOpening
from vit_ray.tracking.start_recorder import host_on, start_recorder
from vit_ray.train.run_link import RunActor


def started(folder: Path, parent: Any = None, name: str = "run") -> Any:
    config = TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", system_metrics=False)
    log_path = folder / name / "metrics.jsonl"
    return start_recorder(RunOpening(config, name, log_path, None, {}, {}, None, parent))


def test_a_log_has_one_writer_and_the_next_waits_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_actor, "RELEASE_S", 0.2)
    config = TrackingConfig(uri=f"sqlite:///{tmp_path}/mlflow.db", system_metrics=False)
    opening = RunOpening(config, "run", tmp_path / "metrics.jsonl", None, {}, {}, None)
    first = Recorder(opening)
    with pytest.raises(RuntimeError, match=r"run 'run': the recorder of its last driver"):
        Recorder(opening)
    first.finish("FINISHED")
    second = Recorder(opening)
    assert second.status().step == 0
    second.finish("FINISHED")


def test_a_file_from_a_worker_is_kept_with_the_run(ray_cluster: object, tmp_path: Path) -> None:
    recorder = started(tmp_path)
    content = gzip.compress(b"a trace")
    ray.get(recorder.content.remote("trace.json.gz", content, "profile"))
    assert ray.get(recorder.finish.remote("FINISHED"))
    run_id = ray.get(recorder.run_id.remote())
    recorder.release()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    path = client.download_artifacts(run_id, "profile/trace.json.gz", str(tmp_path))
    assert Path(path).read_bytes() == content


def test_a_host_that_dies_comes_back_with_all_that_was_recorded(
    ray_cluster: object, tmp_path: Path, empty_store: Path
) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    parent = started(tmp_path, name="parent")
    recorder = started(tmp_path, parent)
    recorder.metrics.remote(1, {"train/loss": 1.0, "eval/top1": 0.5})
    recorder.event.remote(EventKind.RESUMED, "a worker has died", 1)
    ray.get(recorder.request_save.remote())
    ray.get(recorder.fail.remote(Failure("the disk is full")))
    calls = []
    for step in range(2, 40):
        calls.append(recorder.metrics.remote(step, {"train/loss": float(step)}))
        if step == 20:
            ray.kill(host_on(ray.get_runtime_context().get_node_id()), no_restart=False)
    ray.get(calls)  # some were under way when the host died, and are made again
    status = ray.get(recorder.status.remote())
    assert (status.step, status.metrics["eval/top1"]) == (39, 0.5)
    assert [event.text for event in status.events] == ["a worker has died"]
    assert ray.get(recorder.poll.remote(1, 39)) == (None, 1)
    assert ray.get(recorder.failure.remote()) == Failure("the disk is full")
    ray.get(parent.request_stop.remote("SIGTERM"))
    _wait_until_told(recorder, 1)
    assert ray.get(recorder.finish.remote("FINISHED"))
    run_id = ray.get(recorder.run_id.remote())
    recorder.release()
    parent.release()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    points = client.get_metric_history(run_id, "train/loss")
    assert sorted((p.step, p.value) for p in points) == [
        (step, float(step)) for step in range(1, 40)
    ]
    assert client.get_run(run_id).info.status == "FINISHED"
    assert ray.get(recorder.run_id.remote()) is None


def test_an_end_that_was_noted_before_the_host_died_reaches_mlflow_and_its_reason_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrackingConfig(uri=f"sqlite:///{tmp_path}/mlflow.db", system_metrics=False)
    opening = RunOpening(config, "run", tmp_path / "metrics.jsonl", None, {}, {}, None)
    first = Recorder(opening)
    assert first._tracker.flush(60)
    run_id = first.run_id()
    first.fail(Failure("reason", has_diverged=True))
    first.event(EventKind.STOPPED, "text", 3)
    foreign = {"kind": "of another version", "text": "text", "step": 4, "time_s": 0.0}
    first._tracker.note("event", event=foreign)
    first._tracker._points.end(5)
    first._tracker.record_end("FINISHED")
    first._writer_lock.close()
    client = MlflowClient(config.uri)
    assert client.get_run(run_id).info.status == "RUNNING"
    second = Recorder(opening)
    assert second.was_finished
    assert second.failure() == Failure("reason", has_diverged=True)
    kinds = [event.kind for event in second.status().events]
    assert kinds == [EventKind.STOPPED, EventKind.UNKNOWN]
    assert second.close()
    assert client.get_run(run_id).info.status == "FINISHED"


def test_a_stop_of_a_sweep_reaches_its_runs_whenever_they_start(
    ray_cluster: object, tmp_path: Path
) -> None:
    parent = started(tmp_path)
    early = started(tmp_path / "early", parent)
    ray.get([early.run_id.remote(), parent.run_id.remote()])
    ray.get(parent.request_stop.remote("SIGTERM"))
    late = started(tmp_path / "late", parent)
    for child in (early, late):
        _wait_until_told(child)
        child.release()
    parent.release()


def _wait_until_told(child: Any, saves_wanted: int = 0) -> None:
    deadline = time.monotonic() + 60
    while ray.get(child.poll.remote(0, 1)) != ("SIGTERM", saves_wanted):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("name", [n for n in vars(RunActor) if not n.startswith("_")])
def test_the_recorder_has_every_method_that_workers_call(name: str) -> None:
    promised = inspect.signature(getattr(RunActor, name))
    found = inspect.signature(getattr(Recorder, name))
    assert found.return_annotation == promised.return_annotation
    own = list(found.parameters.values())
    assert own[: len(promised.parameters)] == list(promised.parameters.values())
    assert all(extra.default is not extra.empty for extra in own[len(promised.parameters) :])


def test_a_trial_has_its_dev_accuracy_under_its_own_name_and_first(
    tmp_path: Path, empty_store: Path
) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    config = TrackingConfig(uri=f"sqlite:///{tmp_path}/mlflow.db", system_metrics=False)
    data = {"name": "train", "digest": "f" * 32, "source": "/d", "context": "training"}
    opening = RunOpening(
        config,
        "trial",
        tmp_path / "metrics.jsonl",
        None,
        {},
        {"mlflow.note.content": "told"},
        None,
        datasets=[{**data, "profile": {"num_images": 7}}],
        measured_on="dev",
        awaited_metric="dev/top1",
    )
    recorder = Recorder(opening)
    recorder.metrics(1, {"a/loss": 1.0})
    recorder.metrics(2, {"eval/top1": 0.75, "evaluated": 1.0})
    assert recorder.status().metrics["eval/top1"] == 0.75
    recorder.finish("FINISHED")
    client = MlflowClient(config.uri)
    run = client.get_run(recorder.run_id())
    assert next(iter(run.data.metrics.items())) == ("dev/top1", 0.75)
    assert set(run.data.metrics) == {"dev/top1", "a/loss", "evaluated"}
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.profile) == ("train", '{"num_images": 7}')
    assert Recorder(opening).status().metrics["eval/top1"] == 0.75
