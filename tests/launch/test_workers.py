"""Why worker groups fail, what the driver decides then, and how runs end: without Ray."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import ray
import torch
from ray.train import ControllerError, PreemptionError, WorkerGroupError
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2.api.preemption import PreemptionInfo

from tests.checkpoints.written import snapshot_of, write_snapshots
from tests.experiments.studies import study_recipe, study_row, trained
from tests.experiments.trials_here import following_of, in_process, parent_of
from tests.worker.fakes import TOTAL, FakeEngine, FakeRun, Worker, make_job
from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name
from vit_ray.experiments.trials import train_child
from vit_ray.launch import run
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.failures import FailingNodes, cause, failing_node
from vit_ray.launch.placement import Place
from vit_ray.launch.workers import RETURN_S, SILENT_S, Ended, GroupWatch, Run, lost_place
from vit_ray.outcomes import EventKind, RunFailedError, RunStoppedError, WorkerPlace
from vit_ray.storage import locate
from vit_ray.tracking.recorder import Event, Recorder, RunStatus
from vit_ray.tracking.run_records import RunState
from vit_ray.worker.entry import GroupConfig
from vit_ray.worker.job import SmallerMicroBatchError, TrainJob

BY_PEER, BAD_CARD = RuntimeError("Connection closed by peer"), RuntimeError("bad card")
# As Ray 2.60's raylet writes it.
MEMORY = """Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.7, ID: 3f2a) was 60.80GB used / 64.00GB limit (0.950000)
Object store memory usage: [(- objects spillable: 0)]
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io."""
DIED = ray.exceptions.RayActorError(
    error_msg="Worker exits with a connection error code 2. End of file."
)
PLACES = {
    rank: WorkerPlace(f"10.0.0.{node}", node, f"GPU 3, pid 4{rank}, log /l/w.err", 57)
    for rank, node in enumerate("12")
}


def failed(*errors: Exception) -> WorkerGroupError:
    return WorkerGroupError("workers failed", dict(enumerate(errors)))


def hidden(error: Exception) -> Exception:
    return WorkerHealthCheckFailedError("A worker health check failed.", error)


@pytest.mark.parametrize(("errors", "node"), [
    ((BY_PEER, BAD_CARD), "2"),
    ((BAD_CARD, BY_PEER), "1"),
    ((BY_PEER, DIED), "2"),
    ((BY_PEER, hidden(DIED)), "2"),
    ((BY_PEER, BY_PEER), None),  # nobody knows whose fault it is
    ((BAD_CARD, BAD_CARD), None),
    ((BY_PEER, SmallerMicroBatchError("8 images", 4)), None),
    ((BY_PEER, RuntimeError(MEMORY)), None),
])  # fmt: skip
def test_the_node_of_a_failure_is_that_of_the_only_worker_that_did_not_lose_another(errors, node):
    found = failing_node(failed(*errors), PLACES)
    assert (found.node if found else None) == node
    assert failing_node(ControllerError(RuntimeError("x")), PLACES) is None


def test_a_host_without_memory_is_named_with_its_figures_in_place_of_the_lost_connections():
    text = cause(failed(BY_PEER, hidden(ray.exceptions.OutOfMemoryError(MEMORY))), {})
    assert text.startswith("worker 1: host 10.0.0.7 ran out of memory (60.80GB used / 64.00GB")
    assert text.endswith("worker 0: Connection closed by peer")


def node(name: str, host: str) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": host}


NODES = (node("1", "10.0.0.1"), node("2", "10.0.0.2"))


def test_failures_on_nodes_in_turn_are_no_defect_of_a_node():
    nodes = FailingNodes(None)
    for place in (PLACES[0], PLACES[1], PLACES[0], None, PLACES[0]):
        nodes.note(place)
    assert nodes.among(NODES) == {}
    nodes.note(PLACES[0])
    assert nodes.among(NODES) == {"1": "10.0.0.1"}


def test_the_next_driver_knows_a_failing_node_also_by_its_host(tmp_path):
    """Ray's id of a node is another one after its raylet has started again."""
    folder = locate(str(tmp_path))
    first = FailingNodes(folder)
    first.note(PLACES[0])
    first.note(PLACES[0])
    second = FailingNodes(folder)
    assert second.among(NODES) == {"1": "10.0.0.1"}
    assert second.among((node("9", "10.0.0.1"), NODES[1])) == {"9": "10.0.0.1"}
    both = (node("8", "10.0.0.1"), node("9", "10.0.0.1"))
    assert second.among(both) == {}  # which of them is not known


