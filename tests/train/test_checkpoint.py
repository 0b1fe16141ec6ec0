"""Checkpoints on disk: whole or nothing, verified, kept and pruned."""

import json
from pathlib import Path

import pytest
import torch

from vit_ray.storage import Location, locate
from vit_ray.train.checkpoint import (
    DamagedCheckpointError,
    Position,
    Snapshot,
    find_weights,
    folder_name,
    list_checkpoints,
    newest_checkpoint,
    newest_verified_checkpoint,
    open_checkpoint,
    prune,
    write_snapshot,
)
from vit_ray.train.fragments import Fragment
from vit_ray.train.progress import Progress

SHAPES = {"a": [3, 4], "b": [5]}


def position(step: int) -> Position:
    return Position(
        Progress(step=step), applied_steps=step, samples_seen=8 * step, global_batch_size=8,
        shapes=SHAPES, recipe={"name": "x"}, data_fingerprint="f",
    )  # fmt: skip


def values(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(12.0) + step, "b": torch.arange(5.0) - step}


def snapshots(step: int) -> list[Snapshot]:
    """Two ranks that own uneven parts of two parameters."""
    a, b = values(step)["a"], values(step)["b"]
    parts = [{"weight|a|0": a[:7]}, {"weight|a|7": a[7:], "weight|b|0": b}]
    return [
        Snapshot(rank, 2, {k: v.clone() for k, v in part.items()}, position(step))
        for rank, part in enumerate(parts)
    ]


