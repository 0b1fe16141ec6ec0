"""How runs end, from the worker to the sweep, by values alone: no text is looked at.

`tests/test_reworded.py` runs these with every message of the package in other words.
"""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.train import WorkerGroupError

from tests.experiments.studies import study_recipe, study_row, trained
from tests.experiments.trials_here import context_of, in_process, parent_of
from tests.launch.attempts import Attempts
from tests.worker.fakes import FakeEngine, Worker, make_job
from vit_ray.experiments.trials import Outcome
from vit_ray.launch import run
from vit_ray.launch.terminal import RunStoppedError
from vit_ray.launch.workers import Ended, RunDivergedError, RunFailedError
from vit_ray.outcomes import EventKind, TrialState
from vit_ray.tracking.run_state import Event, RunStatus
from vit_ray.worker.job import SmallerMicroBatchError, UnrecoverableError


def driver_error(worker: Worker) -> RunFailedError:
    """What the driver raises after the worker's attempt, whose failure went through processes."""
    sent = pickle.loads(pickle.dumps(worker.actor.failed))
    with pytest.raises(RunFailedError) as caught:
        Attempts(Path(worker.job.recipe.output), Ended(), failure=sent).train()
    return caught.value


def outcome_of(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    def train(*_: Any, **__: Any) -> Any:
        raise error

    in_process(monkeypatch, train)
    parent, _ = parent_of()
    return context_of(parent).train(study_recipe("/x", [study_row("any")]), "sweep_trial")


def test_a_trial_that_is_not_finite_has_diverged(tmp_path, monkeypatch):
    worker = Worker(make_job(tmp_path), FakeEngine(refused=(1,)))
    worker.run()
    assert worker.kinds() == [EventKind.FIRST_STEP, EventKind.NOT_FINITE]
    error = driver_error(worker)
    assert type(error) is RunDivergedError
    assert outcome_of(error, monkeypatch).state is TrialState.DIVERGED


@pytest.mark.parametrize("is_agreed", [True, False])
def test_what_a_worker_refuses_ends_the_run(tmp_path, monkeypatch, is_agreed):
    def refuse(step: int) -> None:
        raise UnrecoverableError("bad data", is_agreed=is_agreed)

    worker = Worker(make_job(tmp_path), FakeEngine(on_backward=refuse))
    if is_agreed:
        worker.run()
    else:
        with pytest.raises(UnrecoverableError):
            worker.run()
    error = driver_error(worker)
    assert type(error) is RunFailedError
    assert outcome_of(error, monkeypatch).state is TrialState.FAILED


def result_of(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Any:
    events = [Event(kind, text) for kind, text, _ in worker.actor.events]
    record = SimpleNamespace(status=lambda **_: RunStatus(events=events))
    resolved = SimpleNamespace(total_steps=worker.job.total_steps, streams={})
    recipe, trains = worker.job.recipe, worker.job.kind == "train"
    prepared = SimpleNamespace(recipe=recipe, trains=trains, resolved=resolved, num_eval_images=0)
    monkeypatch.setattr(run, "_record_cost", lambda *_: {})
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
        context_of(parent).train(recipe, "study_cell")
    calls.stop = "SIGTERM"
    in_process(monkeypatch, lambda recipe, **_: pytest.fail("it was started"))
    with pytest.raises(RunStoppedError):
        context_of(parent).train(recipe, "study_cell")


def test_a_pass_without_memory_is_tried_with_fewer_images_as_often_as_it_takes(tmp_path):
    def run_out(step: int) -> None:
        raise torch.OutOfMemoryError("no memory")

    worker = Worker(make_job(tmp_path), FakeEngine(on_backward=run_out))
    with pytest.raises(SmallerMicroBatchError) as caught:
        worker.run()
    assert worker.kinds() == [EventKind.OUT_OF_MEMORY]
    smaller = WorkerGroupError("failed", {0: pickle.loads(pickle.dumps(caught.value))})
    other = WorkerGroupError("failed", {0: OSError("x")})
    Attempts(tmp_path, *[smaller] * 9, Ended(), max_failures=1).train()
    with pytest.raises(RunFailedError):
        Attempts(tmp_path, other, other, max_failures=1).train()
