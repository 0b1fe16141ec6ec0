"""Steps that are not finite: what is reported of them, and how a group rolls back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.ranks import run_ranks
from tests.worker.fakes import FakeEngine, Worker, batches, make_job
from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.config.training_sections import TrainConfig
from vit_ray.storage import locate
from vit_ray.worker.job import UnrecoverableError
from vit_ray.worker.nonfinite import NonfinitePolicy, describe_batch, roll_back


def described(rank: int) -> str:
    batch = next(batches(3 - rank))
    return describe_batch(FakeEngine(), batch, micro_batch_size=4)


def test_the_report_names_the_samples_of_all_ranks_and_the_first_bad_layer() -> None:
    one, other = run_ranks(2, described)
    assert one == other
    assert one.startswith(f"Samples {', '.join(str(n) for n in range(16, 32))}. ")
    assert "first not finite in blocks.0" in one
    assert "embedding 1, blocks.0 inf" in one
    assert one.endswith("Largest weight norms: head.bias 3, head.weight 2")


SAVED = Progress(step=2, log_losses=[0.5], log_grad_norms=[1.5], recent_spikes=[1])


def rolled_back(rank: int, folder: str, but_not: int | None) -> tuple[Any, ...]:
    worker = Worker(make_job(Path(folder)), FakeEngine(weight=2.0), rank=rank)
    run_folder = locate(worker.job.run_folder)
    if rank == 0:
        worker.saver.save(SAVED)
    worker.engine.weight = 5.0
    progress = Progress(step=5, spikes=2, log_losses=[0.1] * 5, log_grad_norms=[0.2] * 5)
    step = roll_back(worker.engine, run_folder, worker.saver, worker.watchdog, progress, but_not)
    return step, worker.engine.weight, worker.engine.restored, worker.watchdog._is_paused, progress


def test_all_ranks_roll_back_to_the_newest_checkpoint(tmp_path: Path) -> None:
    """And compare the steps to come with those before it."""
    wanted = replace(SAVED, step=5, spikes=2)
    results = run_ranks(2, rolled_back, str(tmp_path), None)
    assert results == [(2, 2.0, [2], False, wanted)] * 2


def test_a_checkpoint_that_is_left_out_is_not_restored(tmp_path: Path) -> None:
    for step, weight, restored, is_paused, progress in run_ranks(2, rolled_back, str(tmp_path), 2):
        assert (step, weight, restored, is_paused) == (2, 5.0, [], False)
        assert progress.log_losses == [0.1] * 5


def not_rolled_back(rank: int, folder: str) -> tuple[int | None, bool]:
    worker = Worker(make_job(Path(folder)), rank=rank)
    step = roll_back(worker.engine, locate(folder), worker.saver, worker.watchdog, Progress())
    return step, worker.watchdog._is_paused


def test_without_a_checkpoint_nothing_is_restored(tmp_path: Path) -> None:
    assert run_ranks(2, not_rolled_back, str(tmp_path)) == [(None, False)] * 2


def test_a_run_that_cannot_roll_back_from_a_step_that_is_not_finite_ends(tmp_path: Path) -> None:
    train = TrainConfig(nonfinite="rollback")
    policy = NonfinitePolicy(train, Worker(make_job(tmp_path)).link, lambda _: "", lambda _: None)
    with pytest.raises(UnrecoverableError, match="no checkpoint to roll back to; the run stops"):
        policy.handle(Progress(step=9, nonfinite_steps=1), next(batches(0)))


@pytest.mark.parametrize(
    ("policy", "in_a_row", "kinds", "error"),
    [
        ("stop", 1, ["not finite"], "train.nonfinite=stop with 1"),
        ("skip", 1, ["not finite"], ""),
        ("skip", 3, ["not finite"], "train.nonfinite=skip with 3"),
        ("rollback", 1, ["not finite", "rolled back"], ""),
        ("rollback", 3, ["not finite"], "train.nonfinite=rollback with 3"),
    ],
)
def test_what_the_recipe_says_is_done(
    tmp_path: Path, policy: str, in_a_row: int, kinds: list[str], error: str
) -> None:
    worker = Worker(make_job(tmp_path, train={"nonfinite": policy}))
    batch: Any = next(batches(0))
    progress = Progress(step=9, nonfinite_steps=in_a_row)
    if error:
        with pytest.raises(UnrecoverableError, match=error):
            worker.hooks.nonfinite.handle(progress, batch)
    else:
        worker.hooks.nonfinite.handle(progress, batch)
    assert worker.kinds() == kinds
    assert worker.actor.events[0][1].startswith("loss or gradient of step 8 is not finite;")
