"""How an attempt of a run ends, and what it reports, on a fake run and a fake engine."""

import json
import shutil
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import parts
from tests.training.ranks import run_ranks
from tests.worker.fakes import BATCH, TOTAL, FakeEngine, Worker, batches, make_job
from vit_ray import trust_modules
from vit_ray.checkpoints.checkpoint import Progress, open_checkpoint, samples_digest
from vit_ray.checkpoints.run_checkpoints import list_checkpoints, newest_checkpoint
from vit_ray.outcomes import RunFailedError
from vit_ray.storage import locate
from vit_ray.training.loop import EvaluationCutError
from vit_ray.worker import attempt
from vit_ray.worker.attempt import Attempt


@pytest.mark.parametrize(
    ("failures", "is_compiled", "kinds"),
    [
        ([], 1.0, ["first step"]),
        (["RuntimeError: no C compiler"], 0.0, ["not compiled", "first step"]),
    ],
)
def test_a_model_that_runs_eagerly_does_not_look_compiled(
    failures, is_compiled, kinds, tmp_path, monkeypatch
):
    worker = Worker(make_job(tmp_path))
    monkeypatch.setattr(attempt, "compile_s", lambda: 3.0)
    monkeypatch.setattr(attempt, "COMPILE_FAILURES", failures)
    worker.run()
    assert worker.kinds() == kinds
    logged = {key: value for _, values in worker.actor.logged for key, value in values.items()}
    assert logged["perf/compiled"] == is_compiled


def test_crops_of_the_first_batch_are_kept_once_and_trained_on_all_the_same(tmp_path):
    first, resumed = Worker(make_job(tmp_path / "a")), Worker(make_job(tmp_path / "b"))
    first.run()
    resumed.run(4)
    assert (first.engine.applied_steps, resumed.engine.applied_steps) == (TOTAL, TOTAL - 4)
    assert {"training.jpg", "training.json"} <= {*first.actor.files}
    assert "training.jpg" not in resumed.actor.files
    shown = json.loads(first.actor.files["training.json"])
    found = [(one["sample"], one["classes"]) for one in shown]
    assert found == [(sample, ["class 0"]) for sample in range(8)]


def test_an_evaluation_that_does_not_fit_ends_the_run_and_another_error_is_left_to_the_driver(
    tmp_path,
):
    def too_large(name: str) -> Any:
        raise torch.OutOfMemoryError("no memory")

    def crash(step: int) -> None:
        raise OSError("cable")

    job = make_job(tmp_path, data={"eval": "somewhere"})
    worker = Worker(job, evaluation_batches=too_large)
    with pytest.raises(RunFailedError, match=r"evaluate\.batch_size=256"):
        worker.run()
    assert worker.actor.failed is not None
    worker = Worker(make_job(tmp_path / "other"), FakeEngine(on_backward=crash))
    with pytest.raises(OSError, match="cable"):
        worker.run()
    assert worker.actor.failed is None
    assert worker.engine.is_closed


@pytest.mark.parametrize(
    ("reason", "lands", "event"),
    [
        ("SIGTERM", True, ("stopped", "SIGTERM; checkpoint at step 1", 1)),
        (
            "SIGTERM",
            False,
            ("stopped", "SIGTERM; the checkpoint of step 1 could not be written", 1),
        ),
        (None, True, ("resizing", "the group changes its size; checkpoint at step 1", 1)),
    ],
)
def test_a_request_for_another_size_ends_the_group_and_one_to_stop_the_run(
    reason, lands, event, tmp_path, monkeypatch
):
    worker = Worker(make_job(tmp_path))

    def request(step: int) -> None:
        worker.actor.resizes, worker.actor.stop = True, reason
        worker.link.beat(step)

    worker.engine.on_backward = request
    worker.saver._run_beside = lambda write: threading.Timer(0.3, write).start()  # waited for
    if not lands:
        monkeypatch.setattr(worker.saver.writer, "write", lambda *_: None)
    worker.run()
    assert worker.actor.events[-1] == event
    newest = newest_checkpoint(locate(worker.job.recipe.run_folder))
    assert (newest is not None) is lands
    assert newest is None or newest.position.step == 1
    assert worker.engine.is_closed
    assert worker.actor.failed is None


def test_a_stop_in_the_last_evaluation_is_told_and_the_next_start_makes_up_for_it(tmp_path):
    def cut(*_: Any) -> Any:
        worker.actor.stop = "SIGTERM"
        worker.link.beat(TOTAL)
        raise EvaluationCutError(is_stopping=True)

    worker = Worker(make_job(tmp_path))
    worker.hooks.evaluator.evaluate = cut  # type: ignore[method-assign]
    worker.run()
    assert worker.kinds() == ["first step", "stopped"]
    saved = newest_checkpoint(locate(worker.job.recipe.run_folder))
    assert not saved.position.progress.is_over(TOTAL)
    again = Worker(make_job(tmp_path))
    again.hooks.evaluator.evaluate = lambda *_: {"eval/loss": 0.5}  # type: ignore[method-assign]
    attempt = again.attempt(TOTAL)
    attempt.progress.evaluation_due = True
    attempt.run()
    assert again.kinds() == ["first step"]
    evaluated = newest_checkpoint(locate(worker.job.recipe.run_folder))
    assert evaluated.position.progress.is_over(TOTAL)
    assert evaluated.position.progress.metrics["eval/loss"] == 0.5
    assert evaluated.sha256 == saved.sha256  # it was not written again


