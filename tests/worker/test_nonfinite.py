"""Steps that are not finite: what is reported of them, and what the recipe then asks for."""

from typing import Any

import pytest

from tests.training.ranks import run_ranks
from tests.worker.fakes import FakeEngine, Worker, batches, make_job
from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.worker.attempt import describe_batch
from vit_ray.worker.job import UnrecoverableError


def described(rank: int) -> str:
    batch = next(batches(3 - rank))
    return describe_batch(FakeEngine(), batch, micro_batch_size=4)


def test_the_report_names_the_samples_of_all_ranks_and_the_first_bad_layer():
    one, other = run_ranks(2, described)
    assert one == other
    assert one.startswith(f"Samples {', '.join(str(n) for n in range(16, 32))}. ")
    assert "first not finite in blocks.0" in one
    assert one.endswith("embedding 1, blocks.0 inf")


@pytest.mark.parametrize(
    ("policy", "in_a_row", "kinds", "error"),
    [
        ("stop", 1, ["not finite"], "train.nonfinite=stop with 1"),
        ("skip", 1, ["not finite"], ""),
        ("skip", 3, ["not finite"], "train.nonfinite=skip with 3"),
    ],
)
def test_what_the_recipe_says_is_done(tmp_path, policy, in_a_row, kinds, error):
    worker = Worker(make_job(tmp_path, train={"nonfinite": policy}))
    batch: Any = next(batches(0))
    progress = Progress(step=9, nonfinite_steps=in_a_row)
    if error:
        with pytest.raises(UnrecoverableError, match=error):
            worker.hooks.on_bad_step(progress, batch)
    else:
        worker.hooks.on_bad_step(progress, batch)
    assert worker.kinds() == kinds
    assert worker.actor.events[0][1].startswith("loss or gradient of step 8 is not finite;")