def write(run: Location, step: int, ranks: int = 2) -> Location:
    folder = run.child(folder_name(step))
    for snapshot in snapshots(step)[:ranks]:
        write_snapshot(snapshot, folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Location:
    return locate(str(tmp_path / "run"))


def test_what_was_written_is_read_back_whole(run: Location) -> None:
    write(run, 3)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.position == position(3)
    checkpoint.verify()
    weights = checkpoint.weights()
    assert torch.equal(weights["a"], values(3)["a"].view(3, 4))
    assert torch.equal(weights["b"], values(3)["b"])
    assert not checkpoint.has_average()


def test_fragments_of_any_cut_are_filled(run: Location) -> None:
    write(run, 3)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    target = torch.zeros(6)
    fragment = Fragment("a", 4, target, target, 0)
    checkpoint.fill({"weight": [(fragment, target)]})
    assert target.tolist() == [7, 8, 9, 10, 11, 12]


def test_state_that_was_not_saved_is_an_error(run: Location) -> None:
    write(run, 3)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    target = torch.zeros(12)
    with pytest.raises(DamagedCheckpointError, match="12 elements of exp_avg"):
        checkpoint.fill({"exp_avg": [(Fragment("a", 0, target, target, 0), target)]})


def test_one_rank_alone_makes_no_checkpoint(run: Location) -> None:
    write(run, 1)
    write(run, 2, ranks=1)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.position.step == 1


@pytest.mark.parametrize("file", ["rank-00001-of-00002.safetensors", "rank-00001-of-00002.json"])
def test_a_truncated_file_makes_it_no_checkpoint(run: Location, file: str) -> None:
    folder = write(run, 1)
    path = Path(folder.path) / file
    path.write_bytes(path.read_bytes()[:-9])
    assert open_checkpoint(folder) is None


def test_a_flipped_bit_is_found_marked_and_passed_over(run: Location) -> None:
    write(run, 1)
    newest = write(run, 2)
    path = Path(newest.path) / "rank-00000-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    told: list[str] = []
    checkpoint = newest_verified_checkpoint(run, told.append)
    assert checkpoint is not None
    assert checkpoint.position.step == 1
    assert "rank-00000-of-00002.safetensors" in told[0]
    second = newest_checkpoint(run)
    assert second is not None
    assert second.position.step == 1


@pytest.mark.parametrize("file", ["rank-00001-of-00002.safetensors", "rank-00001-of-00002.json"])
def test_a_file_cut_short_is_found_marked_and_passed_over(run: Location, file: str) -> None:
    """As a loss of power leaves them: there, and empty."""
    write(run, 1)
    (Path(write(run, 2).path) / file).write_bytes(b"")
    told: list[str] = []
    checkpoint = newest_verified_checkpoint(run, told.append)
    assert checkpoint is not None
    assert checkpoint.position.step == 1
    assert file in told[0]
    assert (Path(run.path) / "step-00000002" / "damaged.json").exists()


def test_a_checkpoint_that_is_being_removed_is_not_called_damaged(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, 1)
    gone = write(run, 2)
    plain = Location.read_range

    def removed(self: Location, offset: int, length: int) -> bytes:
        if self.path.startswith(gone.path):
            gone.delete()
        return plain(self, offset, length)

    monkeypatch.setattr(Location, "read_range", removed)
    told: list[str] = []
    checkpoint = newest_verified_checkpoint(run, told.append)
    assert checkpoint is not None
    assert checkpoint.position.step == 1
    assert told == []
    assert not gone.exists()


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(run: Location) -> None:
    folder = write(run, 1)
    path = Path(folder.path) / "rank-00000-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedCheckpointError, match="every checkpoint is damaged"):
        newest_verified_checkpoint(run, lambda text: None)


def test_a_newer_format_names_itself(run: Location) -> None:
    folder = write(run, 1)
    path = Path(folder.path) / "rank-00000-of-00002.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 9'))
    with pytest.raises(ValueError, match="has format 9; this code reads up to 1"):
        open_checkpoint(folder)


def test_pruning_keeps_the_newest_the_best_and_what_is_being_written(run: Location) -> None:
    for step in (1, 2, 3, 4):
        write(run, step)
    write(run, 5, ranks=1)
    assert sorted(prune(run, keep_last=2, keep={1})) == [2]
    assert [step for step, _ in list_checkpoints(run)] == [5, 4, 3, 1]


def test_pruning_removes_old_halves(run: Location) -> None:
    write(run, 1, ranks=1)
    write(run, 2)
    assert prune(run, keep_last=1, keep=set()) == [1]


def test_weights_are_found_in_a_run_or_in_a_checkpoint(run: Location) -> None:
    folder = write(run, 2)
    assert find_weights(run.path).position.step == 2
    assert find_weights(folder.path).position.step == 2
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        find_weights(f"{run.path}/nothing")


def test_a_disk_that_is_full_leaves_nothing_that_counts(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, 1)
    plain = Location.write

    def full(self: Location, content: bytes) -> None:
        if self.path.endswith("rank-00001-of-00002.safetensors"):
            raise OSError(28, "No space left on device")
        plain(self, content)

    monkeypatch.setattr(Location, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(run, 2)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.position.step == 1


def test_a_position_is_one_flat_object_on_disk_and_comes_back_as_it_was() -> None:
    progress = Progress(7, 0.5, 2, 6, "no better", 12.5, 1, {"eval/loss": 0.75})
    before = Position(progress, 5, 56, 8, SHAPES, {"name": "x"}, "f", "run", {"ray": "2.60"})
    saved = json.loads(json.dumps(before.to_json()))
    assert saved["step"] == 7
    assert saved["metrics"] == {"eval/loss": 0.75}
    assert saved["applied_steps"] == 5
    assert Position.from_json(saved) == before


def test_a_position_of_format_1_is_read() -> None:
    """Field by field as checkpoints of format 1 hold it, which count no refused steps."""
    saved = {
        "step": 80, "applied_steps": 79, "samples_seen": 5120, "global_batch_size": 64,
        "shapes": {"head.bias": [10]}, "recipe": {"name": "x"}, "data_fingerprint": "f",
        "tracking_run_id": "r", "best_eval_loss": 0.25, "evals_without_best": 1, "eval_step": 80,
        "ended": "", "train_seconds": 3.5, "metrics": {"eval/loss": 0.5}, "versions": {},
    }  # fmt: skip
    read = Position.from_json(saved)
    assert read.progress == Progress(80, 0.25, 1, 80, "", 3.5, 0, {"eval/loss": 0.5})
    assert (read.step, read.applied_steps, read.samples_seen) == (80, 79, 5120)
    assert (read.tracking_run_id, read.shapes) == ("r", {"head.bias": [10]})
