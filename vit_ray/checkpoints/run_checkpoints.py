"""Checkpoints of a run: the newest usable one, the one that is its result, those to delete.

A folder that is not usable is passed over with a warning, and stays until newer ones have followed
it; what was given up (`resume=from_zero`) stays for good.
"""

from __future__ import annotations

import logging
import os
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
    read_progress,
)
from vit_ray.checkpoints.checkpoint_format import (
    COMMIT,
    DamagedCheckpointError,
    PartialCheckpointError,
    is_committed,
    sealed,
)
from vit_ray.metric_names import RESULT_STEP
from vit_ray.storage import Location, locate

if TYPE_CHECKING:  # torch takes seconds to import
    from torch import Tensor

_NO_GOOD: Final = (PartialCheckpointError, DamagedCheckpointError)
_STEP: Final = re.compile(r"step-(\d{8,})")
_GIVEN_UP: Final = f"{COMMIT}.damaged"

logger = logging.getLogger(__name__)

Warn = Callable[[str], object]


class NoUsableCheckpointError(ValueError):
    """A run has had checkpoints and none of them can be used."""


def list_checkpoints(run_folder: Location) -> list[tuple[int, Location]]:
    """(step, folder) of everything that looks like a checkpoint, newest first."""
    matches = [(_STEP.fullmatch(name), name) for name in run_folder.list_folders()]
    folders = [(int(match[1]), run_folder.child(name)) for match, name in matches if match]
    return sorted(folders, key=lambda item: item[0], reverse=True)


def newest_checkpoint(
    run_folder: Location,
    warn: Warn = lambda _: None,
    below: int | None = None,
    late_s: float = 0.0,
) -> Checkpoint | None:
    """The newest whole checkpoint, its tensors unread; None if there is none.

    Args:
        warn: called with the reason for each newer one that is passed over.
        below: take one before this step.
        late_s: how much later a disk may show the newest marker, after the folder's last change.
    """
    while True:
        listed, reasons = list_checkpoints(run_folder), list[str]()
        checkpoint: Checkpoint | None = None
        for step, folder in listed:
            if below is not None and step >= below:
                continue
            try:
                # A network disk may show the newest marker late, a store does not.
                is_newest = folder.is_local and folder == listed[0][1]
                may_be_late = is_newest and not folder.child(_GIVEN_UP).exists()
                checkpoint = (
                    _late_checkpoint(folder, step, late_s)
                    if may_be_late
                    else checkpoint_of_step(folder, step)
                )
                break
            except _NO_GOOD as error:
                reasons.append(f"{error}; passed over")
        # The run may be active: what it has removed since was followed by a newer one.
        if checkpoint is not None or list_checkpoints(run_folder) == listed:
            for reason in reasons:
                warn(reason)
            return checkpoint


def _late_checkpoint(folder: Location, step: int, late_s: float) -> Checkpoint:
    """As `checkpoint_of_step`, of a local folder whose marker a disk may show `late_s` later."""
    try:
        return checkpoint_of_step(folder, step)
    except PartialCheckpointError:
        changed_s = 0.0  # where the folder is gone
        with suppress(FileNotFoundError):
            # The folder itself last: a rename since then has changed it.
            for name in (*os.listdir(folder.path), "."):
                with suppress(FileNotFoundError):
                    changed_s = max(changed_s, os.stat(os.path.join(folder.path, name)).st_mtime)
        time.sleep(min(late_s, max(0.0, changed_s + late_s - time.time())))
        return checkpoint_of_step(folder, step)


