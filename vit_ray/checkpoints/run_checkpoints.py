"""Checkpoints of a run: the newest usable one, the run's result, and those to delete.

A folder that is not usable is skipped with a warning, and kept until newer checkpoints follow it.
Folders that were abandoned (`resume=from_zero`) are never deleted.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from vit_ray.checkpoints import checkpoint_format
from vit_ray.checkpoints.checkpoint import (
    PROGRESS,
    Checkpoint,
    folder_name,
    read_checkpoint,
    read_note,
    write_note,
)
from vit_ray.checkpoints.checkpoint_format import (
    COMMIT,
    DamagedCheckpointError,
    PartialCheckpointError,
    is_committed,
)
from vit_ray.lock import sees_lock
from vit_ray.metric_names import RESULT_STEP
from vit_ray.storage import Location, locate

if TYPE_CHECKING:  # torch takes seconds to import
    from torch import Tensor

_UNUSABLE: Final = (PartialCheckpointError, DamagedCheckpointError)
_STEP: Final = re.compile(r"step-(\d{8,})")
_ABANDONED: Final = f"{COMMIT}.damaged"

logger = logging.getLogger(__name__)

Warn = Callable[[str], object]


def shared_folder(run_folder: str, lock_number: int | None) -> Location:
    """The run's folder, on a machine of the run's workers.

    Args:
        lock_number: of the driver's lock of the folder; None if nothing is written there.

    Raises:
        ValueError: the folder is not shared: this machine does not see the lock.
    """
    folder = locate(run_folder)
    if lock_number is not None and not sees_lock(folder, lock_number):
        raise ValueError(
            f"the worker on {platform.node()} does not see the driver's files in {folder.uri}; "
            "output must be a path that all nodes share (NFS, Lustre), or an s3:// address"
        )
    return folder


def list_checkpoints(run_folder: Location) -> list[tuple[int, Location]]:
    """(step, folder) of all folders that are named like checkpoints, newest first."""
    matches = [(_STEP.fullmatch(name), name) for name in run_folder.list_folders()]
    folders = [(int(match[1]), run_folder.child(name)) for match, name in matches if match]
    return sorted(folders, key=lambda item: item[0], reverse=True)


def newest_checkpoint(
    run_folder: Location,
    warn: Warn = lambda _: None,
    below: int | None = None,
    late_s: float = 0.0,
) -> Checkpoint | None:
    """The newest usable checkpoint, its tensors unread; None if there is none.

    Args:
        warn: called with the reason for each newer checkpoint that is skipped.
        below: consider only checkpoints before this step.
        late_s: seconds after the folder's last change until a network disk shows the newest marker.
    """
    while True:
        listed, reasons = list_checkpoints(run_folder), list[str]()
        checkpoint: Checkpoint | None = None
        for step, folder in listed:
            if below is not None and step >= below:
                continue
            try:
                # A network disk may show the newest marker late; a store does not.
                may_be_late = folder.is_local and folder == listed[0][1]
                checkpoint = (
                    _late_checkpoint(folder, step, late_s)
                    if may_be_late
                    else checkpoint_of_step(folder, step)
                )
                break
            except _UNUSABLE as error:
                reasons.append(f"{error}; passed over")
        # An active run deletes a checkpoint only after a newer one, so list them again.
        if checkpoint is not None or list_checkpoints(run_folder) == listed:
            for reason in reasons:
                warn(reason)
            return checkpoint


def _late_checkpoint(folder: Location, step: int, late_s: float) -> Checkpoint:
    """As `checkpoint_of_step`; without a marker, once more `late_s` after the last change."""
    try:
        return checkpoint_of_step(folder, step)
    except PartialCheckpointError:
        if folder.child(_ABANDONED).exists():
            raise
        changed_s = time.time()  # if a file is renamed meanwhile
        with suppress(FileNotFoundError):
            paths = [folder.path, *(info.path for info in folder.list_files(recursive=False))]
            changed_s = max(os.stat(path).st_mtime for path in paths)
        time.sleep(min(late_s, max(0.0, changed_s + late_s - time.time())))
        return checkpoint_of_step(folder, step)


def checkpoint_of_step(folder: Location, step: int) -> Checkpoint:
    """The checkpoint in `folder`, which is named after this step.

    Raises:
        ValueError: as `read_checkpoint`; DamagedCheckpointError: its step is another one.
    """
    checkpoint = read_checkpoint(folder)
    if checkpoint.position.step != step:
        raise DamagedCheckpointError(
            f"checkpoint {folder.path} is of step {checkpoint.position.step}, unlike its name"
        )
    return checkpoint


def checkpoint_to_resume(
    run_folder: Location, warn: Warn = logger.warning, below: int | None = None
) -> Checkpoint | None:
    """The newest usable checkpoint, its tensors unread; None if the run has never had one.

    Args:
        warn, below: as for `newest_checkpoint`.

    Raises:
        ValueError: the run has had checkpoints, and none of them is usable. Starting over would
            silently lose the run.
    """
    reasons: list[str] = []
    checkpoint = newest_checkpoint(
        run_folder, reasons.append, below, late_s=checkpoint_format.READ_AGAIN_S
    )
    if checkpoint is None and (below is not None or has_had_checkpoints(run_folder)):
        gone = "their folders are gone" if below is None else f"none is older than step {below}"
        raise ValueError(
            f"run {run_folder.path} has had checkpoints, and none of them can be used: "
            f"{'; '.join(reasons) or gone}. Nothing was changed. Restore one "
            "of them, choose another name, or set resume=from_zero to start at step 0"
        )
    for reason in reasons:
        warn(reason)
    return checkpoint


def has_had_checkpoints(run_folder: Location) -> bool:
    """Whether a checkpoint was committed in the run's folder, or may have been.

    A run that was killed in its first save has a checkpoint's folder, and its note still has the id
    of the training: it has lost nothing.
    """
    folders = [folder for _, folder in list_checkpoints(run_folder)]
    if "training" in read_note(run_folder):  # the first commit may be newer than the note
        return any(map(is_committed, folders))
    return bool(folders) or run_folder.child(PROGRESS).exists()


def begin_training(run_folder: Location) -> str:
    """Note that the run starts at step 0, without a checkpoint.

    Returns:
        Id of the training: a new id, or that of a training that began here and has no checkpoint
        yet.
    """
    note = read_note(run_folder)
    training = str(note.get("training") or uuid.uuid4().hex)
    if "training" not in note:
        write_note(run_folder, training=training)
    return training


def give_up_checkpoints(run_folder: Location, warn: Warn) -> None:
    """Let a run start over whose checkpoints are all damaged, and mark these so that they stay.

    Their markers are renamed to `_ABANDONED`; a folder without a marker gets an empty file of that
    name.

    Raises:
        ValueError: one of the checkpoints can be used.
    """
    below: int | None = None
    while (checkpoint := newest_checkpoint(run_folder, warn, below)) is not None:
        below = checkpoint.position.step
        try:
            checkpoint.verify()
        except DamagedCheckpointError as error:
            warn(f"{error}; given up, its {COMMIT} is renamed to {_ABANDONED}")
        else:
            raise ValueError(
                f"resume=from_zero, but run {run_folder.uri} has a checkpoint that can be used "
                f"(step {below}); set resume=auto to continue it, or choose another name"
            )
    for _, folder in list_checkpoints(run_folder):
        if is_committed(folder):
            folder.child(_ABANDONED).write(folder.child(COMMIT).read())
            folder.child(COMMIT).delete()
        elif not folder.child(_ABANDONED).exists():
            folder.child(_ABANDONED).write(b"")
    run_folder.child(PROGRESS).delete()


def prune(
    run_folder: Location,
    is_usable: Callable[[int], bool],
    keep_last: int,
    stays: Callable[[int], bool],
) -> None:
    """Delete checkpoints that are older than the `keep_last` newest.

    Also deletes the remains of a save or deletion that was interrupted by a kill. Abandoned
    checkpoints, and those that are not usable, are neither deleted nor counted.

    Args:
        is_usable: False for the step of a checkpoint that was skipped when the run was resumed.
        stays: whether the checkpoint of a step is permanent.
    """
    num_committed = 0
    for step, folder in list_checkpoints(run_folder):
        if not is_usable(step):
            continue
        if num_committed < keep_last:
            num_committed += is_committed(folder)
        elif not stays(step) and not folder.child(_ABANDONED).exists():
            folder.child(COMMIT).delete()  # first: half of a checkpoint would look like damage
            folder.delete()


def read_weights(path: str, averaged: bool | None) -> tuple[Checkpoint, dict[str, Tensor]]:
    """The checkpoint of `find_weights`, and its weights.

    If a run's newest weights are damaged, returns its next older checkpoint, with a warning.

    Args:
        averaged: take the averaged weights; None = if it has any.

    Raises:
        ValueError: as `find_weights`; or the weights are damaged, and `path` is a checkpoint's
            folder, or the checkpoint is the run's best.
    """
    checkpoint = find_weights(path)
    while True:
        try:
            return checkpoint, checkpoint.weights(averaged=checkpoint.takes_average(averaged))
        except DamagedCheckpointError as error:
            is_chosen = RESULT_STEP in checkpoint.position.progress.metrics
            if is_chosen or checkpoint.folder == locate(path):
                raise
            logger.warning("%s; passed over", error)
        older = checkpoint_to_resume(locate(path), below=checkpoint.position.step)
        assert older is not None, "an error says that there is none"
        checkpoint = older


def find_weights(path: str) -> Checkpoint:
    """The checkpoint at `path`: a checkpoint's folder, or a run's folder (the run's result).

    Raises:
        ValueError: there is no checkpoint, or as `result_checkpoint`.
    """
    location = locate(path)
    with suppress(PartialCheckpointError):
        return read_checkpoint(location)
    newest = checkpoint_to_resume(location)
    if newest is None:
        problem = "holds no whole checkpoint" if location.exists() else "is not there"
        raise ValueError(
            f"{path!r} {problem}; give a run folder, one of its step-* folders, or an exported "
            "weight file"
        )
    return result_checkpoint(location, newest)


def result_checkpoint(run_folder: Location, newest: Checkpoint) -> Checkpoint:
    """The result of a run: its best checkpoint if it keeps that, otherwise the newest.

    Raises:
        ValueError: the best checkpoint cannot be used.
    """
    step = newest.position.progress.metrics.get(RESULT_STEP)
    if step is None or step == newest.position.step:
        return newest
    folder = run_folder.child(folder_name(int(step)))
    try:
        return checkpoint_of_step(folder, int(step))
    except _UNUSABLE as error:
        raise ValueError(
            f"{run_folder.path}: the result of the run is its best evaluation, and the checkpoint "
            f"of it, {folder.path}, cannot be used: {error}. Restore it, or give another step-* "
            "folder of the run"
        ) from error
