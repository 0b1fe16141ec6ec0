"""Checkpoints that storage refuses: told, counted whole or not, and in the end an error."""

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any, ClassVar

import pytest
import torch

from tests.checkpoints.written import snapshot_of
from vit_ray.checkpoints import checkpoint_writer
from vit_ray.checkpoints.checkpoint import (
    Position,
    Progress,
    evaluation_note,
    folder_name,
)
from vit_ray.checkpoints.checkpoint_writer import MAX_FAILED_SAVES, CheckpointWriter
from vit_ray.checkpoints.run_checkpoints import (
    NEWEST,
    NONE_YET,
    NoUsableCheckpointError,
    begin_without_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    newest_verified_checkpoint,
)
from vit_ray.checkpoints.snapshot import Snapshot
from vit_ray.config.training_sections import CheckpointConfig
from vit_ray.lock import LockLostError, hold_lock, this_process
from vit_ray.storage import Location, locate


def snapshot(step: int, rank: int = 0, world_size: int = 1, **progress: Any) -> Snapshot:
    where = Position(
        Progress(step, **progress), step, step * 8, 8, {"w": [world_size]}, {}, "print"
    )
    return snapshot_of(rank, world_size, {f"weight|w|{rank}": torch.ones(1)}, where)


class FullDisk:
    """A storage that refuses some writes of a checkpoint, and a writer for each rank."""

    def __init__(
        self,
        folder: Location,
        monkeypatch: pytest.MonkeyPatch,
        refuses: Callable[[Snapshot], bool] = lambda _: False,
        ranks: int = 1,
        **keep: Any,
    ) -> None:
        self.events: list[tuple[str, str]] = []
        self._refuses, self._write = refuses, checkpoint_writer.write_snapshot
        monkeypatch.setattr(checkpoint_writer, "write_snapshot", self.write_snapshot)
        config = CheckpointConfig(**{"keep_last": 1, "keep_best": True, **keep})
        self.writers = [
            CheckpointWriter(folder, config, lambda kind, text, _: self.events.append((kind, text)))
            for _ in range(ranks)
        ]

    def write_snapshot(self, taken: Snapshot, folder: Location) -> None:
        if self._refuses(taken):
            raise OSError(28, "No space left on device")
        self._write(taken, folder)

    def save(self, step: int, **progress: Any) -> None:
        """All ranks write a step; the first one, which waits for the others, last."""
        ranks = len(self.writers)
        for rank in reversed(range(ranks)):
            taken = snapshot(step, rank, ranks, **progress)
            self.writers[rank].write(taken)


def steps(run: Location) -> list[int]:
    return [step for step, _ in list_checkpoints(run)]


def test_a_save_that_fails_is_told_and_the_next_may_work(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, lambda taken: taken.position.step == 1)
    disk.save(1)
    disk.save(2)
    ((kind, text),) = disk.events
    assert kind == "checkpoint failed"
    assert "step-00000001: [Errno 28] No space left on device" in text
    assert steps(run) == [2]


def contents(folder: Location) -> dict[str, bytes]:
    files = folder.list_files(recursive=False)
    return {info.base_name: folder.child(info.base_name).read() for info in files}


def test_what_is_committed_is_not_written_again(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch)
    disk.save(1)
    before = contents(run.child(folder_name(1)))
    disk.save(1, eval_step=1)
    assert contents(run.child(folder_name(1))) == before
    ((kind, text),) = disk.events
    assert kind == "checkpoint failed"
    assert "step 1 is committed; it is left as it is" in text


