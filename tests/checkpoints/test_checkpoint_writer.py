"""A rank's part in host memory, and checkpoints that storage refuses."""

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from tests.checkpoints.written import position, snapshot_of
from vit_ray.checkpoints import checkpoint_writer
from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name, read_note
from vit_ray.checkpoints.checkpoint_format import COMMIT, SavedFile
from vit_ray.checkpoints.checkpoint_writer import (
    MAX_FAILED_SAVES,
    CheckpointWriter,
    Part,
    Snapshot,
    take_snapshot,
)
from vit_ray.checkpoints.run_checkpoints import (
    begin_training,
    list_checkpoints,
    newest_checkpoint,
)
from vit_ray.config.training_sections import CheckpointConfig
from vit_ray.lock import hold_lock, this_process
from vit_ray.outcomes import LockLostError
from vit_ray.storage import Location, locate

NAMES = ["blocks.10.w", "blocks.2.w", "a", "a.b", "\u00e4", 'quoted "name"', "last"]


def state(scale: float) -> dict[str, Tensor]:
    """Tensors of several sizes, two of them empty, whose keys are not sorted."""
    sizes = {f"weight|{name}|{i}": 3 * i for i, name in enumerate(NAMES)}
    return {key: scale * torch.arange(1.0, size + 1) for key, size in sizes.items()}


def bytes_of(taken: Snapshot) -> bytes:
    return taken.memory["weights"].numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_its_memory_is_the_file_that_safetensors_writes_in_fp32(dtype):
    kept = {key: values.to(dtype) for key, values in state(0.1).items()}
    taken = snapshot_of(0, 1, kept, position(1))
    assert bytes_of(taken) == save({key: values.float() for key, values in kept.items()})
    counts = {key: values.numel() for key, values in kept.items()}
    assert taken.tensors == {"weights": counts}


def test_what_weights_do_not_need_is_in_a_file_of_its_own():
    tensors = {f"{kind}|w|0": torch.ones(3) for kind in ("exp_avg", "weight", "average", "u")}
    taken = snapshot_of(0, 1, tensors, position(1))
    files = {part: memory.numpy().tobytes() for part, memory in taken.memory.items()}
    assert files == {
        "weights": save({"weight|w|0": tensors["weight|w|0"]}),
        "averages": save({"average|w|0": tensors["average|w|0"]}),
        "rest": save({key: tensors[key] for key in ("exp_avg|w|0", "u|w|0")}),
    }


def test_the_next_one_takes_the_memory_that_it_is_given_if_it_has_the_size():
    entries = [("weight", "a", 0, torch.ones(5)), ("weight", "b", 0, torch.zeros(7))]
    memory = take_snapshot(entries, position(1), 0, 1).memory
    for _, _, _, values in entries:
        values.add_(1.0)
    entries[1] = ("weight", "c", 0, entries[1][3])  # of another name, and of the same size
    again = take_snapshot(entries, position(2), 0, 1, memory)
    assert again.memory["weights"].data_ptr() == memory["weights"].data_ptr()
    assert bytes_of(again) == save(
        {"weight|a|0": torch.full((5,), 2.0), "weight|c|0": torch.ones(7)}
    )
    before = bytes_of(again)
    fewer = take_snapshot(entries[:1], position(3), 0, 1, memory)
    assert bytes_of(fewer) == save({"weight|a|0": torch.full((5,), 2.0)})
    assert bytes_of(again) == before


def snapshot(step: int, rank: int = 0, world_size: int = 1, **progress: Any) -> Snapshot:
    where = Position(
        Progress(step, **progress), step, step * 8, 8, {"w": [world_size]}, {}, "print"
    )
    return snapshot_of(rank, world_size, {f"weight|w|{rank}": torch.ones(1)}, where)


