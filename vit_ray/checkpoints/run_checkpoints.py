"""Checkpoints of a run: the newest usable one, those set aside, those to delete.

Two kinds of folder are deleted here, both after newer checkpoints that were read back: whole
checkpoints, and saves that were never whole, but for the last two. A folder that is not usable is
renamed to `step-00001000.damaged` and reported; what may have been whole is the user's to delete.
"""

import contextlib
import itertools
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Container
from typing import Any, Final

from vit_ray.checkpoints.checkpoint import (
    Checkpoint,
    evaluation_note,
    folder_name,
    open_checkpoint,
    read_checkpoint,
)
from vit_ray.checkpoints.checkpoint_format import (
    DamagedCheckpointError,
    PartialCheckpointError,
    never_was_whole,
    read_marker,
)
from vit_ray.metric_names import RESULT_STEP
from vit_ray.storage import Location, locate, read_again

READ_AGAIN_S: Final = 10.0
"""After which a folder that seems damaged is read a second time: files may be shown late."""
ASIDE: Final = ".damaged"
KEPT_ASIDE: Final = 2
"""Folders set aside that were never whole and stay, for who wants to know what went wrong."""
_MOST_LISTINGS: Final = 5
"""How often the checkpoints of an active run are listed, as it may remove all that were listed."""
_DELETING: Final = ".deleting"
"""Of a note next to a folder that is being deleted: what a crash leaves of it is deleted later."""
NONE_YET: Final = "no_checkpoint_yet.json"
"""Stands in a run's folder from its start at step 0 until its first checkpoint is committed."""
NEWEST: Final = "newest_checkpoint.json"
"""Says in a run's folder which checkpoint was committed last, should all of them have gone."""
_NO_GOOD: Final = (PartialCheckpointError, DamagedCheckpointError)
_STEP: Final = re.compile(r"step-(\d{8,})")

logger = logging.getLogger(__name__)

Warn = Callable[[str], None]


class NoUsableCheckpointError(ValueError):
    """A run has had checkpoints and none of them can be used."""


def list_checkpoints(run_folder: Location) -> list[tuple[int, Location]]:
    """(step, folder) of everything that looks like a checkpoint, newest first."""
    matches = [(_STEP.fullmatch(name), name) for name in run_folder.list_folders()]
    found = [(int(match[1]), run_folder.child(name)) for match, name in matches if match]
    return sorted(found, key=lambda item: item[0], reverse=True)


def newest_checkpoint(run_folder: Location) -> Checkpoint | None:
    """The newest whole checkpoint, its tensors unread."""
    for _, folder in list_checkpoints(run_folder):
        try:
            checkpoint = open_checkpoint(folder)
        except FileNotFoundError:  # its run is active, and has just removed it
            continue
        if checkpoint is not None:
            return checkpoint
    return None


def newest_verified_checkpoint(
    run_folder: Location, warn: Warn = logger.warning, *, changes: bool = True
) -> Checkpoint | None:
    """The newest checkpoint whose every byte is as written; None if the run has had none.

    Args:
        warn: called with the reason for each newer one that is not usable.
        changes: newer ones that are not usable are also set aside; for the run's driver.

    Raises:
        NoUsableCheckpointError: there are folders of checkpoints, none of them is usable, and
            nothing shows that there never was one. Starting over would silently lose the run.
        OSError: storage does not let this be decided; nothing has been changed.
    """
    for _ in range(_MOST_LISTINGS):
        bad: list[tuple[Location, str]] = []
        checkpoint, has_gone = None, False
        for _, folder in list_checkpoints(run_folder):
            try:
                checkpoint = _judge(folder)
            except _NO_GOOD as error:
                bad.append((folder, str(error)))
                continue
            if checkpoint is not None:
                break
            has_gone = True
        # Its run is active: what it removes was followed by a newer one.
        if checkpoint is not None or not has_gone:
            break
    if checkpoint is None and has_had_checkpoints(run_folder):
        reasons = "; ".join(reason for _, reason in bad)
        if not reasons and any(name.endswith(ASIDE) for name in run_folder.list_folders()):
            reasons = "all of them have been set aside before"
        if not reasons:
            newest = run_folder.child(NEWEST).path
            reasons = f"their folders are gone, {newest} says which was the last"
        raise NoUsableCheckpointError(
            f"run {run_folder.path} has had checkpoints, and none of them can be used: "
            f"{reasons}. Nothing was changed. Restore one of them (a folder set aside is named "
            "step-*.damaged), choose another name, or set resume=from_zero to start at step 0"
        )
    for folder, reason in bad:
        if changes:
            _put_away(folder, reason, warn)
        else:
            warn(f"{reason}; passed over")
    if checkpoint is not None and changes:
        # A driver that died between the first commit and this left it behind.
        run_folder.child(NONE_YET).delete()
        _deletion_note(checkpoint.folder).delete()  # it counts again
    return checkpoint


