"""Writing checkpoints beside the training: reports of failures, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Callable

from vit_ray.config.training_sections import CheckpointConfig
from vit_ray.lock import check_lock
from vit_ray.storage import Location
from vit_ray.train.checkpoint import Snapshot, open_checkpoint, write_snapshot
from vit_ray.train.checkpoint_format import DamagedCheckpointError, is_committed, missing_ranks
from vit_ray.train.run_checkpoints import NONE_YET, list_checkpoints, prune

MAX_FAILED_SAVES = 3


class CheckpointWriter:
    """Writes one rank's part of each checkpoint.

    The rank that writes last commits it and removes what is not kept. Rank 0 counts those that did
    not become whole, whichever rank was at fault.
    """

    def __init__(
        self,
        run_folder: Location,
        keep: CheckpointConfig,
        tell: Callable[[str, str, int], object],
        lock_number: int | None = None,
    ) -> None:
        """
        Args:
            tell: called with kind, text and step of an event for the run's history.
            lock_number: the driver's lock of the run; None = nobody holds it.
        """
        self._run_folder, self._keep, self._tell = run_folder, keep, tell
        self._lock_number = lock_number
        self._failed_saves, self._step = 0, 0
        self._last: tuple[Location, int] | None = None
        """Folder and ranks of the last save, while it is not known to be whole."""
        self._read_back: set[int] = set()

    def write(self, snapshot: Snapshot, name: str) -> None:
        """Write it. A failed save is reported, and training goes on: the next may work.

        All ranks have ended their part of the save before when this is called.

        Raises:
            OSError: too many in a row have failed.
            LockLostError: another driver has taken the run over.
        """
        folder = self._run_folder.child(name)
        is_first, self._step = snapshot.rank == 0, snapshot.position.step
        if is_first:
            self._count_last()
        try:
            self._check_lock()
            is_whole = write_snapshot(snapshot, folder, self._check_lock)
        except (OSError, DamagedCheckpointError) as error:
            self._tell("checkpoint failed", f"{folder.path}: {error}", self._step)
            if is_first:
                self._count_failure(folder, str(error))
            return
        self._last = (folder, snapshot.world_size)
        if is_whole:
            self._read_back.add(self._step)
            self._remove_old()

    def is_whole(self, name: str) -> bool:
        """Whether a save has been committed; for when all ranks have ended their part."""
        try:
            return is_committed(self._run_folder.child(name))
        except OSError:
            return False

    def _count_last(self) -> None:
        """See what became of the save before, by what is in storage."""
        if self._last is None:
            return
        folder, world_size = self._last
        self._last = None
        try:
            if is_committed(folder):
                self._failed_saves = 0
                return
            missing = missing_ranks(folder, world_size)
        except OSError as error:
            self._count_failure(folder, str(error))
            return
        ranks = ", ".join(map(str, missing[:8])) or "none"
        reason = f"not whole: of {world_size} workers these have not written their part: {ranks}"
        self._tell("checkpoint failed", f"{folder.path} is {reason}", self._step)
        self._count_failure(folder, reason)

    def _count_failure(self, folder: Location, reason: str) -> None:
        self._failed_saves += 1
        if self._failed_saves >= MAX_FAILED_SAVES:
            raise OSError(
                f"{self._failed_saves} checkpoints in a row could not be written to "
                f"{folder.path}: {reason}; free space there, or set output to another place that "
                "all workers share"
            )

    def _check_lock(self) -> None:
        if self._lock_number is not None:
            check_lock(self._run_folder, self._lock_number)

    def _remove_old(self) -> None:
        keep_last = self._keep.keep_last
        try:
            self._run_folder.child(NONE_YET).delete()
            keep = self._permanent()
            prune(self._run_folder, keep_last, keep, self._read_back, self._tell_set_aside)
        except (OSError, ValueError) as error:  # the next one removes it, or a newer version
            self._tell("old checkpoint left", f"{self._run_folder.path}: {error}", self._step)

    def _tell_set_aside(self, text: str) -> None:
        self._tell("damaged checkpoint", text, self._step)

    def _permanent(self) -> set[int]:
        """Steps that stay however old they are."""
        steps = [step for step, _ in list_checkpoints(self._run_folder)]
        every = self._keep.keep_every_steps
        kept = {step for step in steps if every is not None and step % every == 0}
        return kept | self._best_step() if self._keep.keep_best else kept

    def _best_step(self) -> set[int]:
        opened = {s: open_checkpoint(folder) for s, folder in list_checkpoints(self._run_folder)}
        # What cannot be opened now may be the best: `prune` judges whether it is damaged.
        unknown = {step for step, found in opened.items() if found is None}
        measured = [found.position.progress for found in opened.values() if found is not None]
        losses = {p.step: p.metrics["eval/loss"] for p in measured if p.eval_step == p.step}
        finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
        return unknown | ({min(finite, key=finite.__getitem__)} if finite else set())