def test_a_callback_sees_what_is_logged_on_rank_0_and_changes_nothing(tmp_path):
    """One that fails is told of once, and not called again."""
    trust_modules("tests.parts")
    names = ("fail", "meddle", "note")
    train = {"callbacks": [f"tests.parts.{name}" for name in names]}
    plain, watched = Worker(make_job(tmp_path / "a")), Worker(make_job(tmp_path / "b", train=train))
    parts.LOGGED.clear()
    plain.run()
    assert parts.LOGGED == []
    watched.run()
    of_steps = [logged for logged in watched.actor.logged if "train/loss" in logged[1]]
    assert [step for step, _ in parts.LOGGED] == [step for step, _ in of_steps] == [1, 4, 8, TOTAL]
    assert parts.LOGGED[0][1]["train/loss"] == of_steps[0][1]["train/loss"] != -1.0
    assert [values.get("train/loss") for _, values in plain.actor.logged] == [
        values.get("train/loss") for _, values in watched.actor.logged
    ]
    (event,) = [event for event in watched.actor.events if event[0] == "callback failed"]
    assert event[1] == "tests.parts.fail is not called again: KeyError: 'a name that is not there'"
    parts.LOGGED.clear()
    other = Worker(make_job(tmp_path / "c", train=train), rank=1)
    other.hooks.log(3, {"train/loss": 1.0})
    assert parts.LOGGED == []


def test_a_checkpoint_has_the_digest_of_all_samples_also_of_a_resumed_run(tmp_path):
    job = make_job(tmp_path, checkpoint={"every_steps": 3, "keep_last": 9})
    folder, worker = locate(job.recipe.run_folder), Worker(job)
    worker.run(1)
    for step, one in list_checkpoints(folder):
        if step > 6:
            shutil.rmtree(one.path)
    checkpoint = newest_checkpoint(folder)
    resumed = Worker(job)

    resumed.attempt(6).progress = checkpoint.position.progress
    resumed.hooks.run()
    digests = {}
    for step, one in list_checkpoints(folder):
        saved = open_checkpoint(one)
        progress = saved.position.progress
        digests[progress.digest_from, step] = progress.samples_digest
    assert digests == {  # what `batches` gives: sample and place are the same number
        (1, step): samples_digest(BATCH, np.arange(BATCH, step * BATCH)) for step in (3, 6, 9, 10)
    }


def test_each_notice_that_a_node_leaves_asks_for_one_checkpoint(tmp_path, monkeypatch):
    worker, notices = Worker(make_job(tmp_path)), iter([None, "a", "a", "b", "b"])
    monkeypatch.setattr(attempt, "preemption_notice", lambda: next(notices))
    wanted = [Attempt.save_is_wanted(worker.hooks, step) for step in range(5)]
    assert wanted == [False, True, False, True, False]
    assert worker.kinds() == ["preemption", "preemption"]


def described(rank: int) -> str:
    context = SimpleNamespace(micro_batch_size=4)
    attempt: Any = SimpleNamespace(engine=FakeEngine(), context=context)
    return Attempt._described(attempt, next(batches(3 - rank)))


def test_the_report_names_the_samples_of_all_ranks_and_the_first_bad_layer():
    one, other = run_ranks(2, described)
    assert one == other
    assert one.startswith(f"Samples {', '.join(str(n) for n in range(16, 32))}. ")
    assert one.endswith("Activations are first not finite in blocks.0")


@pytest.mark.parametrize(
    ("policy", "in_a_row", "expected"),
    [
        ("stop", 1, pytest.raises(RunFailedError, match="=stop with 1 such")),
        ("skip", 2, nullcontext()),
        ("skip", 3, pytest.raises(RunFailedError, match="=skip with 3 such")),
    ],
)
def test_a_step_that_is_not_finite_is_told_and_ends_the_run_as_the_recipe_says(
    tmp_path, policy, in_a_row, expected
):
    worker = Worker(make_job(tmp_path, train={"nonfinite": policy}))
    with expected:
        worker.hooks.on_bad_step(Progress(step=9, nonfinite_steps=in_a_row), next(batches(0)))
    assert worker.kinds() == ["not finite"]
    assert worker.actor.events[0][1].startswith("loss or gradient of step 8 is not finite;")
