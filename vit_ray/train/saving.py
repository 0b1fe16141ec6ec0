"""A worker's checkpoints: when training may go on, what they hold, and how one is restored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import deepcopy
from importlib.metadata import version
from typing import Protocol

import torch

from vit_ray.lock import LockLostError, sees_lock
from vit_ray.storage import Location, locate
from vit_ray.train.checkpoint import Checkpoint, Position, Snapshot, folder_name, open_checkpoint
from vit_ray.train.checkpoint_writer import CheckpointWriter
from vit_ray.train.job import TrainJob, UnrecoverableError
from vit_ray.train.progress import Progress
from vit_ray.train.run_link import RunLink
from vit_ray.train.watchdog import Watchdog

Publish = Callable[[str, dict[str, float], Callable[[], None]], None]
"""(folder name, metrics, write): have `write` run beside the training, and the result known."""


class SavesState(Protocol):
    """What saving needs of an engine."""

    shapes: dict[str, list[int]]

    @property
    def applied_steps(self) -> int: ...
    def snapshot(self, position: Position) -> Snapshot: ...


class CheckpointSaver:
    """Takes snapshots of the engine, and has them written while training goes on."""

    def __init__(
        self,
        job: TrainJob,
        engine: SavesState,
        writer: CheckpointWriter,
        publish: Publish,
        link: RunLink,
        watchdog: Watchdog,
    ) -> None:
        self._job, self._engine, self._link = job, engine, link
        self._writer, self._publish, self._watchdog = writer, publish, watchdog
        self._written = threading.Event()
        self._written.set()

    def save(self, progress: Progress) -> float:
        """Copy the state now and write it beside the training.

        Returns:
            Seconds for which training stood still.
        """
        start_s = time.perf_counter()
        self._watchdog.pause()  # publishing waits for the slowest rank
        self.wait_until_written()  # storage slower than the cadence must not pile up copies
        self._written.clear()
        position = make_position(self._job, self._engine, progress, self._link.tracking_run_id())
        snapshot = self._engine.snapshot(position)
        name = folder_name(progress.step)
        self._publish(name, dict(progress.metrics), lambda: self._write(snapshot, name))
        self._watchdog.resume()
        return time.perf_counter() - start_s

    def wait_until_written(self) -> None:
        """Until this rank's part of the last checkpoint is written, or has failed."""
        self._written.wait()

    def is_whole(self, step: int) -> bool:
        """Whether the checkpoint of a step has landed; for when all ranks have written."""
        return self._writer.is_whole(folder_name(step))

    def _write(self, snapshot: Snapshot, name: str) -> None:
        try:
            self._writer.write(snapshot, name)
        except (OSError, LockLostError) as error:
            self._link.fail(str(error))  # a restart would not help
            raise
        finally:
            self._written.set()


def check_folder_is_shared(job: TrainJob, node: str) -> None:
    """This worker sees the folder in which the driver's lock is.

    Raises:
        UnrecoverableError: it does not; no checkpoint would ever become whole.
    """
    folder = locate(job.run_folder)
    if job.lock_number is not None and not sees_lock(folder, job.lock_number):
        raise UnrecoverableError(
            f"the worker on {node} does not see the driver's files in {folder.uri}; output must "
            "be a path that all nodes share (NFS, Lustre), or an s3:// address",
            is_agreed=False,
        )


def make_position(
    job: TrainJob, engine: SavesState, progress: Progress, tracking_run_id: str | None
) -> Position:
    """Where the run stands now; the loop may advance `progress` afterwards."""
    batch = job.recipe.train.global_batch_size
    return Position(
        progress=deepcopy(progress),
        applied_steps=engine.applied_steps,
        samples_seen=progress.step * batch,
        global_batch_size=batch,
        shapes=engine.shapes,
        recipe=job.recipe.model_dump(mode="json"),
        data_fingerprint=job.data_fingerprint,
        tracking_run_id=tracking_run_id,
        versions={"ray": version("ray"), "torch": torch.__version__},
    )


def open_chosen_checkpoint(run_folder: Location, step: int) -> Checkpoint:
    """The checkpoint that all ranks agreed on, whatever has come to storage since.

    Raises:
        RuntimeError: it is no longer there.
    """
    checkpoint = open_checkpoint(run_folder.child(folder_name(step)))
    if checkpoint is None:
        raise RuntimeError(f"checkpoint {step} of {run_folder.path} has gone")
    return checkpoint
