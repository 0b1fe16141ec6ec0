"""What a worker's checkpoints hold, when training may go on, and from which one a group starts."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoints.written import (
    WEIGHTS_0,
    WEIGHTS_1,
    flip,
    position,
    snapshot_of,
    values,
    write_checkpoint,
)
from tests.training.ranks import run_ranks
from tests.worker.fakes import BATCH, FakeEngine, Worker, make_job
from vit_ray.checkpoints.checkpoint import Checkpoint, Position, Progress, folder_name
from vit_ray.checkpoints.checkpoint_format import COMMIT
from vit_ray.checkpoints.checkpoint_writer import CheckpointWriter, Part, Snapshot
from vit_ray.checkpoints.run_checkpoints import checkpoint_to_resume, newest_checkpoint
from vit_ray.config.training_sections import CheckpointConfig
from vit_ray.outcomes import LockLostError, RunFailedError
from vit_ray.storage import locate
from vit_ray.training.collectives import read_by_first
from vit_ray.training.training_state import fill_on_all_ranks
from vit_ray.worker import saving
from vit_ray.worker.attempt import reported_failures
from vit_ray.worker.saving import gather_by_own_group, make_position, restore_newest


def test_a_position_is_of_the_moment_it_was_made(tmp_path):
    terms = {"license": "CC-BY-4.0"}
    job, engine = replace(make_job(tmp_path), data_terms=terms), FakeEngine(weight=3.0)
    progress = Progress(step=4, metrics={"train/loss": 1.0})
    position = make_position(job, engine, progress)
    progress.step, progress.metrics["train/loss"] = 5, 9.0
    assert position.progress == Progress(step=4, metrics={"train/loss": 1.0})
    assert (position.applied_steps, position.samples_seen) == (3, 4 * BATCH)
    assert (position.data_fingerprint, position.recipe["name"]) == ("print", "run")
    assert Position.from_json(asdict(position)).data_terms == terms


def test_the_next_save_waits_until_the_last_is_written_and_takes_its_memory(tmp_path, monkeypatch):
    """Storage that is slower than the cadence accumulates no copies."""
    worker = Worker(make_job(tmp_path))
    writes: list[Callable[[], None]] = []
    worker.saver._run_beside = writes.append
    plain = FakeEngine.snapshot
    given: list[Any] = []
    taken: list[Snapshot] = []

    def snapshot(engine: FakeEngine, position: Position, memory: Any = None) -> Snapshot:
        given.append(memory)
        taken.append(plain(engine, position, memory))
        return taken[-1]

    monkeypatch.setattr(FakeEngine, "snapshot", snapshot)
    asked: list[float] = []
    worker.actor.run_id = lambda wait_s: asked.append(wait_s)  # type: ignore[method-assign]
    worker.engine.weight = 1.0
    worker.saver.save(Progress(step=1))
    assert asked == []  # the record may be busy, or wait for MLflow
    worker.engine.weight = 2.0
    second = threading.Thread(target=worker.saver.save, args=(Progress(step=2),))
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive()
    assert worker.link.watchdog._limit_s == math.inf  # not the limit of a step
    assert len(taken) == 1  # nothing is copied into what is being written
    writes.pop()()
    second.join(timeout=30)
    assert not second.is_alive()
    writes.pop()()
    assert given == [None, taken[0].memory]
    assert given[1]["weights"] is taken[1].memory["weights"]
    checkpoint = newest_checkpoint(locate(worker.job.recipe.run_folder))
    assert (checkpoint.position.step, float(checkpoint.weights()["w"])) == (2, 2.0)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError("disk full"), RunFailedError),
        (LockLostError("has been taken over"), LockLostError),
        # A rank that is late ends the attempt, after which the driver starts another group.
        (RuntimeError("some worker has not ended its part"), RuntimeError),
    ],
)
def test_storage_that_refuses_too_often_fails_the_run(error, raised, tmp_path, monkeypatch):
    worker = Worker(make_job(tmp_path))

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(worker.saver.writer, "write", refuse)
    worker.saver.save(Progress(step=1))
    for meets_it in (worker.saver.wait_until_written, lambda: worker.hooks.note_step(2, 0.0)):
        with pytest.raises(raised, match=str(error)) as met:
            meets_it()
        assert type(met.value) is raised
    with pytest.raises(raised), reported_failures(worker.link):
        worker.saver.check()
    assert (worker.actor.failed is None) is (raised is RuntimeError)


def test_storage_that_does_not_answer_is_reported_and_not_waited_for_without_limit(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(saving, "REMIND_S", 0.01)
    worker = Worker(make_job(tmp_path))
    worker.saver._run_beside = lambda write: None
    worker.saver.save(Progress(step=1))
    with pytest.raises(TimeoutError, match="waiting for the previous checkpoint"):
        worker.saver.wait_until_written(timeout_s=0.03)
    assert set(worker.kinds()) == {"storage slow"}


def sum_of_ranks() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def save_on_ranks(rank: int, folder: str) -> tuple[list[str], set[float]]:
    """Five saves of which rank 1 fails the third, while this thread's sums go on."""
    warnings: list[str] = []
    world_size, sums = dist.get_world_size(), set[float]()
    writer = CheckpointWriter(
        locate(folder), CheckpointConfig(), lambda *event: warnings.append(event[1]), None,
        gather_by_own_group(),
    )  # fmt: skip
    for step in range(1, 6):
        where = Position(Progress(step), step, step, 1, {"w": [world_size]}, {}, "print")
        part = {f"weight|w|{rank}": torch.full((1,), float(step))}
        taken = snapshot_of(rank, world_size, part, where)
        if (rank, step) == (1, 3):
            taken = replace(taken, memory={"weights": "of no tensor"})
        writing = threading.Thread(target=writer.write, args=(taken,))
        writing.start()
        sums |= {sum_of_ranks() for _ in range(100)}
        writing.join()
    return warnings, sums


