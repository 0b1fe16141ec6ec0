"""Writing checkpoints beside the training: retries, reports of failures, and what is kept."""

from __future__ import annotations

import time
from collections.abc import Callable

from vit_ray.config.training import CheckpointConfig
from vit_ray.storage import Location
from vit_ray.train.checkpoint import (
    Snapshot,
    count_ranks,
    list_checkpoints,
    open_checkpoint,
    prune,
    write_snapshot,
)

MAX_FAILED_SAVES = 3
SAVE_ATTEMPTS = 4


class CheckpointWriter:
    """Writes one rank's part of each checkpoint; the last rank also removes what is not kept."""

    def __init__(
        self,
        run_folder: Location,
        keep: CheckpointConfig,
        tell: Callable[[str, str, int], object],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`tell`: called with kind, text and step of an event for the run's history."""
        self._run_folder, self._keep = run_folder, keep
        self._tell, self._sleep = tell, sleep
        self._failed_saves = 0

    def write(self, snapshot: Snapshot, name: str) -> None:
        """Write it. A failed save is reported, and training goes on: the next may work.

        Raises:
            OSError: too many in a row have failed.
        """
        folder = self._run_folder.child(name)
        try:
            self._write_with_retries(snapshot, folder)
        except OSError as error:
            self._failed_saves += 1
            self._tell("checkpoint failed", f"{folder.path}: {error}", snapshot.position.step)
            if self._failed_saves >= MAX_FAILED_SAVES:
                raise OSError(
                    f"{self._failed_saves} checkpoints in a row could not be written to "
                    f"{folder.path}: {error}; free space there, or set output to another place"
                ) from error
            return
        self._failed_saves = 0
        try:
            if count_ranks(folder) == snapshot.world_size:
                prune(self._run_folder, self._keep.keep_last, self._best_step())
        except OSError as error:  # the next one removes it
            self._tell(
                "old checkpoint left", f"{self._run_folder.path}: {error}", snapshot.position.step
            )

    def _write_with_retries(self, snapshot: Snapshot, folder: Location) -> None:
        """`write_snapshot`, tried again with growing pauses while the storage refuses it."""
        for attempt in range(SAVE_ATTEMPTS - 1):
            try:
                write_snapshot(snapshot, folder)
            except OSError:
                self._sleep(2.0**attempt)
            else:
                return
        write_snapshot(snapshot, folder)

    def _best_step(self) -> set[int]:
        if not self._keep.keep_best:
            return set()
        opened = [open_checkpoint(folder) for _, folder in list_checkpoints(self._run_folder)]
        losses = {
            c.position.step: c.position.progress.metrics["eval/loss"]
            for c in opened
            if c is not None and c.position.progress.eval_step == c.position.step
        }
        return {min(losses, key=lambda step: losses[step])} if losses else set()
