"""Writes checkpoints while training continues: reports failures, and removes old ones."""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from copy import deepcopy

from vit_ray.checkpoints.checkpoint import (
    Progress,
    folder_name,
    open_checkpoint,
    write_evaluation,
)
from vit_ray.checkpoints.checkpoint_format import (
    DamagedCheckpointError,
    commit,
    is_committed,
    missing_ranks,
    note_failure,
)
from vit_ray.checkpoints.run_checkpoints import list_checkpoints, note_newest, prune, set_aside
from vit_ray.checkpoints.snapshot import Snapshot, write_snapshot
from vit_ray.config.cadence import Cadence
from vit_ray.config.training_sections import CheckpointConfig
from vit_ray.lock import check_lock
from vit_ray.metric_names import RESULT_STEP
from vit_ray.outcomes import EventKind
from vit_ray.storage import Location

MAX_FAILED_SAVES = 3
PARTS_S = 600.0
"""Longest time for which rank 0, having written its own part, waits for those of the others."""
FIRST_LOOK_S, MOST_LOOK_S = 0.05, 2.0
"""Pauses between two looks at what is there; each look lists the folder."""


class CheckpointWriter:
    """Writes one rank's part of each checkpoint; rank 0 commits it, and removes old ones."""

    def __init__(
        self,
        run_folder: Location,
        keep: CheckpointConfig,
        notify: Callable[[EventKind, str, int], object],
        lock_number: int | None = None,
    ) -> None:
        """
        Args:
            notify: called with kind, text and step of an event for the run's history.
            lock_number: the driver's lock of the run; None = there is none.
        """
        self._run_folder, self._keep, self._notify = run_folder, keep, notify
        self._lock_number = lock_number
        self.is_abandoned = threading.Event()
        """Set where other ranks may have died: their parts are not waited for."""
        self._step, self._num_failed = 0, 0
        self._verified: set[int] = set()
        self._progress: dict[int, Progress] = {}

    def write(self, snapshot: Snapshot) -> float | None:
        """Write it; rank 0 then waits for the parts of the others, and commits.

        A failed save is reported, and training continues: the next one may work.

        Returns:
            Unix time at which rank 0 committed it; None on other ranks, and if it failed.

        Raises:
            OSError: on rank 0, too many in a row have failed.
            LockLostError: another driver has taken the run over.
        """
        self._step, rank = snapshot.position.step, snapshot.rank
        folder = self._run_folder.child(folder_name(self._step))
        try:
            self._check_lock()
            write_snapshot(snapshot, folder)
            if rank > 0:
                return None
            _wait_for_parts(folder, snapshot.world_size, self.is_abandoned)
            commit(folder, snapshot.world_size, self._check_lock)
            committed_s = time.time()
        except (OSError, DamagedCheckpointError) as error:
            self._notify(EventKind.CHECKPOINT_FAILED, f"{folder.path}: {error}", self._step)
            if rank > 0:
                with contextlib.suppress(OSError):  # rank 0 waits for its limit then
                    note_failure(folder, rank, snapshot.world_size, str(error))
                return None
            self._num_failed += 1
            if self._num_failed >= MAX_FAILED_SAVES:
                raise OSError(
                    f"{self._num_failed} checkpoints in a row could not be written to "
                    f"{folder.path}: {error}; free space there, or set output to another place "
                    "that all workers share"
                ) from error
            return None
        self._num_failed = 0
        self._verified.add(self._step)
        self._progress[self._step] = snapshot.position.progress
        # Those that need not be kept are removed.
        permanent = Cadence(self._keep.keep_every_steps, at_steps=self._keep.keep_steps)
        try:
            note_newest(self._run_folder, self._step)
            steps = [step for step, _ in list_checkpoints(self._run_folder)]
            prune(
                self._run_folder,
                self._keep.keep_last,
                {step for step in steps if permanent.is_due_at(step)} | self._best_steps(),
                self._verified,
                self._notify_set_aside,
                self._progress,
            )
        except (OSError, ValueError) as error:  # the next one removes it, or a newer version
            self._notify(EventKind.CHECKPOINT_LEFT, f"{self._run_folder.path}: {error}", self._step)
        return committed_s

    def note_evaluation(self, progress: Progress) -> bool:
        """Record how far the run is after an evaluation at the step of a whole save.

        A save that is not whole is set aside, so that no part of it is taken for one of the next. A
        note that cannot be written is reported: the next start makes the evaluation again.

        Returns:
            False if the step is to be saved again.

        Raises:
            LockLostError: another driver has taken the run over.
        """
        self._check_lock()
        folder = self._run_folder.child(folder_name(progress.step))
        try:
            if is_committed(folder):
                write_evaluation(folder, progress)
                self._progress[progress.step] = deepcopy(progress)
            else:
                if folder.exists():
                    set_aside(folder, "not whole", self._notify_set_aside)
                return False
        except OSError as error:
            self._notify(
                EventKind.EVALUATION_NOT_RECORDED, f"{folder.path}: {error}", progress.step
            )
        return True

    def is_whole(self, step: int) -> bool:
        """Whether a save has been committed; for when all ranks have ended their part."""
        try:
            return is_committed(self._run_folder.child(folder_name(step)))
        except OSError:
            return False

    def _check_lock(self) -> None:
        if self._lock_number is not None:
            check_lock(self._run_folder, self._lock_number)

    def _notify_set_aside(self, text: str) -> None:
        self._notify(EventKind.CHECKPOINT_DAMAGED, text, self._step)

    def _best_steps(self) -> set[int]:
        """Of a run that keeps its best, by its recipe or because early stopping may end it."""
        unknown: set[int] = set()
        measured: list[Progress] = []
        for step, folder in list_checkpoints(self._run_folder):
            # A checkpoint is opened once: its index has a file for each rank.
            if step not in self._progress and (found := open_checkpoint(folder)):
                self._progress[step] = found.position.progress
            if step in self._progress:
                measured.append(self._progress[step])
            else:  # it may be the best: `prune` judges whether it is damaged
                unknown.add(step)
        if not self._keep.keep_best and not any(RESULT_STEP in p.metrics for p in measured):
            return set()
        # Of losses of the last and of averaged weights each has a best: they are not compared.
        best: dict[str, tuple[float, int]] = {}
        for p in measured:
            loss = p.metrics.get(p.loss_key, math.nan)
            # Of equal losses the first, as the loop has it; the newest checkpoint comes first here.
            if p.eval_step == p.step and loss <= best.get(p.loss_key, (math.inf, 0))[0]:
                best[p.loss_key] = loss, p.step
        return unknown | {step for _, step in best.values()}


def _wait_for_parts(folder: Location, world_size: int, is_abandoned: threading.Event) -> None:
    """Return when all ranks have written their part.

    Raises:
        OSError: one cannot, or has not in time.
    """
    deadline_s, pause_s = time.monotonic() + PARTS_S, FIRST_LOOK_S
    while True:
        missing, failed = missing_ranks(folder, world_size)
        if not missing:
            return
        if failed or is_abandoned.is_set() or time.monotonic() > deadline_s:
            ranks = ", ".join(map(str, (failed or missing)[:8]))
            raise OSError(
                f"not whole: of {world_size} workers these have not written their part: {ranks}"
            )
        is_abandoned.wait(pause_s)
        pause_s = min(2 * pause_s, MOST_LOOK_S)