def has_had_checkpoints(run_folder: Location) -> bool:
    """Whether there is a folder of a checkpoint, good or not, or set aside, or the note of one.

    A run that was killed in the middle of its first save has one and has lost nothing: it says by
    its own file that none was committed before.
    """
    names = [name.removesuffix(ASIDE).partition("~")[0] for name in run_folder.list_folders()]
    if not any(map(_STEP.fullmatch, names)) and not run_folder.child(NEWEST).exists():
        return False
    return not run_folder.child(NONE_YET).exists()


def note_newest(run_folder: Location, step: int) -> None:
    """Note that the checkpoint of a step has been committed."""
    note = {"meaning": "the checkpoint that was committed last", "step": step}
    run_folder.child(NEWEST).write(json.dumps(note).encode())
    run_folder.child(NONE_YET).delete()


def begin_without_checkpoint(run_folder: Location, warn: Warn) -> str:
    """Note that the run starts at step 0; folders of checkpoints that are there are set aside.

    Returns:
        Id of the training: that of one which began here and has not come to a checkpoint, or a
        new one.

    Raises:
        ValueError: a good one is among them.
    """
    for _, folder in list_checkpoints(run_folder):
        try:
            is_good = _judge(folder) is not None
        except _NO_GOOD as error:
            _put_away(folder, str(error), warn)
            continue
        if is_good:
            raise ValueError(f"{folder.path} can be used; a run does not start over next to it")
    begun = run_folder.child(NONE_YET)
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
        return str(json.loads(begun.read())["training"])
    training = uuid.uuid4().hex
    meaning = "this run has not committed a checkpoint"
    note = {"meaning": meaning, "since_s": time.time(), "training": training}
    begun.write(json.dumps(note).encode())
    return training


def set_aside(folder: Location, reason: str, warn: Warn) -> None:
    """Rename a checkpoint's folder, so that nothing reads it or writes into it.

    To `step-N.damaged`, or `step-N~2.damaged` if that is taken.
    """
    for number in itertools.count(1):
        again = f"~{number}" if number > 1 else ""
        place = Location(folder.protocol, f"{folder.path}{again}{ASIDE}")
        if not place.exists():
            break
    folder.move_to(place)
    warn(
        f"{reason}. It was set aside as {place.uri}; nothing in it was deleted. Repair it and "
        "rename it back, or delete it to have its space"
    )


def prune(
    run_folder: Location,
    keep_last: int,
    keep: Collection[int] = (),
    verified: set[int] | None = None,
    warn: Warn = logger.warning,
    opened: Container[int] = (),
) -> list[int]:
    """Delete checkpoints that `keep_last` newer ones have followed; returns their steps.

    The newer ones count only when every byte has been read back. What is not whole is set aside if
    a good one is newer, else it may be in the middle of being written. Of older folders set aside
    that were never whole the last `KEPT_ASIDE` stay.

    Args:
        keep: steps that stay in any case.
        verified: steps that were read back before; those that are read here are added.
        opened: steps that were whole before: of these the marker and the sizes are looked at, and
            not the index of every rank.
    """
    notes = {file.base_name for file in run_folder.list_files(recursive=False)}
    for name in (note.removesuffix(_DELETING) for note in notes if note.endswith(_DELETING)):
        if not run_folder.child(name).exists():  # a crash has left the note alone
            _deletion_note(run_folder.child(name)).delete()
    verified = set() if verified is None else verified
    good: list[int] = []
    deleted: list[int] = []
    for step, folder in list_checkpoints(run_folder):
        try:
            needs_reading = len(good) < keep_last and step not in verified
            look: Callable[[Location], object] = read_marker if step in opened else read_checkpoint
            is_there = _judge(folder, _read_whole if needs_reading else look) is not None
        except _NO_GOOD as error:
            if f"{folder_name(step)}{_DELETING}" in notes:  # a crash has left a part of it
                _delete(folder)
            elif good:
                set_aside(folder, str(error), warn)
            continue
        if not is_there:
            continue
        if needs_reading:
            verified.add(step)
        if len(good) >= keep_last and step not in keep:
            _delete(folder)
            deleted.append(step)
            continue
        if f"{folder_name(step)}{_DELETING}" in notes:  # it counts again, and may be damaged later
            _deletion_note(folder).delete()
        if len(good) < keep_last:
            good.append(step)
    if good:
        _delete_old_halves(run_folder, good[0], warn)
    return deleted