def run_of(job: TrainJob) -> Run:
    return Run(job, MagicMock(), ClusterShape(1, 4, 2, 0.0), FailingNodes(None), use_gpu=False)


PLACE = Place(2, {})
End = Exception | Ended | Callable[[], Exception]


class Attempts(Run):
    """A run whose groups each end with an error or in order."""

    def __init__(
        self, folder: Path, *ends: End, failure: RunFailedError | None = None,
        is_private: bool = False, **workers: Any,
    ) -> None:  # fmt: skip
        self.run = FakeRun()
        self.run.failed = failure
        where = {"output": str(folder.parent), "name": folder.name}
        job = replace(make_job(folder, workers=workers, **where), record=self.run)
        cluster = ClusterShape(1, 4, 2, 0.0, is_private=is_private)
        failing = FailingNodes(None)
        super().__init__(job, MagicMock(), cluster, failing, use_gpu=False)
        self.finder: Any = self
        self._ends: Iterator[End] = iter(ends)
        self.num_attempts = 0
        self.lost_since_s: list[float | None] = []

    def wait_for_place(self, lost_since_s: float | None = None) -> Place:
        self.lost_since_s.append(lost_since_s)
        return PLACE

    def train(self) -> None:
        """The driver's decisions until the run ends; all ends must be met."""
        super().train()
        assert next(self._ends, None) is None

    def attempt(self, place: Place) -> Ended:
        assert place is PLACE
        self.num_attempts += 1
        end = next(self._ends)
        if callable(end):
            end = end()
        return end if isinstance(end, Ended) else Ended(end)


def checkpoint(folder: Path, step: int) -> None:
    where = Position(Progress(step), step, step, 1, {"w": [2]}, {}, "print")
    taken = snapshot_of(0, 1, {"weight|w|0": torch.ones(2)}, where)
    write_snapshots(locate(str(folder)).child(folder_name(step)), taken)


def saved(folder: Path, step: int, error: Exception) -> Callable[[], Exception]:
    def end() -> Exception:
        checkpoint(folder, step)
        return error

    return end


def test_failures_end_a_run_only_where_no_checkpoint_lies_between_them(tmp_path):
    crash = failed(BY_PEER, BAD_CARD)
    weeks = [saved(tmp_path, step, crash) for step in (10, 20, 30)]
    attempts = Attempts(tmp_path, crash, *weeks, crash, max_failures=1)
    attempts.run.at = {1: WorkerPlace("10.0.0.1", "1", "pid 7", 5)}
    with pytest.raises(RunFailedError) as raised:
        attempts.train()
    assert attempts._failing.among(NODES) == {"1": "10.0.0.1"}
    assert str(raised.value) == (
        "worker 1 on 10.0.0.1 (pid 7, step 5): bad card; worker 0: Connection closed by peer "
        "(failure 2 without a new checkpoint between; workers.max_failures=1)"
    )
    assert attempts.num_attempts == 5
    kinds = [kind for kind, *_ in attempts.run.events]
    assert kinds.count(EventKind.WORKER_FAILED) == 5
    assert kinds.count(EventKind.NODE_LEFT_OUT) == 1  # after the second failure, and not again
    assert kinds[2] == EventKind.NODE_LEFT_OUT


def test_on_a_single_node_none_is_left_out(tmp_path):
    attempts = Attempts(tmp_path, *[failed(BY_PEER, BAD_CARD)] * 2, Ended(), is_private=True)
    attempts.run.at = {1: WorkerPlace("10.0.0.1", "1", "pid 7", 5)}
    attempts.train()
    assert [kind for kind, *_ in attempts.run.events] == [EventKind.WORKER_FAILED] * 2


