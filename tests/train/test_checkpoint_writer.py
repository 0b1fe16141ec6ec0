"""Checkpoints that storage refuses: tried again, told, and in the end an error."""

from typing import Any

import pytest
import torch

from vit_ray.config.training import CheckpointConfig
from vit_ray.storage import Location, locate
from vit_ray.train import checkpoint_writer
from vit_ray.train.checkpoint import Position, Snapshot, list_checkpoints, newest_checkpoint
from vit_ray.train.checkpoint_writer import MAX_FAILED_SAVES, SAVE_ATTEMPTS, CheckpointWriter
from vit_ray.train.progress import Progress


def snapshot(step: int, rank: int = 0, world_size: int = 1, **progress: Any) -> Snapshot:
    where = Position(Progress(step, **progress), step, step * 8, 8, {"w": [2]}, {}, "print")
    return Snapshot(rank, world_size, {f"weight|w|{rank}": torch.ones(2)}, where)


class FullDisk:
    """A storage that refuses the first `failures` writes of a checkpoint, and its history."""

    def __init__(self, folder: Location, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
        self.events: list[tuple[str, str]] = []
        self.pauses: list[float] = []
        self._left, self._write = failures, checkpoint_writer.write_snapshot
        monkeypatch.setattr(checkpoint_writer, "write_snapshot", self.write_snapshot)
        self.writer = CheckpointWriter(
            folder,
            CheckpointConfig(keep_last=1, keep_best=True),
            lambda kind, text, _: self.events.append((kind, text)),
            self.pauses.append,
        )

    def write_snapshot(self, taken: Snapshot, folder: Location) -> int:
        if self._left:
            self._left -= 1
            raise OSError(28, "No space left on device")
        return self._write(taken, folder)


@pytest.fixture
def run(tmp_path: Any) -> Location:
    return locate(str(tmp_path / "run"))


def test_a_write_that_fails_is_tried_again_with_growing_pauses(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, SAVE_ATTEMPTS - 1)
    disk.writer.write(snapshot(1), "step-00000001")
    assert disk.pauses == [1.0, 2.0, 4.0]
    assert disk.events == []
    assert newest_checkpoint(run) is not None


def test_a_save_that_fails_is_told_and_the_next_may_work(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, SAVE_ATTEMPTS)
    disk.writer.write(snapshot(1), "step-00000001")
    disk.writer.write(snapshot(2), "step-00000002")
    ((kind, text),) = disk.events
    assert kind == "checkpoint failed"
    assert "step-00000001: [Errno 28] No space left on device" in text
    assert [step for step, _ in list_checkpoints(run)] == [2]


def test_a_disk_that_stays_full_ends_the_run_with_what_to_do(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, SAVE_ATTEMPTS * MAX_FAILED_SAVES)
    for step in range(1, MAX_FAILED_SAVES):
        disk.writer.write(snapshot(step), f"step-{step:08d}")
    with pytest.raises(OSError, match=r"3 checkpoints in a row .* free space there"):
        disk.writer.write(snapshot(9), "step-00000009")


def test_the_best_is_kept_beside_the_newest(run: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(run, monkeypatch, 0)
    for step, loss in ((1, 2.0), (2, 0.5), (3, 1.0), (4, 3.0)):
        metrics = {"eval/loss": loss}
        disk.writer.write(snapshot(step, eval_step=step, metrics=metrics), f"step-{step:08d}")
    assert [step for step, _ in list_checkpoints(run)] == [4, 2]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_old_ones_go_with_the_last_rank_that_writes_whichever_it_is(
    run: Location, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    disk = FullDisk(run, monkeypatch, 0)
    first, last = order
    for rank in order:
        disk.writer.write(snapshot(1, rank, 2), "step-00000001")
    disk.writer.write(snapshot(2, first, 2), "step-00000002")
    assert [step for step, _ in list_checkpoints(run)] == [2, 1]
    disk.writer.write(snapshot(2, last, 2), "step-00000002")
    assert [step for step, _ in list_checkpoints(run)] == [2]