class Disk:
    """A storage that refuses some writes of a checkpoint, and a writer for each rank."""

    def __init__(
        self,
        folder: Location,
        monkeypatch: pytest.MonkeyPatch,
        refuses: Callable[[Snapshot], bool] = lambda _: False,
        error: Exception = OSError(28, "No space left on device"),  # noqa: B008
        ranks: int = 1,
        resumes: bool = False,
        **keep: Any,
    ) -> None:
        self.events: list[tuple[str, str]] = []
        self._refuses, self._error, self._write = refuses, error, checkpoint_writer.write_snapshot
        monkeypatch.setattr(checkpoint_writer, "write_snapshot", self.write_snapshot)
        self._parts = [Part([])] * ranks
        self.writers = [
            CheckpointWriter(
                folder,
                CheckpointConfig(**{"keep_last": 1, "keep_best": True, **keep}),
                lambda kind, text, _: self.events.append((kind, text)),
                gather=lambda part, rank=rank: self._gather(rank, part),
                resumed=newest_checkpoint(folder) if resumes else None,
            )
            for rank in range(ranks)
        ]

    def write_snapshot(self, taken: Snapshot, folder: Location, token: str) -> Iterator[SavedFile]:
        yield from self._write(taken, folder, token)
        if self._refuses(taken):  # what is written is deleted
            raise self._error

    def _gather(self, rank: int, part: Part) -> list[Part]:
        self._parts[rank] = part
        return list(self._parts) if rank == 0 else []

    def save(self, step: int, **progress: Any) -> None:
        """All ranks write a step, the first one last: it waits for the others."""
        ranks = len(self.writers)
        for rank in reversed(range(ranks)):
            self.writers[rank].write(snapshot(step, rank, ranks, **progress))


def steps(run: Location) -> list[int]:
    return [step for step, _ in list_checkpoints(run)]


def contents(folder: Location) -> dict[str, bytes]:
    files = folder.list_files(recursive=False)
    return {info.base_name: folder.child(info.base_name).read() for info in files}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
def test_a_save_that_fails_is_told_and_the_next_may_work(run, monkeypatch, error):
    disk = Disk(run, monkeypatch, lambda t: (t.position.step, t.rank) == (1, 1), error, ranks=2)
    disk.save(1)
    assert steps(run) == []  # room for the next
    disk.save(2)
    ((kind, text),) = disk.events
    assert kind == "checkpoint failed"
    told = str(error) or "MemoryError"
    assert f"step-00000001: not whole: 1 of 2 workers failed: rank 1: {told}" in text
    assert steps(run) == [2]


@pytest.mark.parametrize("marker", [None, b"changed"])
def test_a_save_that_fails_leaves_what_lay_there_and_the_next_replaces_it(run, monkeypatch, marker):
    """A checkpoint that has lost its marker can be restored by hand."""
    Disk(run, monkeypatch, ranks=2).save(1)
    folder = run.child(folder_name(1))
    if marker is None:
        folder.child(COMMIT).delete()
    else:
        folder.child(COMMIT).write(marker)
    before = contents(folder)
    Disk(run, monkeypatch, lambda taken: taken.rank == 1, ranks=2).save(1)
    assert contents(folder) == before
    Disk(run, monkeypatch).save(1, train_seconds=5.0)  # of fewer ranks
    found = newest_checkpoint(run)
    assert found.position.progress.train_seconds == 5.0
    found.verify()