@pytest.mark.parametrize(("error", "is_counted"), [
    (failed(SmallerMicroBatchError("8 images", 4), RuntimeError("Connection reset")), False),
    (failed(ray.exceptions.RayActorError(preempted=True), BY_PEER), False),
    (PreemptionError(PreemptionInfo(None, {})), False),
    (failed(OSError("x")), True),
    (ControllerError(RuntimeError("a worker died")), True),
    (ray.exceptions.RayActorError(), True),  # the controller itself
    (TimeoutError("1 of 2 workers started"), True),
])  # fmt: skip
def test_nodes_that_are_taken_back_and_passes_that_do_not_fit_are_not_counted(
    error, is_counted, tmp_path
):
    if is_counted:
        with pytest.raises(RunFailedError, match="failure 2 without a new checkpoint"):
            Attempts(tmp_path, error, error, max_failures=1).train()
        return
    attempts = Attempts(tmp_path, *[pickle.loads(pickle.dumps(error))] * 9, Ended(), max_failures=0)
    attempts.train()
    assert len(attempts.run.events) == 9


@pytest.mark.parametrize(("error", "failure", "told"), [
    (RunStoppedError("SIGTERM"), None, None),
    (RunStoppedError("SIGTERM"), RunFailedError("disk full"), "disk full"),  # it is not hidden
    (RunFailedError("no GPU"), None, "no GPU"),
])  # fmt: skip
def test_a_stop_before_there_are_workers_is_no_failure(error, failure, told, tmp_path, monkeypatch):
    attempts = Attempts(tmp_path, failure=failure)
    monkeypatch.setattr(attempts, "wait_for_place", MagicMock(side_effect=error))
    with pytest.raises(RunFailedError, match=told) if told else nullcontext():
        attempts.train()
    text = "SIGTERM; no workers were running, so no checkpoint was written"
    assert attempts.run.events == ([] if told else [("stopped", text, 0)])


@pytest.mark.parametrize("error", [None, failed(BY_PEER)])
def test_what_a_worker_says_would_happen_again_ends_the_run_with_its_line(error, tmp_path):
    failure = RunFailedError("the data are bad")
    attempts = Attempts(tmp_path, Ended(error), failure=failure, max_failures=-1)
    with pytest.raises(RunFailedError, match=r"^the data are bad$"):
        attempts.train()
    assert attempts.run.events == []


@pytest.mark.parametrize("end", [Ended(goes_on=True), failed(BY_PEER)])
def test_a_stop_between_two_groups_starts_no_other(end, tmp_path):
    checkpoint(tmp_path, 10)
    attempts = Attempts(tmp_path, end, max_failures=-1)
    attempts.run.stop = "SIGTERM"  # it came while the group ran
    attempts.train()
    text = "SIGTERM; no workers were running, the newest checkpoint is of step 10"
    assert attempts.run.events[-1] == ("stopped", text, 0)


class Watched:
    """A group of two, whose `fit()` has not returned."""

    def __init__(self, folder: Path, kind: Any = "train") -> None:
        self.now_s, self.run = 0.0, FakeRun()
        self.status = RunStatus()
        self.run.status = lambda: self.status  # type: ignore[attr-defined]
        self.is_heard = False
        self.job = replace(make_job(folder, kind), record=self.run)
        finder: Any = SimpleNamespace(has_larger=lambda _: False)
        self.watch = GroupWatch(self.job, finder, PLACE, clock=lambda: self.now_s)

    def start(self) -> None:
        self.run.at = {r: WorkerPlace("10.0.0.1", "a", "", 0, "00") for r in range(2)}
        self.is_heard = True

    def is_over_within(self, seconds: float) -> bool:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 5.0
            if self.is_heard:
                self.status.heard_s = self.now_s
            if self.watch.is_over():
                return True
        return False


