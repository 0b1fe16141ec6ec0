"""What storage does in the middle of a save: a disk that is really full, a store that is away."""

from typing import Any

import torch

from tests.checkpoints.written import snapshot_of
from tests.data.s3_server import FaultProxy, serve_s3, this_process_uses
from tests.worker.fakes import FakeEngine, Worker, make_job
from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name, open_checkpoint
from vit_ray.checkpoints.checkpoint_writer import CheckpointWriter, Snapshot, take_snapshot
from vit_ray.checkpoints.run_checkpoints import checkpoint_to_resume, list_checkpoints
from vit_ray.config.training_sections import CheckpointConfig
from vit_ray.storage import locate


def taken_at(step: int, size: int) -> Snapshot:
    where = Position(Progress(step), step, step, 1, {"w": [size]}, {}, "print")
    return snapshot_of(0, 1, {"weight|w|0": torch.full((size,), float(step))}, where)


class Engine(FakeEngine):
    """With weights of 0.6 MiB: a disk of 2 MiB holds the last two checkpoints and no third."""

    NUM = 150_000

    def snapshot(self, position: Position, memory: Any = None) -> Snapshot:
        weights = torch.full((self.NUM,), self.weight)
        return take_snapshot([("weight", "w", 0, weights)], position, 0, 1, memory)


def test_a_disk_that_is_full_costs_the_saves_that_find_no_room_and_nothing_else(small_disk):
    worker = Worker(
        make_job(small_disk, checkpoint={"keep_last": 9}), Engine(shapes={"w": [Engine.NUM]})
    )
    for step in (1, 2, 3, 4, 5):
        worker.engine.weight = float(step)
        worker.saver.save(Progress(step=step))
    run = locate(worker.job.recipe.run_folder)
    failed = [text for kind, text, _ in worker.actor.events if kind == "checkpoint failed"]
    assert len(failed) == 2
    assert all("No space left on device" in text for text in failed)
    # Room is made, and the next one counts again.
    (run.child(folder_name(1))).delete()
    worker.engine.weight = 6.0
    worker.saver.save(Progress(step=6))
    newest = checkpoint_to_resume(run)
    assert newest is not None
    assert newest.position.step == 6
    assert float(newest.weights()["w"][0]) == 6.0


def test_a_store_that_is_away_in_a_save_costs_that_save_and_nothing_else(tmp_path):
    (tmp_path / "bucket").mkdir()
    with (
        serve_s3(tmp_path) as upstream,
        FaultProxy(upstream) as proxy,
        this_process_uses(proxy.port),
    ):
        run = locate("s3://bucket/run")
        told: list[tuple[str, str]] = []
        keep = CheckpointConfig(keep_last=9)
        writer = CheckpointWriter(run, keep, lambda kind, text, _: told.append((kind, text)))
        for step in (1, 2, 3):
            proxy.faults.set("503", 1000 if step == 2 else 0, path=folder_name(2))
            writer.write(taken_at(step, 9))
        proxy.faults.set("", 0)
        assert [kind for kind, _ in told] == ["checkpoint failed"]
        newest = checkpoint_to_resume(run)
        assert newest is not None
        assert newest.position.step == 3
        assert [step for step, place in list_checkpoints(run) if open_checkpoint(place)] == [3, 1]
