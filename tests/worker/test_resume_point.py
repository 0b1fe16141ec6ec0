"""Which checkpoint the ranks of a group that starts go on from, all together."""

from pathlib import Path
from typing import Any

import torch

from tests.checkpoints.written import WEIGHTS_0, WEIGHTS_1, flip, position, values, write_checkpoint
from tests.training.ranks import run_ranks
from vit_ray.checkpoints.checkpoint import Checkpoint, Progress, folder_name
from vit_ray.checkpoints.checkpoint_format import COMMIT
from vit_ray.storage import locate
from vit_ray.training.engine.elastic_state import TrainingState
from vit_ray.worker.job import UnrecoverableError
from vit_ray.worker.saving import agreed_checkpoint, restore_newest

CPU = torch.device("cpu")


class Engine:
    """Each of two ranks needs a parameter that lies in files of its own."""

    def __init__(self, rank: int) -> None:
        self.device, self._engine, self.state = CPU, self, self
        self.weight = torch.zeros(5)
        start = ("a", 0) if rank == 0 else ("b", 0)
        self._entries = [("weight", *start, self.weight)]

    def restore(self, checkpoint: Checkpoint) -> None:
        TrainingState._fill(self, checkpoint, self._entries)  # type: ignore[arg-type]


def resume(rank: int, *folders: Path) -> list[tuple[Any, list[float], list[str]]]:
    """Of each folder the step, this rank's values and warnings; or why there is none."""
    found = []
    for folder in folders:
        told: list[str] = []
        engine: Any = Engine(rank)
        try:
            newest = agreed_checkpoint(locate(str(folder)), told.append, CPU)
            if newest is not None:
                newest = restore_newest(engine, newest, locate(str(folder)), told.append)
            step = newest and newest.position.step
        except UnrecoverableError as error:
            step = str(error)
        found.append((step, engine.weight.tolist(), told))
    return found


def expected(step: int) -> list[list[float]]:
    return [values(step)["a"][:5].tolist(), values(step)["b"].tolist()]


def test_all_ranks_fall_back_together_to_the_newest_that_each_can_read(tmp_path):
    """Of step 5 rank 0 finds damage, of step 4 rank 1, and of step 3 the marker is gone; a new run
    has none, and nothing but damage is an error on all and not a new start.
    """
    new, damaged, *spoilt = (tmp_path / name for name in ("new", "damaged", WEIGHTS_0, COMMIT))
    run = locate(str(damaged))
    for step in (1, 2, 3, 4, 5):
        write_checkpoint(run, step)
    flip(run.child(folder_name(5)), WEIGHTS_0)
    flip(run.child(folder_name(4)), WEIGHTS_1)
    run.child(folder_name(3)).child(COMMIT).delete()
    for folder in spoilt:
        flip(write_checkpoint(locate(str(folder)), 1), folder.name)
    before = sorted(damaged.rglob("*"))
    of_new, found, *refused = zip(*run_ranks(2, resume, new, damaged, *spoilt), strict=True)
    assert [step for step, *_ in of_new] == [None, None]
    assert [step for step, *_ in found] == [2, 2]
    assert [weight for _, weight, _ in found] == expected(2)
    told = [text.removeprefix(f"checkpoint file {damaged}/") for text in found[0][2]]
    assert told == [
        f"{folder_name(5)}/{WEIGHTS_0}: its bytes do not match its checksum; passed over",
        f"{folder_name(4)}/{WEIGHTS_1}: its bytes do not match its checksum; passed over",
        f"checkpoint {damaged}/{folder_name(3)} has no commit.json; passed over",
    ]
    assert sorted(damaged.rglob("*")) == before
    for step, _, _ in (rank for ranks in refused for rank in ranks):
        assert "none of them can be used" in step
        assert "resume=from_zero" in step


def test_a_run_that_ended_early_has_nothing_left_to_do():
    assert Progress(30, ended="no better validation loss in 2 evaluations").is_over(100)
    assert not position(30).progress.is_over(100)
    assert not Progress(100, evaluation_due=True).is_over(100)