@pytest.mark.parametrize("has_started", [False, True])
def test_workers_that_are_silent_are_not_waited_for_without_end(has_started, tmp_path):
    watched = Watched(tmp_path)
    if has_started:  # their controller is frozen, and one has died
        watched.start()
        assert not watched.is_over_within(10 * SILENT_S)
        watched.run.at = {}
        assert watched.watch.group_id() == "00"  # though a recorder has forgotten it
    watched.is_heard = False
    assert not watched.is_over_within(SILENT_S)
    if has_started:
        assert not watched.is_over_within(30)
        watched.is_heard = True  # as after a recorder that was killed has started again
        assert not watched.is_over_within(10 * RETURN_S)
        watched.is_heard = False
        assert not watched.is_over_within(SILENT_S)
    assert watched.is_over_within(RETURN_S + 60)
    assert "no worker has been heard from for 670 s" in str(watched.watch.error)


LOST = ControllerError(WorkerGroupStartupTimeoutError(num_workers=2))


def test_a_group_that_loses_its_place_is_no_failure_and_its_wait_goes_on(tmp_path):
    assert lost_place(LOST)  # where Ray says for how many workers
    for error in (WorkerGroupStartupFailedError("rendezvous"), RuntimeError("a worker died")):
        assert not lost_place(ControllerError(error))
    assert not lost_place(failed(BY_PEER))
    ends = (LOST, LOST, Ended(goes_on=True), failed(BY_PEER), Ended())
    attempts = Attempts(tmp_path, *ends, max_failures=1)
    attempts.train()
    assert attempts.lost_since_s == [None, PLACE.since_s, PLACE.since_s, None, None]
    assert [kind for kind, *_ in attempts.run.events] == [EventKind.WORKER_FAILED]


@pytest.mark.parametrize("how", ["finished", "stopped", "failed", "measured"])
def test_a_controller_that_is_frozen_does_not_keep_the_driver_after_the_runs_end(how, tmp_path):
    watched = Watched(tmp_path, "evaluate" if how == "measured" else "train")
    watched.start()
    if how == "finished":
        watched.status.step = TOTAL
    assert not watched.is_over_within(10 * RETURN_S)  # also before its last checkpoint
    match how:
        case "finished":
            checkpoint(Path(watched.job.recipe.run_folder), TOTAL)
        case "stopped":
            watched.status.events.append(Event(EventKind.STOPPED, "SIGTERM"))
        case "failed":
            watched.status.failure = RunFailedError("the data are bad")
        case "measured":
            watched.status.metrics["eval/top1"] = 0.5
    assert not watched.is_over_within(RETURN_S)
    assert watched.is_over_within(2 * RETURN_S)
    assert watched.watch.error is None


def test_ray_train_tries_once_on_the_nodes_that_were_found(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "put", lambda value: value)
    job = make_job(tmp_path, train={"step_timeout_s": 7.5})
    trainer = run_of(job)._trainer(Place(4, {"pool": "a"}))
    failures, scaling = trainer.run_config.failure_config, trainer.scaling_config
    assert failures.max_failures == failures.max_preemption_failures == 0
    assert failures.controller_failure_limit == 0
    assert (scaling.num_workers, scaling.label_selector) == (4, {"pool": "a"})
    assert trainer.backend_config.timeout_s == 120


@pytest.mark.parametrize("error", [DIED, RuntimeError("Timed out after 121 seconds")])
def test_a_worker_that_dies_before_the_group_has_met_is_named(error, monkeypatch):
    """Whichever error the others have, and the place of the group is given up."""

    def get(answer: Any, **_: Any) -> None:
        assert answer != 2, "it waits for the others"
        if answer == 1:
            raise DIED

    group = MagicMock(**{"execute_async.return_value": [0, 1, 2], "execute.side_effect": error})
    monkeypatch.setattr(ray, "wait", lambda answers, **_: ([0, 1], [2]))
    monkeypatch.setattr(ray, "get", get)
    config = GroupConfig(backend="gloo", timeout_s=120)
    with pytest.raises(WorkerGroupError) as raised:
        config.backend_cls().on_start(group, config)
    group.get_worker_group_state().placement_group_handle.shutdown.assert_called_once()
    assert raised.value.worker_failures == {1: DIED}
    for arrived in (raised.value, ControllerError(pickle.loads(pickle.dumps(raised.value)))):
        assert cause(arrived, PLACES).startswith("worker 1 on 10.0.0.2 (GPU 3, pid 41, ")
        assert failing_node(arrived, PLACES) == PLACES[1]