def test_ranks_that_write_wait_for_each_other_in_a_group_of_their_own(tmp_path):
    found = run_ranks(3, save_on_ranks, str(tmp_path))
    assert [len(warnings) for warnings, _ in found] == [1, 0, 0]
    assert "1 of 3 workers failed: rank 1: " in found[0][0][0]
    assert [sums for _, sums in found] == [{3.0}] * 3
    newest = newest_checkpoint(locate(str(tmp_path)))
    assert newest.weights()["w"].tolist() == [5.0] * 3


def late_on_ranks(rank: int, given_up: Path) -> tuple[str, float]:
    """Rank 1 writes until rank 0 has given it up, and this thread's sums go on."""
    saving.WRITE_TIMEOUT_S = 5.0  # type: ignore[misc]
    gather, told = gather_by_own_group(), ""
    deadline_s = time.monotonic() + 60
    while rank == 1 and not given_up.exists():
        assert time.monotonic() < deadline_s, "rank 0 still waits"
        time.sleep(0.1)
    try:
        gather(Part([]))
    except RuntimeError as error:
        told = str(error)
    given_up.touch()
    return told, sum_of_ranks()


def test_a_rank_that_is_late_is_an_error_of_the_group(tmp_path):
    found = run_ranks(2, late_on_ranks, tmp_path / "given up")
    assert "has not ended its part of a checkpoint (gloo: " in found[0][0]
    assert [total for _, total in found] == [2.0, 2.0]


CPU = torch.device("cpu")


class Engine:
    """Each of two ranks needs a parameter that lies in files of its own."""

    def __init__(self, rank: int) -> None:
        self.device, self.state = CPU, self
        self.weight = torch.zeros(5)
        start = ("a", 0) if rank == 0 else ("b", 0)
        self._entries = [("weight", *start, self.weight)]

    def restore(self, checkpoint: Checkpoint) -> str:
        return fill_on_all_ranks(checkpoint, self._entries)


def resume(rank: int, *folders: Path) -> list[tuple[Any, list[float], list[str]]]:
    """Of each folder the step, this rank's values and warnings; or why there is none."""
    found = []
    for folder in folders:
        warnings: list[str] = []
        engine: Any = Engine(rank)
        find = partial(checkpoint_to_resume, locate(str(folder)), warnings.append)
        try:
            newest = read_by_first(find, CPU)
            if newest is not None:
                newest = restore_newest(engine, newest, find, warnings.append)
            step = newest and newest.position.step
        except ValueError as error:
            step = str(error)
        found.append((step, engine.weight.tolist(), warnings))
    return found


def expected(step: int) -> list[list[float]]:
    return [values(step)["a"][:5].tolist(), values(step)["b"].tolist()]


def test_all_ranks_fall_back_together_to_the_newest_that_each_can_read(tmp_path):
    """A new run has none, and nothing but damage is an error on all and not a new start."""
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
    warnings = [text.removeprefix(f"checkpoint file {damaged}/") for text in found[0][2]]
    assert warnings == [
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
