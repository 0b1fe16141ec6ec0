"""What a worker does at a spike: the event, the losses of all ranks' images, and rolling back."""

import io
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.train.ranks import run_ranks
from tests.worker.fakes import BATCH, Worker, make_job
from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.train.spikes import Judged, Spike

SPIKE = Spike(Judged(4.0, 1.0, 9.0), Judged(50.0, 2.0, 12.0), False)
PROGRESS = Progress(step=9, spikes=1)


def handled(rank: int, folder: str, world_size: int) -> dict[str, bytes]:
    worker = Worker(make_job(Path(folder)), rank=rank)
    share = BATCH // world_size
    for step in range(9):
        samples = torch.arange(share) + step * BATCH + rank * share
        worker.image_losses.note(samples, samples / 10.0, step)
    worker.hooks.spikes.handle(PROGRESS, SPIKE)
    return worker.actor.files


def test_rank_0_keeps_the_losses_of_all_ranks_in_the_order_of_the_batch(tmp_path: Path) -> None:
    one, other = run_ranks(2, handled, str(tmp_path), 2)
    assert other == {}
    table = pq.read_table(io.BytesIO(one["spike-step-00000008.parquet"]))
    newest = table.filter(np.asarray(table["step"]) == 8)
    assert newest["sample"].to_pylist() == list(range(8 * BATCH, 9 * BATCH))
    np.testing.assert_allclose(newest["loss"], np.arange(8 * BATCH, 9 * BATCH) / 10.0, rtol=1e-6)
    assert set(table["step"].to_pylist()) == set(range(9))


@pytest.mark.parametrize(
    ("policy", "restored", "kinds", "last"),
    [
        (None, 4, ["spike"], "step 8: loss 4 (usual 1, z 9.0), gradient norm 50 (usual 2, z 12.0)"),
        ("skip", 4, ["spike"], "step 8: loss 4"),
        ("rollback", 4, ["spike", "rolled back"], "weights of step 4; training continues with"),
        ("rollback", None, ["spike", "spike"], "there is no checkpoint to roll back to; training"),
    ],
)
def test_what_the_recipe_says_is_done(
    tmp_path: Path, policy: str | None, restored: int | None, kinds: list[str], last: str
) -> None:
    worker = Worker(make_job(tmp_path, train={"on_spike": policy}), restored=restored)
    worker.hooks.spikes.handle(PROGRESS, SPIKE)
    assert worker.kinds() == kinds
    text = worker.actor.events[-1][1]
    assert text.startswith(last)
    assert f"`vit-ray explain {tmp_path}/run step=8`" in worker.actor.events[0][1]


@pytest.mark.parametrize(("is_refused", "says"), [(True, True), (False, False)])
def test_a_skipped_step_is_said(tmp_path: Path, is_refused: bool, says: bool) -> None:
    worker = Worker(make_job(tmp_path, train={"on_spike": "skip"}))
    worker.hooks.spikes.handle(PROGRESS, SPIKE._replace(is_refused=is_refused))
    assert ("the step was not applied" in worker.actor.events[0][1]) is says


def test_spikes_between_two_checkpoints_roll_back_once(tmp_path: Path) -> None:
    asked: list[int | None] = []
    worker = Worker(make_job(tmp_path, train={"on_spike": "rollback"}))

    def roll_back(_: Progress, but_not: int | None) -> int:
        asked.append(but_not)
        return 4 if len(asked) < 4 else 30

    worker.hooks.spikes._roll_back = roll_back
    for step in (9, 19, 29, 39, 49):
        worker.hooks.spikes.handle(Progress(step=step), SPIKE)
    assert asked == [None, 4, 4, 4, 30]
    assert [step for kind, _, step in worker.actor.events if kind == "rolled back"] == [9, 39]
    assert worker.actor.events[-1][1].startswith("not rolled back to step 30 a second time")


def test_the_command_that_explains_a_step_is_one_that_a_shell_takes(tmp_path: Path) -> None:
    worker = Worker(make_job(tmp_path / "all runs"))
    worker.hooks.spikes.handle(PROGRESS, SPIKE)
    (command,) = re.findall("`(.*?)`", worker.actor.events[0][1])
    assert shlex.split(command) == ["vit-ray", "explain", f"{tmp_path}/all runs/run", "step=8"]