def checkpoint_of_step(folder: Location, step: int) -> Checkpoint:
    """The whole checkpoint in `folder`, which is named after that step.

    Raises:
        ValueError: as `read_checkpoint`; DamagedCheckpointError: it is of another step.
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
    """The newest whole checkpoint, its tensors unread; None if the run has had none.

    Args:
        warn, below: as for `newest_checkpoint`.

    Raises:
        NoUsableCheckpointError: there are others, or there were, and none of them is whole.
            Starting over would silently lose the run.
    """
    reasons: list[str] = []
    late_s = checkpoint_format.READ_AGAIN_S
    checkpoint = newest_checkpoint(run_folder, reasons.append, below, late_s)
    if checkpoint is None and (below is not None or has_had_checkpoints(run_folder)):
        gone = "their folders are gone" if below is None else f"none is older than step {below}"
        raise NoUsableCheckpointError(
            f"run {run_folder.path} has had checkpoints, and none of them can be used: "
            f"{'; '.join(reasons) or gone}. Nothing was changed. Restore one "
            "of them, choose another name, or set resume=from_zero to start at step 0"
        )
    for reason in reasons:
        warn(reason)
    return checkpoint


def has_had_checkpoints(run_folder: Location) -> bool:
    """Whether a checkpoint was committed in the run's folder, or may have been.

    A run that was killed in its first save has a folder and has lost nothing: its note says so.
    """
    folders = [folder for _, folder in list_checkpoints(run_folder)]
    if "training" in read_progress(run_folder):  # or in the moment after its first commit
        return any(map(is_committed, folders))
    return bool(folders) or run_folder.child(PROGRESS).exists()


def begin_training(run_folder: Location) -> str:
    """Note that the run starts at step 0, without a checkpoint.

    Returns:
        Id of the training: that of one which began here and has not come to a checkpoint, or a
        new one.
    """
    note = read_progress(run_folder)
    training = str(note.get("training") or uuid.uuid4().hex)
    if "training" not in note:
        run_folder.child(PROGRESS).write(sealed({"training": training}))
    return training


def give_up_checkpoints(run_folder: Location, warn: Warn) -> None:
    """Let a run start over whose checkpoints are all damaged, and mark them: they stay.

    Their markers are renamed; a folder that has lost its own gets an empty one of that name.

    Raises:
        ValueError: one of them can be used.
    """
    below: int | None = None
    while (checkpoint := newest_checkpoint(run_folder, warn, below)) is not None:
        below = checkpoint.position.step
        try:
            checkpoint.verify()
        except DamagedCheckpointError as error:
            warn(f"{error}; given up, its {COMMIT} is renamed to {_GIVEN_UP}")
        else:
            raise ValueError(f"has a checkpoint that can be used (step {below})")
    for _, folder in list_checkpoints(run_folder):
        if is_committed(folder):
            folder.child(COMMIT).move_to(folder.child(_GIVEN_UP))
        elif not folder.child(_GIVEN_UP).exists():
            folder.child(_GIVEN_UP).write(b"")
    run_folder.child(PROGRESS).delete()


def prune(
    run_folder: Location,
    is_usable: Callable[[int], bool],
    keep_last: int,
    stays: Callable[[int], bool],
) -> list[int]:
    """Delete checkpoints that `keep_last` newer ones have followed; returns their steps.

    So is what a kill has left of a save or of a deletion, once it is older than what the run went
    on from. What was given up, or is not usable, is left as it is and does not count.

    Args:
        is_usable: False for the step of one that was passed over when the run was resumed.
        stays: whether that of a step is permanent.
    """
    num_whole, deleted = 0, list[int]()
    for step, folder in list_checkpoints(run_folder):
        if not is_usable(step):
            continue
        if num_whole < keep_last:
            num_whole += is_committed(folder)
        elif not stays(step) and not folder.child(_GIVEN_UP).exists():
            folder.child(COMMIT).delete()  # first: half of a checkpoint would look like damage
            folder.delete()
            deleted.append(step)
    return deleted


def read_weights(path: str, averaged: bool | None) -> tuple[Checkpoint, dict[str, Tensor]]:
    """The checkpoint that `path` names, as for `find_weights`, with its weights.

    If they are damaged, those of the run's next older checkpoint are taken, with a warning.

    Args:
        averaged: take the averaged weights; None = if it has any.

    Raises:
        ValueError: as `find_weights`, or the weights are damaged of a checkpoint that `path` names
            itself, or of the best one.
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
    """The checkpoint that `path` names: a checkpoint folder, or a run folder (its result).

    Raises:
        ValueError: there is none, or as `result_checkpoint`.
    """
    location = locate(path)
    with suppress(PartialCheckpointError):
        return read_checkpoint(location)
    newest = checkpoint_to_resume(location)
    if newest is None:
        what = "holds no whole checkpoint" if location.exists() else "is not there"
        raise ValueError(
            f"{path!r} {what}; give a run folder, one of its step-* folders, or an exported weight "
            "file"
        )
    return result_checkpoint(location, newest)


def result_checkpoint(run_folder: Location, newest: Checkpoint) -> Checkpoint:
    """What a run hands on: the best checkpoint where it keeps that, or else the newest.

    Raises:
        ValueError: the best one cannot be used.
    """
    step = newest.position.progress.metrics.get(RESULT_STEP)
    if step is None or step == newest.position.step:
        return newest
    folder = run_folder.child(folder_name(int(step)))
    try:
        return checkpoint_of_step(folder, int(step))
    except _NO_GOOD as error:
        raise ValueError(
            f"{run_folder.path}: the result of the run is its best evaluation, and the checkpoint "
            f"of it, {folder.path}, cannot be used: {error}. Restore it, or give another step-* "
            "folder of the run"
        ) from error