def _delete_old_halves(run_folder: Location, newest: int, warn: Warn) -> None:
    """Delete what was set aside before a step and never was whole, but for the last ones."""
    aside = sorted((n for n in run_folder.list_folders() if n.endswith(ASIDE)), reverse=True)
    if len(aside) <= KEPT_ASIDE:
        return
    halves = [name for name in aside if never_was_whole(run_folder.child(name))]
    matches = [(_STEP.match(name), name) for name in halves[KEPT_ASIDE:]]
    old = [name for match, name in matches if match and int(match[1]) < newest]
    for name in old:
        run_folder.child(name).delete()
    if old:
        warn(
            f"deleted {len(old)} folders that were set aside and never whole ({', '.join(old)}); "
            f"the last {KEPT_ASIDE} stay, and what may have been whole: {len(aside) - len(old)} "
            "folders"
        )


def _put_away(folder: Location, reason: str, warn: Warn) -> None:
    """Set a folder aside, or end its deletion that a crash has cut short."""
    if _deletion_note(folder).exists():
        _delete(folder)
    else:
        set_aside(folder, reason, warn)


def _deletion_note(folder: Location) -> Location:
    return Location(folder.protocol, f"{folder.path}{_DELETING}")


def _delete(folder: Location) -> None:
    """Noted first: no storage deletes a folder at once, and half of it looks like damage."""
    _deletion_note(folder).write(b"")
    folder.delete()
    evaluation_note(folder).delete()
    _deletion_note(folder).delete()


def find_weights(path: str) -> Checkpoint:
    """The checkpoint that `path` names: a checkpoint folder, or a run folder (its result).

    Raises:
        ValueError: there is none, or as `result_checkpoint`.
    """
    location = locate(path)
    if (checkpoint := open_checkpoint(location)) is not None:
        return checkpoint
    # The run may live, and belong to somebody else: nothing is written there.
    newest = newest_verified_checkpoint(location, changes=False)
    if newest is None:
        raise ValueError(
            f"{path!r} holds no whole checkpoint; give a run folder, one of its step-* folders, "
            "or an exported weight file"
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
        best = _judge(folder)
        reason = "it is not there"
    except _NO_GOOD as error:
        best, reason = None, str(error)
    if best is None:
        raise ValueError(
            f"{run_folder.path}: the result of the run is its best evaluation, and the checkpoint "
            f"of it, {folder.path}, cannot be used: {reason}. Restore it, or give another step-* "
            "folder of the run"
        )
    return best


def _read_whole(folder: Location) -> Checkpoint:
    checkpoint = read_checkpoint(folder)
    checkpoint.verify()
    return checkpoint


def _judge(folder: Location, look: Callable[[Location], object] = _read_whole) -> Any:
    """What `look` finds in a checkpoint's folder; None if the folder has gone.

    Raises:
        PartialCheckpointError, DamagedCheckpointError: it is not usable, by two reads.
        OSError: it cannot be read.
    """

    def judge_once() -> object:
        try:
            return look(folder)
        except (*_NO_GOOD, FileNotFoundError):
            if folder.exists():
                raise
            return None

    return read_again(judge_once, *_NO_GOOD, FileNotFoundError, pause_s=READ_AGAIN_S)
