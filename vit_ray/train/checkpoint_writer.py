"""Writes checkpoints while training goes on: reports failures, and removes old ones."""

from __future__ import annotations

import math
from collections.abc import Callable

from vit_ray.config.training_sections import CheckpointConfig
from vit_ray.lock import check_lock
from vit_ray.measure.best_evaluation import STEP
from vit_ray.outcomes import EventKind
from vit_ray.storage import Location
from vit_ray.train.cadence import Cadence
from vit_ray.train.checkpoint import Snapshot, open_checkpoint, write_evaluation, write_snapshot
from vit_ray.train.checkpoint_format import DamagedCheckpointError, is_committed, missing_ranks
from vit_ray.train.progress import Progress
from vit_ray.train.run_checkpoints import NONE_YET, list_checkpoints, prune, set_aside

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
        tell: Callable[[EventKind, str, int], object],
        lock_number: int | None = None,
    ) -> None:
        """
        Args:
            tell: called with kind, text and step of an event for the run's history.
            lock_number: the driver's lock of the run; None = nobody holds it.
        """
        self._run_folder, self._keep, self._tell = run_folder, keep, tell
        self._lock_number = lock_number
        self._number, self._step = 0, 0
        self._unjudged: dict[int, tuple[Location, int]] = {}
        """By number of the save, folder and ranks of those that may not be whole."""
        self._is_whole: dict[int, bool] = {}
        self._read_back: set[int] = set()

    def write(self, snapshot: Snapshot, name: str) -> None:
        """Write it. A failed save is reported, and training goes on: the next may work.

        Raises:
            OSError: too many in a row have failed.
            LockLostError: another driver has taken the run over.
        """
        folder = self._run_folder.child(name)
        is_first, self._step = snapshot.rank == 0, snapshot.position.step
        self._number += 1
        if is_first:
            self._judge_earlier()
        try:
            self._check_lock()
            is_whole = write_snapshot(snapshot, folder, self._check_lock)
        except (OSError, DamagedCheckpointError) as error:
            self._tell(EventKind.CHECKPOINT_FAILED, f"{folder.path}: {error}", self._step)
            if is_first:
                self._is_whole[self._number] = False
                self._end_if_too_many(folder, str(error))
            return
        if is_first:
            self._unjudged[self._number] = (folder, snapshot.world_size)
        if is_whole:
            self._read_back.add(self._step)
            self._remove_old()

    def note_evaluation(self, progress: Progress, name: str) -> bool:
        """Record how far the run is after an evaluation at the step of a whole save.

        A save that is not whole is set aside, so that no part of it is taken for one of the next. A
        note that cannot be written is reported: the next start makes the evaluation again.

        Returns:
            False if the step is to be saved again.

        Raises:
            LockLostError: another driver has taken the run over.
        """
        self._check_lock()
        folder = self._run_folder.child(name)
        try:
            if is_committed(folder):
                write_evaluation(folder, progress)
            else:
                if folder.exists():
                    set_aside(folder, "not whole", self._tell_set_aside)
                return False
        except OSError as error:
            self._tell(EventKind.EVALUATION_NOT_RECORDED, f"{folder.path}: {error}", progress.step)
        return True

    def is_whole(self, name: str) -> bool:
        """Whether a save has been committed; for when all ranks have ended their part."""
        try:
            return is_committed(self._run_folder.child(name))
        except OSError:
            return False

    def _judge_earlier(self) -> None:
        """Check in storage which of the earlier saves were committed.

        Another rank may still write its part of the last one. All have ended those before: each
        waits for its own part when it saves again, and there are steps between two saves. A folder
        that has gone has no verdict: the rank that committed a newer one has removed it.
        """
        for number, (folder, world_size) in list(self._unjudged.items()):
            reason = _what_is_missing(folder, world_size)
            if reason is not None and number == self._number - 1:
                continue
            del self._unjudged[number]
            if reason is not None and _has_gone(folder):
                continue
            self._is_whole[number] = reason is None
            if reason is not None:
                self._tell(EventKind.CHECKPOINT_FAILED, f"{folder.path}: {reason}", self._step)
                self._end_if_too_many(folder, reason)

    def _end_if_too_many(self, folder: Location, reason: str) -> None:
        outcomes = [self._is_whole[number] for number in sorted(self._is_whole, reverse=True)]
        failed = outcomes.index(True) if True in outcomes else len(outcomes)
        if failed >= MAX_FAILED_SAVES:
            raise OSError(
                f"{failed} checkpoints in a row could not be written to {folder.path}: {reason}; "
                "free space there, or set output to another place that all workers share"
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
            self._tell(EventKind.CHECKPOINT_LEFT, f"{self._run_folder.path}: {error}", self._step)

    def _tell_set_aside(self, text: str) -> None:
        self._tell(EventKind.CHECKPOINT_DAMAGED, text, self._step)

    def _permanent(self) -> set[int]:
        """Steps whose checkpoints are never removed."""
        steps = [step for step, _ in list_checkpoints(self._run_folder)]
        permanent = Cadence(self._keep.keep_every_steps, at_steps=self._keep.keep_steps)
        kept = {step for step in steps if permanent.is_due_at(step)}
        return kept | self._best_steps()

    def _best_steps(self) -> set[int]:
        """Of a run that keeps its best, by its recipe or because early stopping may end it."""
        opened = {s: open_checkpoint(folder) for s, folder in list_checkpoints(self._run_folder)}
        # What cannot be opened now may be the best: `prune` judges whether it is damaged.
        unknown = {step for step, found in opened.items() if found is None}
        measured = [found.position.progress for found in opened.values() if found is not None]
        if not self._keep.keep_best and not any(STEP in p.metrics for p in measured):
            return set()
        # Of losses of the last and of averaged weights each has a best: they are not compared.
        best: dict[str, tuple[float, int]] = {}
        for p in measured:
            loss = p.metrics.get(p.loss_key, math.nan)
            # Of equal losses the first, as the loop has it; the newest checkpoint comes first here.
            if p.eval_step == p.step and loss <= best.get(p.loss_key, (math.inf, 0))[0]:
                best[p.loss_key] = loss, p.step
        return unknown | {step for _, step in best.values()}


def _has_gone(folder: Location) -> bool:
    try:
        return not folder.exists()
    except OSError:
        return False


def _what_is_missing(folder: Location, world_size: int) -> str | None:
    """Why a checkpoint is not whole; None if it is."""
    try:
        if is_committed(folder):
            return None
        missing = missing_ranks(folder, world_size)
    except OSError as error:
        return str(error)
    ranks = ", ".join(map(str, missing[:8])) or "none"
    return f"not whole: of {world_size} workers these have not written their part: {ranks}"
