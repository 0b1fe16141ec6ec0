"""Which checkpoint the ranks of a group that starts go on from, all together."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.written import WEIGHTS_0, WEIGHTS_1, flip, position, values, write_checkpoint
from tests.training.ranks import run_ranks
from vit_ray.checkpoints.checkpoint import Checkpoint, Progress, folder_name
from vit_ray.checkpoints.checkpoint_format import COMMIT
from vit_ray.storage import locate
from vit_ray.training.engine.elastic_state import TrainingState
from vit_ray.worker.job import UnrecoverableError
from vit_ray.worker.resume_point import agreed_checkpoint, restore_newest

CPU = torch.device("cpu")


class Engine:
    """Each of two ranks needs a parameter that lies in files of its own."""

    def __init__(self, rank: int) -> None:
        self.device, self._engine = CPU, self
        self.weight = torch.zeros(5)
        start = ("a", 0) if rank == 0 else ("b", 0)
        self._entries = [("weight", *start, self.weight)]

    def restore(self, checkpoint: Checkpoint) -> None:
        TrainingState._fill(self, checkpoint, self._entries)  # type: ignore[arg-type]


def resume(rank: int, folder: str) -> tuple[Any, list[float], list[str]]:
    """Step, this rank's values and warnings; or why there is none."""
    told: list[str] = []
    engine: Any = Engine(rank)
    try:
        newest = agreed_checkpoint(locate(folder), told.append, CPU)
        if newest is not None:
            newest = restore_newest(engine, newest, locate(folder), told.append)
    except UnrecoverableError as error:
        return str(error), [], told
    return newest and newest.position.step, engine.weight.tolist(), told


def resumed(folder: Path) -> list[tuple[Any, list[float], list[str]]]:
    return run_ranks(2, resume, str(folder))


def expected(step: int) -> list[list[float]]:
    return [values(step)["a"][:5].tolist(), values(step)["b"].tolist()]


def test_a_new_run_starts_without_one(tmp_path):
    assert [step for step, *_ in resumed(tmp_path)] == [None, None]


def test_all_ranks_fall_back_together_to_the_newest_that_each_can_read(tmp_path):
    """Of step 5 rank 0 finds damage, of step 4 rank 1, and of step 3 the marker is gone."""
    run = locate(str(tmp_path))
    for step in (1, 2, 3, 4, 5):
        write_checkpoint(run, step)
    flip(run.child(folder_name(5)), WEIGHTS_0)
    flip(run.child(folder_name(4)), WEIGHTS_1)
    run.child(folder_name(3)).child(COMMIT).delete()
    before = sorted(path for path in tmp_path.rglob("*"))
    found = resumed(tmp_path)
    assert [step for step, *_ in found] == [2, 2]
    assert [weight for _, weight, _ in found] == expected(2)
    told = [text.removeprefix(f"checkpoint file {tmp_path}/") for text in found[0][2]]
    assert told == [
        f"{folder_name(5)}/{WEIGHTS_0}: its bytes do not match its checksum; passed over",
        f"{folder_name(4)}/{WEIGHTS_1}: its bytes do not match its checksum; passed over",
        f"checkpoint {tmp_path}/{folder_name(3)} has no commit.json; passed over",
    ]
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", [WEIGHTS_0, COMMIT])
def test_nothing_but_damage_is_an_error_on_all_and_not_a_new_start(tmp_path, name):
    flip(write_checkpoint(locate(str(tmp_path)), 1), name)
    for step, _, _ in resumed(tmp_path):
        assert "none of them can be used" in step
        assert "resume=from_zero" in step


def test_a_run_that_ended_early_has_nothing_left_to_do():
    assert Progress(30, ended="no better validation loss in 2 evaluations").is_over(100)
    assert not position(30).progress.is_over(100)
    assert not Progress(100, evaluation_due=True).is_over(100)
