"""A worker's checkpoints: from which it resumes, what they contain, and when training waits."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from typing import Final

import torch
import torch.distributed as dist

from vit_ray.checkpoints.checkpoint import Checkpoint, Position, Progress
from vit_ray.checkpoints.checkpoint_writer import CheckpointWriter, Gather, Part, Snapshot
from vit_ray.outcomes import EventKind, RunFailedError
from vit_ray.training.collectives import read_by_first
from vit_ray.training.engine import DeepSpeedEngine
from vit_ray.worker.job import TrainJob
from vit_ray.worker.run_link import RunLink

# Longest wait for the previous checkpoint, with all retries while storage is away.
WRITE_TIMEOUT_S: Final = 1800.0
REMIND_S: Final = 60.0

# Finds the newest complete checkpoint of the run: `checkpoint_to_resume`, for the run's folder.
FindCheckpoint = Callable[..., Checkpoint | None]


def start_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread that does not delay the end of the process."""
    threading.Thread(target=work, daemon=True, name="checkpoint-writer").start()


def gather_by_own_group() -> Gather:
    """A gather for the threads that write checkpoints; all ranks call this in their main threads.

    It has a separate process group: in the training's group, the order of collectives from two
    threads would differ between ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return lambda part: [part]
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITE_TIMEOUT_S))

    def gather(part: Part) -> list[Part]:
        parts: list[Part] = [part] * world_size if rank == 0 else []
        try:
            dist.gather_object(part, parts or None, dst=0, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"some worker has not ended its part of a checkpoint (gloo: {error})"
            ) from error
        return parts

    return gather


class CheckpointSaver:
    """Takes snapshots of the training state, and writes them in a thread."""

    def __init__(
        self,
        job: TrainJob,
        engine: DeepSpeedEngine,
        writer: CheckpointWriter,
        link: RunLink,
        run_beside: Callable[[Callable[[], None]], object] = start_thread,
    ) -> None:
        """`run_beside`: starts a function, which does not raise, and returns at once."""
        self._job, self._engine, self._link = job, engine, link
        self.writer, self._run_beside = writer, run_beside
        # Results in the memory of the last snapshot, for the next snapshot.
        self._writing = Future[dict[str, torch.Tensor] | None]()
        self._writing.set_result(None)

    def save(self, progress: Progress) -> float:
        """Copy the state now and write it while training continues.

        Returns:
            The seconds that training waited.

        Raises:
            RunFailedError: as `wait_until_written`, for the previous checkpoint.
        """
        start_s = time.perf_counter()
        with self._link.watchdog.paused():  # `wait_until_written` has a limit
            memory = self.wait_until_written()  # slow storage must not accumulate snapshots
            position = make_position(self._job, self._engine, progress)
            snapshot = self._engine.state.snapshot(position, memory)
            self._writing = Future()
            self._run_beside(partial(self._write, snapshot, self._writing))
        return time.perf_counter() - start_s

    def wait_until_written(
        self, timeout_s: float = WRITE_TIMEOUT_S
    ) -> dict[str, torch.Tensor] | None:
        """Wait until this rank's part of the last checkpoint is written; warns once a minute.

        Returns:
            The memory of its snapshot, which may now be overwritten.

        Raises:
            RunFailedError: as `check`.
            RuntimeError: as `check`.
            TimeoutError: the storage does not answer.
        """
        start_s, folder = time.monotonic(), self._job.recipe.run_folder
        while wait([self._writing], REMIND_S).not_done:
            waited_s = time.monotonic() - start_s
            text = f"{folder}: waiting for the previous checkpoint for {waited_s:.0f} s"
            self._link.record.event(EventKind.STORAGE_SLOW, text, 0)
            if waited_s > timeout_s:
                raise TimeoutError(text)
        self.check()
        return self._writing.result()

    def check(self) -> None:
        """Raise the error that ended the writing, if any; does not wait.

        Raises:
            RunFailedError: too many checkpoints in a row could not be written.
            LockLostError: another driver has taken over the run.
            RuntimeError: some rank has died or is late.
        """
        error = self._writing.exception() if self._writing.done() else None
        if isinstance(error, OSError):
            raise RunFailedError(str(error)) from error
        if error is not None:
            raise error  # the next group of workers can save again

    def _write(self, snapshot: Snapshot, writing: Future[dict[str, torch.Tensor] | None]) -> None:
        try:
            run_id = self._link.tracking_run_id()  # takes up to `RUN_ID_S`
            position = replace(snapshot.position, tracking_run_id=run_id)
            self.writer.write(replace(snapshot, position=position))
            writing.set_result(snapshot.memory)
        except Exception as error:  # the next `check` raises it
            writing.set_exception(error)


def make_position(job: TrainJob, engine: DeepSpeedEngine, progress: Progress) -> Position:
    """A copy of the run's present position, without MLflow's run id, for which training does not
    wait.
    """
    batch = job.recipe.train.global_batch_size
    return Position(
        progress=deepcopy(progress),
        applied_steps=engine.state.applied_steps,
        samples_seen=progress.step * batch,
        global_batch_size=batch,
        shapes=engine.state.shapes,
        recipe=job.recipe.recorded(),
        data_fingerprint=job.data_fingerprint,
        data_terms=dict(job.data_terms),
        init_run_id=job.init_run_id,
        versions={"ray": version("ray"), "torch": torch.__version__},
    )


def restore_newest(
    engine: DeepSpeedEngine, newest: Checkpoint, find: FindCheckpoint, warn: Callable[[str], object]
) -> Checkpoint:
    """Restore the checkpoint, or an older one if a rank finds it damaged; all ranks call this.

    Args:
        find: called on rank 0 with `below`: only checkpoints before this step.
        warn: called with the reason why a checkpoint is not used.

    Returns:
        The checkpoint that was restored.

    Raises:
        ValueError: no checkpoint can be used, or storage does not answer.
    """
    while damage := engine.state.restore(newest):
        warn(f"{damage}; passed over")
        older = read_by_first(partial(find, below=newest.position.step), engine.device)
        assert isinstance(older, Checkpoint), "`find` raises an error instead"
        newest = older
    return newest