def test_a_store_that_does_not_answer_is_named_without_its_secret(tmp_path, monkeypatch, capsys):
    job = make_job(tmp_path, tracking={"uri": "http://user:secret@mlflow:5000"})
    groups = run_of(job)
    monkeypatch.setattr(groups, "_trainer", lambda place: SimpleNamespace(fit=lambda: None))
    monkeypatch.setattr(groups._job.record, "run_id", lambda wait_s: None, raising=False)
    groups.attempt(PLACE)
    (line,) = capsys.readouterr().err.splitlines()
    assert "mlflow:5000 has not answered yet; " in line
    assert "secret" not in line


@pytest.mark.parametrize(("error", "told"), [
    (None, "is not finite"),  # the step is refused
    (RunFailedError("bad data"), "bad data"),
])  # fmt: skip
def test_what_a_worker_refuses_ends_the_run_and_its_trial(error, told, tmp_path, monkeypatch):
    """The worker's error goes through the record to the driver, whose error the trial gets."""

    def refuse(step: int) -> None:
        if error:
            raise error

    worker = Worker(make_job(tmp_path), FakeEngine((1,), refuse))
    with pytest.raises(RunFailedError) if error else nullcontext():
        worker.run()
    reported = Mock()
    Recorder.fail(reported, worker.actor.failed)
    state = RunState()
    state.note({"kind": "fail", **reported.append.call_args.kwargs})
    with pytest.raises(RunFailedError) as caught:
        Attempts(Path(worker.job.recipe.output), Ended(), failure=state.status().failure).train()
    assert type(caught.value) is RunFailedError
    in_process(monkeypatch, MagicMock(side_effect=caught.value))
    parent, _ = parent_of()
    recipe = study_recipe("/x", [study_row("any")])
    assert told in train_child(following_of(parent), recipe, "sweep_trial", {}).error


def result_of(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Any:
    events = [Event(kind, text) for kind, text, _ in worker.actor.events]
    record = SimpleNamespace(status=lambda **_: RunStatus(events=events))
    record.results = lambda *_: None
    resolved: Any = SimpleNamespace(
        recipe=worker.job.recipe, total_steps=worker.job.total_steps, num_eval_images=0
    )
    prepared = run.PreparedRun("pretrain" if worker.job.kind == "train" else "evaluate", resolved)
    monkeypatch.setattr(run, "training_cost", lambda *_: {})
    return run._result(prepared, SimpleNamespace(record=record))  # type: ignore[arg-type]


def test_a_training_that_was_stopped_has_not_failed_and_an_evaluation_has_no_result(
    tmp_path, monkeypatch
):
    worker = Worker(make_job(tmp_path))

    def stop(step: int) -> None:
        worker.actor.stop = "request"
        worker.link.beat(step)

    worker.engine.on_backward = stop
    worker.run()
    assert worker.kinds() == [EventKind.FIRST_STEP, EventKind.STOPPED]
    assert not result_of(worker, monkeypatch).is_complete
    worker.actor.events.pop()
    with pytest.raises(RunFailedError):
        result_of(worker, monkeypatch)
    worker = Worker(make_job(tmp_path, kind="evaluate"))
    worker.actor.events.append((EventKind.STOPPED, "request", 0))
    with pytest.raises(RunStoppedError):
        result_of(worker, monkeypatch)


def test_a_stop_ends_a_trial_between_its_trainings(monkeypatch):
    recipe = study_recipe("/x", [study_row("any")])
    in_process(monkeypatch, lambda recipe, **_: trained(is_complete=False))
    parent, calls = parent_of()
    with pytest.raises(RunStoppedError):
        train_child(following_of(parent), recipe, "study_cell", {})
    calls.stop_reason.return_value = "SIGTERM"
    in_process(monkeypatch, lambda recipe, **_: pytest.fail("it was started"))
    with pytest.raises(RunStoppedError):
        train_child(following_of(parent), recipe, "study_cell", {})
