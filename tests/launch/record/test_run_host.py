"""The host of runs: what it records, and what its death costs."""

import gzip
import os
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import ray
from mlflow import MlflowClient

from tests.launch.record.hosts import Here, hosted_here, recorded_here
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.launch.record import run_host
from vit_ray.launch.record.run_host import (
    HostedRun,
    NoRun,
    RunControl,
    RunEndedError,
    RunHost,
    RunRecord,
    host_on,
    start_run,
)
from vit_ray.measure.goodput import TimeClass, Work
from vit_ray.outcomes import EventKind, Failure
from vit_ray.tracking import metrics_log
from vit_ray.tracking.metrics_log import MetricsLog, RunOpening
from vit_ray.tracking.tracker import Tracker
from vit_ray.worker.run_link import Orders, RunLink


def opening_of(folder: Path, parent: RunOpening | None = None, name: str = "run") -> RunOpening:
    config = TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", system_metrics=False)
    return RunOpening(config, name, folder / name / "metrics.jsonl", parent=parent)


def parts(run: HostedRun) -> tuple[RunRecord, RunControl]:
    return RunRecord(run), RunControl(run)


@pytest.fixture
def store(tmp_path: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")


def test_a_log_has_one_writer_and_the_next_waits_until_it_has_ended(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_log, "RELEASE_S", 0.2)
    first, _ = recorded_here(opening_of(tmp_path))
    with pytest.raises(RuntimeError, match=r"run 'run': the recorder of its last driver"):
        recorded_here(opening_of(tmp_path))
    first.finish("FINISHED")
    second, control = recorded_here(opening_of(tmp_path))
    assert control.status().step == 0
    second.finish("FINISHED")


def test_a_run_whose_opener_died_is_continued_by_the_next_in_the_same_host(
    store: MlflowClient, tmp_path: Path
) -> None:
    host, first = RunHost(), opening_of(tmp_path)
    host.open(first)
    run_id = host.ask(first.key, "tracker.run_id")
    values = {"values": {"train/loss": 1.0}}
    host.record(first.key, first.log_path, None, "metrics", {"step": 1, **values})
    second = replace(opening_of(tmp_path), run_id=run_id)  # of a trial that was started again
    host.open(second)
    assert host.ask(first.key, "tracker.run_id") is NoRun.ENDED
    assert host.ask(second.key, "tracker.run_id") == run_id
    host.record(first.key, first.log_path, None, "metrics", {"step": 2, **values})  # it is late
    host.record(second.key, second.log_path, None, "metrics", {"step": 3, **values})
    assert not host.finish(second.key, "FINISHED")
    assert store.get_run(run_id).info.status == "FINISHED"
    assert [one.step for one in store.get_metric_history(run_id, "train/loss")] == [1, 3]


def test_a_file_from_a_worker_is_kept_with_the_run(
    ray_cluster: object, store: MlflowClient, tmp_path: Path
) -> None:
    record, _ = parts(start_run(opening_of(tmp_path)))
    link = RunLink(record, RunControl(record._run), 0)
    link.keep_file("trace.json.gz", gzip.compress(b"a trace"))
    assert record.flush(60)
    run_id = record.run_id()
    assert not record.finish("FINISHED")
    path = store.download_artifacts(run_id, "profile/trace.json.gz", str(tmp_path))
    assert gzip.decompress(Path(path).read_bytes()) == b"a trace"


class CountedOpening(RunOpening):
    """Counts in this process how often it is sent."""

    sent = 0

    def __reduce__(self) -> tuple[object, ...]:
        CountedOpening.sent += 1
        return RunOpening, tuple(vars(self).values())


def test_a_host_that_dies_comes_back_with_all_that_was_recorded(
    ray_cluster: object, tmp_path: Path, store: MlflowClient
) -> None:
    parent = RunControl(start_run(opening_of(tmp_path, name="parent")))
    parent_opening = parent._run.opening
    CountedOpening.sent = 0
    counted = CountedOpening(*vars(opening_of(tmp_path, parent_opening)).values())
    record, control = parts(start_run(counted))
    record.metrics(1, {"train/loss": 1.0, "eval/top1": 0.5})
    record.event(EventKind.RESUMED, "a worker has died", 1)
    control.request_save()
    control.fail(Failure("the disk is full"))
    assert record.flush(60)
    run_id = record.run_id()
    assert run_id is not None
    sent = []
    for step in range(2, 40):
        record.metrics(step, {"train/loss": float(step)})
        sent.append(CountedOpening.sent)
        if step == 20:
            kill_host()
    assert sent == [1] * 38  # what is recorded needs no opening
    record.metrics(40, {"train/loss": 40.0}, wait_s=60)
    status = control.status()
    assert CountedOpening.sent == 2  # the answer was that the run is unknown
    assert (status.step, status.metrics["eval/top1"]) == (40, 0.5)
    assert [event.text for event in status.events] == ["a worker has died"]
    assert control.heartbeat(1, 40) == Orders(None, 1)
    assert control.failure() == Failure("the disk is full")
    parent.request_stop("SIGTERM")
    wait_until_stopped(control, 1)
    assert record.run_id() == run_id
    assert not record.finish("FINISHED")
    assert CountedOpening.sent == 2
    points = store.get_metric_history(run_id, "train/loss")
    assert sorted((p.step, p.value) for p in points) == [
        (step, float(step)) for step in range(1, 41)
    ]
    assert store.get_run(run_id).info.status == "FINISHED"
    with pytest.raises(RunEndedError, match="run 'run' has ended"):
        record.run_id()
    RunRecord(parent._run).finish("KILLED")


def kill_host() -> None:
    """End the host's process: `ray.kill` returns before the process has ended."""
    host = host_on(ray.get_runtime_context().get_node_id())
    pid = ray.get(host.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_what_is_recorded_while_the_host_does_not_know_the_run_is_neither_lost_nor_doubled(
    store: MlflowClient, tmp_path: Path
) -> None:
    here = Here()
    record, control = recorded_here(opening_of(tmp_path), here)
    record.metrics(1, {"train/loss": 1.0, "startup/first_step_s": 7.0})
    run_id = record.run_id()
    here.die()
    record.metrics(2, {"train/loss": 2.0})
    record.event(EventKind.RESUMED, "a worker has died", 2)
    control.request_stop("SIGTERM")
    assert here.count("open") == 1
    assert control.heartbeat(1, 2) is None  # rank 0 sends the opening
    assert here.count("open") == 1
    assert control.heartbeat(0, 2) == Orders("SIGTERM", 0)
    assert here.count("open") == 2
    record.metrics(3, {"train/loss": 3.0, "startup/first_step_s": 9.0})
    assert control.status().metrics == {"train/loss": 3.0, "startup/first_step_s": 7.0}
    assert [event.kind for event in control.status().events] == ["resumed"]
    assert not record.finish("KILLED")
    assert here.count("open") == 2
    for key, expected in (
        ("train/loss", [(1, 1.0), (2, 2.0), (3, 3.0)]),
        ("startup/first_step_s", [(1, 7.0)]),
    ):
        points = store.get_metric_history(run_id, key)
        assert sorted((p.step, p.value) for p in points) == expected
    assert store.get_run(run_id).data.tags["mlflow.vit_ray.events.resumed"] == "1"


def test_a_heartbeat_carries_at_most_100_bytes(store: MlflowClient, tmp_path: Path) -> None:
    here = Here()
    _, control = recorded_here(opening_of(tmp_path / ("long" * 40)), here)
    control.heartbeat(1023, 1_000_000)
    name, sizes = here.calls[-1]
    assert name == "ask"
    assert sum(sizes) <= 100
    assert len(pickle.dumps(control.heartbeat(1023, 1_000_000))) <= 100


def test_an_end_that_was_noted_before_the_host_died_reaches_mlflow(
    store: MlflowClient, tmp_path: Path
) -> None:
    here = Here()
    opening = opening_of(tmp_path)
    record, _ = recorded_here(opening, here)
    assert record.flush(60)
    run_id = record.run_id()
    here.host._runs[opening.key].tracker._points.end(5)
    here.host._runs[opening.key].log.append("finish", status="FINISHED")
    here.die()
    assert store.get_run(run_id).info.status == "RUNNING"
    assert not record.finish("FINISHED")
    assert store.get_run(run_id).info.status == "FINISHED"


def test_why_a_run_failed_and_how_it_ended_outlive_the_host(
    store: MlflowClient, tmp_path: Path
) -> None:
    here = Here()
    record, control = recorded_here(opening_of(tmp_path), here)
    control.fail(Failure("reason", has_diverged=True))
    record.event(EventKind.STOPPED, "text", 3)
    control._run.send("event", 60.0, event="of another version", text="text", step=4)
    here.die()
    assert control.failure() == Failure("reason", has_diverged=True)
    kinds = [event.kind for event in control.status().events]
    assert kinds == [EventKind.STOPPED, EventKind.UNKNOWN]
    record.finish("FAILED")


def test_a_stop_of_a_sweep_reaches_its_runs_whenever_they_start(
    store: MlflowClient, tmp_path: Path
) -> None:
    here = Here()
    parent = RunControl(hosted_here(opening_of(tmp_path, name="parent"), here))
    nested = hosted_here(opening_of(tmp_path, parent._run.opening, "nested"), here)
    early = RunControl(hosted_here(opening_of(tmp_path, nested.opening, "early"), here))
    assert early.heartbeat(0, 1) == Orders(None, 0)
    assert RunControl(nested).status().step == 1
    parent.request_stop("SIGTERM")
    here.die()
    late = RunControl(hosted_here(opening_of(tmp_path, nested.opening, "late"), here))
    assert early.heartbeat(0, 1) == Orders("SIGTERM", 0)
    assert late.heartbeat(0, 1) == Orders("SIGTERM", 0)
    assert parent.stop_reason() == "SIGTERM"
    for run in (early._run, late._run, nested, parent._run):
        RunRecord(run).finish("KILLED")


def wait_until_stopped(control: RunControl, saves: int = 0) -> None:
    deadline = time.monotonic() + 60
    while control.heartbeat(0, 1) != Orders("SIGTERM", saves):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_stage_of_a_study_outlives_its_host(store: MlflowClient, tmp_path: Path) -> None:
    here = Here()
    record, control = recorded_here(opening_of(tmp_path), here)
    control.begin_stage("cell", 3)
    control.child_step("a", 5)
    here.die()
    control.child_step("b", 7)
    control.child_ended("a", 0.5)
    assert (control.status().step, control.status().stage) == (12, "cell 2 of 3, best 50.00% (a)")
    record.finish("FINISHED")


def test_a_record_that_is_sent_right_after_the_opening_waits_for_it(
    ray_cluster: object, store: MlflowClient, tmp_path: Path
) -> None:
    """Threads of the actor take calls in any order, and opening takes seconds."""
    for turn in range(5):
        record, control = parts(start_run(opening_of(tmp_path, name=f"run-{turn}")))
        record.event(EventKind.WEIGHTS, "text", 0, wait_s=60)
        assert [event.kind for event in control.status().events] == ["weights"]
        record.finish("FINISHED")


def test_the_log_is_read_once_by_a_host_that_was_started_again(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here()
    record, control = recorded_here(opening_of(tmp_path), here)
    here.die()
    reads, opened = [], MetricsLog.opened
    monkeypatch.setattr(MetricsLog, "opened", lambda log, *of: reads.append(of) or opened(log, *of))
    for step in range(1, 10):
        record.metrics(step, {"train/loss": 1.0})
    assert len(reads) == 1
    assert control.status().step == 9
    record.finish("FINISHED")


@pytest.mark.parametrize("has_failed", [True, False])
def test_nothing_is_written_for_a_run_that_was_never_opened(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_failed: bool
) -> None:
    monkeypatch.setattr(metrics_log, "RELEASE_S", 0.0)
    first, _ = recorded_here(opening_of(tmp_path))
    host, opening = RunHost(), opening_of(tmp_path)
    if has_failed:
        with pytest.raises(RuntimeError, match="still writes"):
            host.open(opening)
    size = opening.log_path.stat().st_size
    with pytest.raises(RuntimeError, match="nothing can be recorded in"):
        host.record(opening.key, opening.log_path, None, "tag", {"key": "a", "value": "b"})
    assert opening.log_path.stat().st_size == size
    first.finish("FINISHED")


def test_a_run_whose_mlflow_run_was_deleted_keeps_its_log_when_the_host_dies(
    store: MlflowClient, tmp_path: Path
) -> None:
    here, opening = Here(), replace(opening_of(tmp_path), run_id="0" * 32)
    record, control = recorded_here(opening, here)
    record.metrics(1, {"train/loss": 1.0})
    run_id = record.run_id()
    assert run_id not in (None, opening.run_id)
    here.die()
    assert control.status().step == 1
    assert record.run_id() == run_id
    assert not record.finish("FINISHED")
    assert [p.name for p in opening.log_path.parent.glob("*.jsonl")] == ["metrics.jsonl"]


def test_a_run_that_has_ended_is_not_to_stop_and_has_no_failure(
    store: MlflowClient, tmp_path: Path
) -> None:
    record, control = recorded_here(opening_of(tmp_path))
    control.request_stop("SIGTERM")
    control.fail(Failure("reason"))
    assert not record.finish("FAILED")
    assert control.stop_reason() is None
    assert control.failure() is None


def test_no_system_metrics_are_taken_of_a_run_whose_end_is_in_the_log(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[str | None] = []
    samples = Mock()
    samples.start.side_effect = lambda: sampled.append(given.call_args[0][1]())
    given = Mock(return_value=samples)
    monkeypatch.setattr("vit_ray.tracking.system_metrics.NodeSamples", given)
    here, opening = Here(), opening_of(tmp_path)
    opening = replace(opening, config=opening.config.model_copy(update={"system_metrics": True}))
    record, _ = recorded_here(opening, here)
    run_id = record.run_id()
    assert sampled == [run_id]
    here.host._runs[opening.key].log.append("finish", status="FINISHED")
    here.die()
    assert not record.finish("FINISHED")
    assert sampled == [run_id]


def test_where_the_time_went_outlives_the_host_and_its_drivers(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, now_s = Here(), time.time()
    start_s = now_s - 1000
    clock = SimpleNamespace(time=lambda: now_s, monotonic=time.monotonic)
    monkeypatch.setattr(run_host, "time", clock)
    opening = replace(opening_of(tmp_path), began_s=start_s)
    record, control = recorded_here(opening, here)

    def work(attempt: str, begin_s: float, steps: tuple[int, int], training_s: float) -> None:
        until_s, (first, last) = begin_s + training_s, steps
        spent = {TimeClass.TRAINING: training_s}
        record.work(Work(attempt, begin_s, until_s, spent, 2, first, last, last - first))

    def spent() -> dict[str, float]:
        account = control.account().seconds
        return {key: round(value) for key, value in account.items() if round(value)}

    record.place_wait(start_s + 10, start_s + 15)
    work("a", start_s + 20, (0, 20), 20.0)
    work("a", start_s + 20, (0, 10), 10.0)  # a thread of the host took it late
    assert spent() == {"starting": 15, "place_wait": 5, "training": 20, "ending": 960}
    here.die()
    size = opening.log_path.stat().st_size
    work("a", start_s + 20, (0, 100), 100.0)
    assert opening.log_path.stat().st_size == size  # it comes once a second
    work("b", start_s + 130, (80, 120), 40.0)
    assert spent()["training"] == 120
    assert control.account().core_days == pytest.approx(2 * 140 / 86_400)
    here.die()  # with the driver: nothing is the end of it
    opening.log_path.with_suffix(".lock").touch()
    again = replace(opening_of(tmp_path), began_s=start_s + 500)
    record, control = recorded_here(again)
    work("c", start_s + 520, (120, 130), 10.0)
    assert spent() == {
        "starting": 15 + 10 + 20, "place_wait": 5, "training": 130, "repeated": 20,
        "stopped": 330, "ending": 470,
    }  # fmt: skip
    record.finish("FINISHED")


def test_the_goodput_so_far_is_recorded_from_time_to_time(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_host, "ACCOUNT_EVERY_S", 0.0)
    opening = replace(opening_of(tmp_path), began_s=time.time() - 100)
    record, control = recorded_here(opening)
    begin_s = time.time() - 50
    record.work(Work("a", begin_s, begin_s + 25, {"training": 25.0}))
    assert control.status().metrics["run/goodput"] == pytest.approx(0.25, abs=0.01)
    record.finish("FINISHED")


def test_an_answer_with_all_that_may_come_before_it_has_one_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, limits = [0.0], []

    class Slow(HostedRun):
        def answer(self, call: object, limit_s: float, left_s: float | None = None) -> object:
            limits.append(limit_s if left_s is None else left_s)
            now_s[0] += 5.0
            return NoRun.UNKNOWN

    monkeypatch.setattr(run_host.time, "monotonic", lambda: now_s[0])
    run = Slow(MagicMock(), opening_of(tmp_path))
    run.open()
    assert RunControl(run).heartbeat(0, 1) is None
    assert limits == [30.0, 25.0, 20.0, 15.0, 10.0]


def test_a_trial_has_its_dev_accuracy_under_its_own_name_and_first(
    store: MlflowClient, tmp_path: Path
) -> None:
    data = {"name": "train", "digest": "f" * 32, "source": "/d", "context": "training"}
    opening = RunOpening(
        TrackingConfig(uri=f"sqlite:///{tmp_path}/mlflow.db", system_metrics=False),
        "trial",
        tmp_path / "metrics.jsonl",
        tags={"mlflow.note.content": "text"},
        datasets=[{**data, "profile": {"num_images": 7}}],
        measured_on="dev",
        awaited_metric="dev/top1",
    )
    record, control = recorded_here(opening)
    record.metrics(1, {"a/loss": 1.0})
    record.metrics(2, {"eval/top1": 0.75, "evaluated": 1.0})
    assert control.status().metrics["eval/top1"] == 0.75
    run_id = record.run_id()
    record.finish("FINISHED")
    run = store.get_run(run_id)
    assert next(iter(run.data.metrics.items())) == ("dev/top1", 0.75)
    assert set(run.data.metrics) == {"dev/top1", "a/loss", "evaluated"}
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.profile) == ("train", '{"num_images": 7}')


def test_a_restarted_job_records_its_own_start_and_its_attempts_do_not(
    store: MlflowClient, tmp_path: Path
) -> None:
    for step in (1, 5):
        record, _ = recorded_here(opening_of(tmp_path))
        record.metrics(step, {"startup/first_step_s": float(step)})
        record.metrics(step + 1, {"startup/first_step_s": 100.0})
        run_id = record.run_id()
        assert not record.finish("FINISHED")
    points = store.get_metric_history(run_id, "startup/first_step_s")
    assert sorted((p.step, p.value) for p in points) == [(1, 1.0), (5, 5.0)]


def test_what_is_recorded_after_the_end_changes_nothing(
    store: MlflowClient, tmp_path: Path
) -> None:
    opening = opening_of(tmp_path)
    record, control = recorded_here(opening)
    run_id = record.run_id()
    assert not record.finish("FINISHED")
    size = opening.log_path.stat().st_size
    record.metrics(9, {"train/loss": 1.0})
    assert control.heartbeat(1, 9) is None
    assert opening.log_path.stat().st_size == size
    assert store.get_run(run_id).info.status == "FINISHED"
    assert not record.finish("FINISHED")
    Tracker.start(opening_of(tmp_path)).close()