def test_a_rank_that_was_given_up_replaces_no_file_of_a_later_save(run, monkeypatch):
    """It was cut off from the others and not from the storage; on a GPU its bytes differ."""
    Disk(run, monkeypatch, ranks=2).save(1)
    where = Position(Progress(1), 1, 8, 8, {"w": [2]}, {}, "print")
    late = snapshot_of(1, 2, {"weight|w|1": torch.full((1,), 7.0)}, where)
    writer = CheckpointWriter(run, CheckpointConfig(), pytest.fail, gather=lambda _: [])
    writer.write(late)
    newest = newest_checkpoint(run)
    assert newest.weights()["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("resumes", [True, False])
def test_an_evaluation_after_a_save_is_recorded_beside_it(run, monkeypatch, resumes):
    disk = Disk(run, monkeypatch, keep_last=2)
    disk.save(1, evaluation_due=True)
    folder = run.child(folder_name(1))
    before = contents(folder)
    after = Progress(1, num_evals=1, metrics={"eval/loss": 0.5})
    if resumes:  # another attempt evaluates
        disk = Disk(run, monkeypatch, resumes=True, keep_last=2)
    assert disk.writers[0].note_evaluation(after)
    assert {name: content for name, content in contents(folder).items() if name in before} == before
    found = newest_checkpoint(run)
    assert found.position.progress == after
    disk.save(2)
    assert newest_checkpoint(run).position.progress == Progress(2)
    # The run may have to go on from the older one.
    assert newest_checkpoint(run, below=2).position.progress == after
    assert disk.events == []


def test_a_save_that_is_not_whole_is_made_again_after_the_evaluation(run, monkeypatch):
    disk = Disk(
        run, monkeypatch, lambda t: t.rank == 1 and t.position.progress.evaluation_due, ranks=2
    )
    disk.save(1, evaluation_due=True)
    assert not disk.writers[0].note_evaluation(Progress(1))
    disk.save(1)
    found = newest_checkpoint(run)
    assert not found.position.progress.evaluation_due


def test_a_disk_that_stays_full_ends_the_run_with_what_to_do(run, monkeypatch):
    """Whichever rank fails: they are counted together."""

    def refuses(taken: Snapshot) -> bool:
        return taken.position.step > 1 and taken.rank == taken.position.step % 3

    disk = Disk(run, monkeypatch, refuses, ranks=3)
    for step in (2, 3, 1, *range(2, MAX_FAILED_SAVES + 1)):  # the whole one starts the count again
        disk.save(step)
    with pytest.raises(OSError, match=r"3 checkpoints in a row .* free space there"):
        disk.save(9)


@pytest.mark.parametrize(
    ("keep", "results", "left"),
    [
        ({}, [1, 2, 2, 2], [4, 2]),
        ({"keep_best": False}, [1, 2, 2, 2], [4, 2]),  # also of early stopping
        ({"keep_last": 2, "keep_every_steps": 4}, [None] * 7, [7, 6, 4]),
    ],
)
def test_the_result_and_permanent_ones_are_kept_beside_the_newest(
    run, monkeypatch, keep, results, left
):
    disk = Disk(run, monkeypatch, **keep)
    for step, result in enumerate(results, start=1):
        metrics = {"eval/loss": float(step)}  # the first is the best, and no result
        if result:
            metrics["result/step"] = float(result)
        disk.save(step, num_evals=step, metrics=metrics)
    assert steps(run) == left


def test_what_was_passed_over_on_resume_does_not_count_as_kept(run, monkeypatch):
    """The run goes on from 2, and saves between the damaged ones."""
    first = Disk(run, monkeypatch, keep_last=4)
    for step in (1, 2, 3, 5):
        first.save(step)
    for step in (3, 5):
        run.child(folder_name(step)).child(COMMIT).write(b"{}")
    resumed = Disk(run, monkeypatch, resumes=True, keep_last=2)
    resumed.save(4)
    assert steps(run) == [5, 4, 3, 2]


@pytest.mark.parametrize(("refused", "left"), [("write_note", [2]), ("prune", [2, 1])])
def test_a_save_is_noted_and_old_ones_are_deleted_each_for_itself(run, monkeypatch, refused, left):
    def refuses(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    begin_training(run)
    monkeypatch.setattr(checkpoint_writer, refused, refuses)
    disk = Disk(run, monkeypatch)
    for step in (1, 2):
        disk.save(step)
    assert steps(run) == left
    assert ("training" in read_note(run)) == (refused == "write_note")
    assert [kind for kind, _ in disk.events] == ["old checkpoint left"] * 2


def test_a_writer_whose_run_was_taken_over_commits_and_deletes_nothing(run):
    keep = CheckpointConfig(keep_last=1)
    with hold_lock(run, lambda _: None) as number:

        def taken_over_meanwhile(part: Part) -> list[Part]:
            theirs = {**this_process(run), "host": "node-7"}
            run.child(f"lock-{number + 1:08d}.json").write(json.dumps(theirs).encode())
            return [part]

        CheckpointWriter(run, keep, pytest.fail, number).write(snapshot(1))
        writer = CheckpointWriter(run, keep, pytest.fail, number, taken_over_meanwhile)
        for step in (2, 3):
            with pytest.raises(LockLostError, match=r"taken over by process .* on node-7"):
                writer.write(snapshot(step))
    assert newest_checkpoint(run).position.step == 1
    assert not run.child(folder_name(3)).exists()


def test_an_output_that_is_unmounted_takes_no_checkpoint_until_it_is_back(tmp_path):
    """What would be written below it is not there once it is mounted again."""
    disk, output = tmp_path / "disk", tmp_path / "output"
    disk.mkdir()
    output.mkdir()
    mount, unmount = ["mount", "--bind", str(disk), str(output)], ["umount", str(output)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount")
    events: list[tuple[str, str]] = []
    try:
        run = locate(str(output)).child("run")
        with hold_lock(run, pytest.fail) as number:
            writer = CheckpointWriter(
                run, CheckpointConfig(), lambda kind, text, _: events.append((kind, text)), number
            )
            writer.write(snapshot(1))
            subprocess.run(unmount, check=True)
            writer.write(snapshot(2))
            assert not any(output.iterdir())
            ((kind, text),) = events
            assert kind == "checkpoint failed"
            assert "lock-00000001.json, the file of this run's lock, no longer exists" in text
            subprocess.run(mount, check=True)
            writer.write(snapshot(3))
            assert steps(run) == [3, 1]
    finally:
        subprocess.run(unmount, capture_output=True)
