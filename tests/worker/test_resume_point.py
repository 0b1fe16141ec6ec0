"""Which checkpoint a group that starts goes on from; no Ray."""

import threading
from pathlib import Path

import pytest
import torch

from tests.checkpoints.written import flip, snapshot_of, write_snapshot
from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name
from vit_ray.checkpoints.run_checkpoints import NoUsableCheckpointError, list_checkpoints
from vit_ray.storage import Location, locate
from vit_ray.worker.resume_point import (
    CHOICE_LIMIT_S,
    ResumePoint,
    ResumePointChoice,
    choose_resume_point,
)

TOTAL = 100


class Run:
    """Checkpoints in a folder, and the history of choosing among them."""

    def __init__(self, folder: Path) -> None:
        self.folder: Location = locate(str(folder / "run"))
        self.events: list[tuple[str, str]] = []

    def save(self, step: int, ended: str = "", ranks: int = 1) -> Location:
        where = Position(Progress(step, ended=ended), step, step * 8, 8, {"w": [2]}, {}, "print")
        folder = self.folder.child(folder_name(step))
        write_snapshot(snapshot_of(0, ranks, {"weight|w|0": torch.ones(2)}, where), folder)
        return folder

    def damage(self, step: int) -> None:
        flip(self.folder.child(folder_name(step)), "rank-00000-of-00001.safetensors")

    def choose(self) -> ResumePoint:
        return choose_resume_point(
            self.folder, TOTAL, lambda kind, text: self.events.append((kind, text))
        )

    def steps(self) -> list[int]:
        return [step for step, _ in list_checkpoints(self.folder)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_new_run_starts_at_the_first_sample(run: Run) -> None:
    assert run.choose() == ResumePoint(None, 0)


def test_it_goes_on_after_the_newest(run: Run) -> None:
    run.save(10)
    run.save(20)
    assert run.choose() == ResumePoint(20, 160)
    assert run.steps() == [20, 10]
    assert run.events == []


def test_a_damaged_one_is_reported_and_passed_over(run: Run) -> None:
    run.save(10)
    run.save(20)
    run.damage(20)
    assert run.choose() == ResumePoint(10, 80)
    ((kind, text),) = run.events
    assert kind == "damaged checkpoint"
    assert folder_name(20) in text


def test_what_is_not_whole_is_out_of_the_way_of_the_attempt_that_writes_it_again(run: Run) -> None:
    run.save(10)
    run.save(20, ranks=2)
    assert run.choose() == ResumePoint(10, 80)
    assert run.steps() == [10]
    assert run.folder.child("step-00000020.damaged").exists()


def test_a_run_that_ended_early_has_nothing_left_to_do(run: Run) -> None:
    run.save(30, ended="no better validation loss in 2 evaluations")
    assert run.choose().is_over


def test_nothing_but_damage_is_an_error_and_not_a_new_start(run: Run) -> None:
    run.save(10)
    run.damage(10)
    with pytest.raises(NoUsableCheckpointError, match="none of them can be used"):
        run.choose()


def test_while_a_choice_takes_long_the_others_hear_of_it_and_it_has_an_end() -> None:
    is_read, now_s, told = threading.Event(), [0.0], []

    def choose() -> ResumePoint:
        is_read.wait(60)
        return ResumePoint(8, 64)

    def note(kind: str, text: str) -> None:
        told.append((kind, text))

    choice = ResumePointChoice(choose, clock=lambda: now_s[0])
    now_s[0] = 700.0
    assert choice.wait(note, timeout_s=0.01) is None
    assert told == [("storage slow", "has been selecting the checkpoint to resume from for 700 s")]
    now_s[0] = CHOICE_LIMIT_S + 1
    assert "storage does not answer" in str(choice.wait(note, timeout_s=0.01))
    is_read.set()
    assert choice.wait(note, timeout_s=60) == ResumePoint(8, 64)


def test_why_there_is_no_choice_is_an_answer() -> None:
    def choose() -> ResumePoint:
        raise NoUsableCheckpointError("none can be used")

    choice = ResumePointChoice(choose)
    assert choice.wait(lambda kind, text: None, timeout_s=60) == "none can be used"
