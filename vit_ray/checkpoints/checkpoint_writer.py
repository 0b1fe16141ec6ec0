"""Writes checkpoints while training continues: reports failures, and removes old ones."""

import contextlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from vit_ray.checkpoints.checkpoint import (
    Checkpoint,
    Progress,
    folder_name,
    note_commit,
    write_progress,
)
from vit_ray.checkpoints.checkpoint_format import DamagedCheckpointError, SavedFile, commit
from vit_ray.checkpoints.run_checkpoints import prune
from vit_ray.config.training_sections import CheckpointConfig, is_due
from vit_ray.lock import check_lock
from vit_ray.metric_names import RESULT_STEP
from vit_ray.outcomes import EventKind
from vit_ray.storage import Location

MAX_FAILED_SAVES: Final = 3
_MOST_TOLD: Final = 8  # ranks that are named when a save has failed


@dataclass(frozen=True)
class Part:
    """What a rank has written of a checkpoint, or why it could not."""

    files: list[SavedFile]
    error: str = ""


# Waits until all ranks have ended their part. Rank 0 gets all of them, the others an empty list.
# Raises RuntimeError if some rank has died or is late: the ranks can no longer wait for each other.
Gather = Callable[[Part], list[Part]]


class CheckpointWriter:
    """Writes one rank's part of each checkpoint; rank 0 commits it, and removes old ones."""

    def __init__(
        self,
        run_folder: Location,
        keep: CheckpointConfig,
        notify: Callable[[EventKind, str, int], object],
        lock_number: int | None = None,
        gather: Gather = lambda part: [part],
        resumed: Checkpoint | None = None,
    ) -> None:
        """
        Args:
            notify: called with kind, text and step of an event for the run's history.
            lock_number: the driver's lock of the run; None = there is none.
            gather: of all ranks that write; one writes alone.
            resumed: the checkpoint that the run goes on from.
        """
        self._run_folder, self._keep, self._notify = run_folder, keep, notify
        self._lock_number, self._gather = lock_number, gather
        self._num_failed = 0
        # On rank 0: step of the newest checkpoint, and checksum of its marker.
        self._committed = (resumed.position.step, resumed.sha256) if resumed else (-1, "")
        self._resumed_step, self._written = self._committed[0], set[int]()

    def write(self, snapshot: Snapshot) -> None:
        """Write it; rank 0 waits for the parts of the others, and commits.

        A failed save is reported, and training continues: the next one may work.

        Raises:
            OSError: on rank 0, too many in a row have failed.
            RuntimeError: as `Gather`.
            LockLostError: on rank 0, another driver has taken the run over.
        """
        step = snapshot.position.step
        folder = self._run_folder.child(folder_name(step))
        part = self._write_part(snapshot, folder)
        parts = self._gather(part)
        if snapshot.rank > 0:
            return
        try:
            self._commit(snapshot, folder, parts)
        except (OSError, DamagedCheckpointError) as error:
            self._notify(EventKind.CHECKPOINT_FAILED, f"{folder.path}: {error}", step)
            self._count_failure(folder, error)
            return
        self._num_failed = 0
        note = partial(note_commit, folder, self._committed[1])
        for tidy_up in (note, partial(self._prune, snapshot.position.progress)):
            try:
                tidy_up()
            except (OSError, ValueError) as error:
                self._notify(EventKind.CHECKPOINT_LEFT, f"{self._run_folder.path}: {error}", step)

    def note_evaluation(self, progress: Progress) -> bool:
        """Record, on rank 0, how far the run is after an evaluation at the step of a whole save.

        A note that cannot be written is reported: the next start makes the evaluation again.

        Returns:
            False if the step is to be saved again.

        Raises:
            LockLostError: another driver has taken the run over.
        """
        if not self.is_whole(progress.step):
            return False
        folder = self._run_folder.child(folder_name(progress.step))
        try:
            self._check_lock()
            write_progress(folder, self._committed[1], progress)
        except OSError as error:
            text = f"{folder.path}: {error}"
            self._notify(EventKind.EVALUATION_NOT_RECORDED, text, progress.step)
        return True

    def is_whole(self, step: int) -> bool:
        """On rank 0, whether the newest checkpoint is of this step."""
        return self._committed[0] == step

    def _write_part(self, snapshot: Snapshot, folder: Location) -> Part:
        """Whatever happens, the others hear of it, as they wait for this rank."""
        token = uuid.uuid4().hex[:8]
        try:
            self._check_lock()
            return Part(write_snapshot(snapshot, folder, token))
        except Exception as error:
            with contextlib.suppress(OSError):
                names = [file.base_name for file in folder.list_files(recursive=False)]
                _delete(folder, [name for name in names if token in name])
            return Part([], str(error) or repr(error))

    def _commit(self, snapshot: Snapshot, folder: Location, parts: list[Part]) -> None:
        self._check_lock()
        failed = [(rank, part.error) for rank, part in enumerate(parts) if part.error]
        if failed:
            with contextlib.suppress(OSError):  # all have ended, and the next may need the room
                _delete(folder, [file.name for part in parts for file in part.files])
                if folder.is_local:  # in a store a folder is gone with its last file
                    os.rmdir(folder.path)  # but not with what lay there before
            told = "; ".join(f"rank {rank}: {error}" for rank, error in failed[:_MOST_TOLD])
            raise OSError(f"not whole: {len(failed)} of {len(parts)} workers failed: {told}")
        files = [file for part in parts for file in part.files]
        marker = commit(folder, files, snapshot.position.to_json())
        self._committed = snapshot.position.step, marker.sha256
        self._written.add(snapshot.position.step)

    def _count_failure(self, folder: Location, error: Exception) -> None:
        self._num_failed += 1
        if self._num_failed >= MAX_FAILED_SAVES:
            raise OSError(
                f"{self._num_failed} checkpoints in a row could not be written to "
                f"{folder.path}: {error}; free space there, or set output to another place "
                "that all workers share"
            ) from error

    def _prune(self, progress: Progress) -> None:
        keep, best = self._keep, progress.metrics.get(RESULT_STEP)
        prune(
            self._run_folder,
            # What is newer than the one that the run went on from was passed over.
            lambda step: step <= self._resumed_step or step in self._written,
            keep.keep_last,
            lambda step: step == best or is_due(step, keep.keep_every_steps, keep.keep_steps),
        )

    def _check_lock(self) -> None:
        if self._lock_number is not None:
            check_lock(self._run_folder, self._lock_number)


def _delete(folder: Location, names: list[str]) -> None:
    for name in names:
        folder.child(name).delete()