def test_an_evaluation_after_a_save_is_recorded_beside_it_and_goes_with_it(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, keep_best=False)
    disk.save(1, evaluation_due=True)
    before = contents(run.child(folder_name(1)))
    after = Progress(1, eval_step=1, metrics={"eval/loss": 0.5})
    assert disk.writers[0].note_evaluation(after)
    assert contents(run.child(folder_name(1))) == before
    found = newest_checkpoint(run)
    assert found is not None
    assert found.position.progress == after
    disk.save(2)
    assert [info.base_name for info in run.list_files(recursive=False)] == [NEWEST]
    assert disk.events == []


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b'{"checkpoint_sha256": 1'])
def test_an_evaluation_of_another_checkpoint_of_the_step_is_not_taken_for_its_own(
    run: Location, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    disk, folder = FullDisk(run, monkeypatch), run.child(folder_name(1))
    disk.save(1, evaluation_due=True, train_seconds=1.0)
    disk.writers[0].note_evaluation(Progress(1))
    folder.delete()
    if content is not None:
        evaluation_note(folder).write(content)
    disk.save(1, evaluation_due=True, train_seconds=2.0)
    found = newest_checkpoint(run)
    assert found is not None
    assert found.position.progress == Progress(1, evaluation_due=True, train_seconds=2.0)


def test_a_save_that_is_not_whole_is_out_of_the_way_of_the_one_after_the_evaluation(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 writes first the second time: no index of the first save may be there."""
    disk = FullDisk(run, monkeypatch, lambda t: t.rank == 1 and t.position.progress.evaluation_due,
                    ranks=2)  # fmt: skip
    first, second = disk.writers
    disk.save(1, evaluation_due=True)
    assert not first.note_evaluation(Progress(1))
    second.write(snapshot(1, 1, 2))
    assert newest_checkpoint(run) is None
    first.write(snapshot(1, 0, 2))
    found = newest_checkpoint(run)
    assert found is not None
    assert not found.position.progress.evaluation_due
    assert run.child(folder_name(1) + ".damaged").exists()
    kinds = [kind for kind, _ in disk.events]
    assert kinds == ["checkpoint failed", "checkpoint failed", "damaged checkpoint"]


def test_a_disk_that_stays_full_ends_the_run_with_what_to_do(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, lambda _: True)
    for step in range(1, MAX_FAILED_SAVES):
        disk.save(step)
    with pytest.raises(OSError, match=r"3 checkpoints in a row .* free space there"):
        disk.save(9)


def test_saves_are_counted_whole_or_not_whichever_rank_fails(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 1 and 2 fail in turns, and none of them fails twice in a row."""

    def refuses(taken: Snapshot) -> bool:
        return taken.rank == 1 + taken.position.step % 2

    disk = FullDisk(run, monkeypatch, refuses, ranks=3)
    for step in (1, 2):
        disk.save(step)
    with pytest.raises(OSError, match="3 checkpoints in a row"):
        disk.save(3)
    told = [text for kind, text in disk.events if "not whole" in text]
    assert [text.rpartition(" ")[2] for text in told] == ["2", "1", "2"]


def test_a_whole_save_between_starts_the_count_again(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, lambda t: t.rank == 1 and t.position.step % 3 != 0, ranks=2)
    for step in range(1, 10):
        disk.save(step)
    assert 9 in steps(run)
    assert newest_checkpoint(run).position.step == 9


def test_ranks_that_see_folders_of_their_own_end_the_run(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output on a path that nodes do not share: no part of rank 1 ever comes."""
    monkeypatch.setattr(checkpoint_writer, "PARTS_S", 0.1)
    disk = FullDisk(run, monkeypatch, ranks=2)
    disk.writers[1] = FullDisk(locate(run.path + "-elsewhere"), monkeypatch).writers[0]
    for step in (1, 2):
        disk.save(step)
    with pytest.raises(OSError, match="another place that all workers share"):
        disk.save(3)


def test_the_first_rank_waits_for_the_part_of_one_that_still_writes(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, ranks=2, keep_last=2)
    first, second = disk.writers
    for step in (1, 2, 3):
        waits = Thread(target=first.write, args=(snapshot(step, 0, 2),))
        waits.start()
        waits.join(0.2)
        assert waits.is_alive()
        assert newest_checkpoint(run) is None or newest_checkpoint(run).position.step < step
        second.write(snapshot(step, 1, 2))
        waits.join(60)
        assert newest_checkpoint(run).position.step == step
    assert steps(run) == [3, 2]
    assert disk.events == []


class CountedFolder(Location):
    """Counts what is asked of files below a run's folder."""

    reads: ClassVar[list[str]] = []

    def child(self, name: str) -> "CountedFolder":
        return CountedFolder(self.protocol, super().child(name).path)

    def read_range(self, offset: int, length: int | None = None) -> bytes:
        self.reads.append(self.path.rpartition("/")[2])
        return super().read_range(offset, length)


@pytest.mark.parametrize("ranks", [2, 16])
def test_each_file_is_read_back_by_one_rank_and_one_rank_commits(
    run: Location, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """However many write at the same time, and whichever is last."""
    monkeypatch.setattr(CountedFolder, "reads", [])
    commits: list[int] = []
    plain = checkpoint_writer.commit
    monkeypatch.setattr(checkpoint_writer, "commit", lambda *a: (commits.append(1), plain(*a)))
    disk = FullDisk(CountedFolder(run.protocol, run.path), monkeypatch, ranks=ranks)
    with ThreadPoolExecutor(ranks) as threads:
        for rank in Random(3).sample(range(ranks), ranks):
            taken = snapshot(1, rank, ranks)
            threads.submit(disk.writers[rank].write, taken)
    assert commits == [1]
    assert disk.events == []
    counts = Counter(CountedFolder.reads)
    tensors = [name for name in counts if name.endswith(".safetensors")]
    assert len(tensors) == ranks
    assert {counts[name] for name in tensors} == {1}
    # Rank 0 reads an index twice, as it has no checksum yet.
    assert max(counts.values()) == 2


def test_a_save_reads_no_index_of_an_older_checkpoint(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a file for each rank, and there may be many that are to stay."""
    monkeypatch.setattr(CountedFolder, "reads", [])
    folder = CountedFolder(run.protocol, run.path)
    disk = FullDisk(folder, monkeypatch, ranks=4, keep_every_steps=2)
    for step in range(1, 9):
        disk.save(step, metrics={"eval/loss": 9.0 - step}, eval_step=step)
    assert steps(run) == [8, 6, 4, 2]
    counts = Counter(CountedFolder.reads)
    indexes = [counts[name] for name in counts if name.startswith("rank-") and "json" in name]
    assert indexes == [2 * 8] * 4
    assert disk.events == []


def test_failures_of_the_first_rank_count_together_with_those_of_others(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 fails at step 2, rank 0 at steps 3 and 4: at the third of them it is known."""
    failing = {(2, 1), (3, 0), (4, 0)}
    disk = FullDisk(run, monkeypatch, lambda t: (t.position.step, t.rank) in failing, ranks=2)
    for step in (1, 2, 3):
        disk.save(step)
    with pytest.raises(OSError, match="3 checkpoints in a row"):
        disk.save(4)


def test_the_best_is_kept_beside_the_newest(run: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(run, monkeypatch)
    for step, loss in ((1, 2.0), (2, 0.5), (3, 1.0), (4, 3.0)):
        disk.save(step, eval_step=step, metrics={"eval/loss": loss})
    assert steps(run) == [4, 2]


def test_the_best_is_kept_where_early_stopping_makes_it_the_result(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, keep_best=False)
    for step, loss in ((1, 2.0), (2, 0.5), (3, 1.0), (4, 3.0)):
        metrics = {"eval/loss": loss, "result/step": float(min(step, 2))}
        disk.save(step, eval_step=step, metrics=metrics)
    assert steps(run) == [4, 2]


def test_without_either_the_newest_alone_are_kept(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, keep_best=False)
    for step, loss in ((1, 2.0), (2, 0.5), (3, 1.0)):
        disk.save(step, eval_step=step, metrics={"eval/loss": loss})
    assert steps(run) == [3]


def test_of_equal_losses_the_first_is_kept_as_it_is_the_result(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, keep_last=2)
    for step, loss in ((1, 0.5), (2, 0.5), (3, 1.0), (4, float("inf"))):
        disk.save(step, eval_step=step, metrics={"eval/loss": loss})
    assert steps(run) == [4, 3, 1]


def test_where_weights_are_averaged_theirs_is_the_best(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch)
    for step, last, averaged in ((1, 0.1, 2.0), (2, 3.0, 0.5), (3, 0.2, 1.0), (4, 2.0, 3.0)):
        losses = {"eval/loss": last, "eval/averaged_loss": averaged}
        disk.save(step, eval_step=step, metrics=losses)
    assert steps(run) == [4, 2]


def test_losses_of_averaged_and_of_last_weights_are_not_compared(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where averaging is switched off in the middle of a run."""
    disk = FullDisk(run, monkeypatch)
    for step, loss in ((1, 0.5), (2, 0.4)):
        both = {"eval/loss": 9.0, "eval/averaged_loss": loss}
        disk.save(step, eval_step=step, metrics=both)
    for step, loss in ((3, 2.0), (4, 1.0), (5, 1.5)):
        disk.save(step, eval_step=step, metrics={"eval/loss": loss})
    assert steps(run) == [5, 4, 2]


def test_a_loss_that_is_not_finite_is_never_the_best(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch)
    for step, loss in ((1, 2.0), (2, 0.5), (3, 1.0), (4, float("nan"))):
        disk.save(step, eval_step=step, metrics={"eval/loss": loss})
    assert steps(run) == [4, 2]


def test_permanent_ones_are_kept_beside_the_newest(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, keep_every_steps=4, keep_last=2)
    for step in range(2, 16, 2):
        disk.save(step)
    assert steps(run) == [14, 12, 8, 4]


def test_a_writer_whose_run_was_taken_over_commits_and_deletes_nothing(run: Location) -> None:
    with hold_lock(run, lambda _: None) as number:
        writer = CheckpointWriter(run, CheckpointConfig(keep_last=1), lambda *_: None, number)
        writer.write(snapshot(1))
        theirs = {**this_process(run), "host": "node-7"}
        run.child(f"lock-{number + 1:08d}.json").write(json.dumps(theirs).encode())
        with pytest.raises(LockLostError, match=r"taken over by process .* on node-7"):
            writer.write(snapshot(2))
    assert steps(run) == [1]


def test_a_run_taken_over_while_it_writes_is_not_committed(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = iter([None, LockLostError("gone")])

    def check(*_: object) -> None:
        if error := next(checks):
            raise error

    monkeypatch.setattr(checkpoint_writer, "check_lock", check)
    writer = CheckpointWriter(run, CheckpointConfig(), lambda *_: None, 1)
    with pytest.raises(LockLostError):
        writer.write(snapshot(1))
    assert newest_checkpoint(run) is None


def test_the_first_commit_ends_the_note_that_there_is_none(run: Location) -> None:
    begin_without_checkpoint(run, lambda _: None)
    assert run.child(NONE_YET).exists()
    CheckpointWriter(run, CheckpointConfig(), lambda *_: None).write(snapshot(1))
    assert not run.child(NONE_YET).exists()


def test_a_run_whose_checkpoints_have_all_gone_does_not_start_at_step_0(run: Location) -> None:
    """As by a bucket's lifecycle rule, or by hand."""
    writer = CheckpointWriter(run, CheckpointConfig(), lambda *_: None)
    for step in (1, 2):
        writer.write(snapshot(step))
    for step in (1, 2):
        run.child(folder_name(step)).delete()
    for _ in range(2):
        with pytest.raises(NoUsableCheckpointError, match=r"folders are gone, .*newest_checkpoint"):
            newest_verified_checkpoint(run, lambda _: None)
    assert json.loads(run.child(NEWEST).read())["step"] == 2
    begin_without_checkpoint(run, lambda _: None)  # resume=from_zero
    assert newest_verified_checkpoint(run, lambda _: None) is None
    writer.write(snapshot(1))
    run.child(folder_name(1)).delete()
    with pytest.raises(NoUsableCheckpointError):
        newest_verified_checkpoint(run, lambda _: None)


def test_old_ones_go_with_the_commit_of_a_newer_one(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(run, monkeypatch, ranks=2)
    disk.save(1)
    disk.writers[1].write(snapshot(2, 1, 2))
    assert steps(run) == [2, 1]
    disk.writers[0].write(snapshot(2, 0, 2))
    assert steps(run) == [2]


def test_an_output_that_is_unmounted_takes_no_checkpoint_until_it_is_back(tmp_path: Path) -> None:
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
