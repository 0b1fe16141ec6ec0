"""Converts a source of images to a data set: shuffled once, checked, committed whole.

Two rounds of Ray tasks. The first indexes the source, a task per unit; the index of all images is
then drawn into the order of the data set by the recorded seed, through files on disk. The second
makes the shards, a task each: it reads the images of its shard wherever they lie, checks them, and
writes the shard and its facts. A finished unit or shard is never made again; the manifest is
written last, when every shard has been looked at, and is the commit. No process ever holds more
than a shard's row group and a piece of the index.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.dataset import MANIFEST_FILE, SOURCE_FILE, STAGING_FOLDER, open_dataset
from vit_ray.data.prepare.conversion_plan import Plan, plan_conversion, settings_of
from vit_ray.data.prepare.convert.commit import ConvertReport, commit, report_of
from vit_ray.data.prepare.convert.destination import (
    PLAN,
    STAGED,
    check_apart,
    check_free,
    foreign_files,
    staged_files,
)
from vit_ray.data.prepare.convert.make_shards import make_shards
from vit_ray.data.prepare.convert.source_record import (
    changed_settings,
    changes_since,
    read_record,
    text_of_changes,
)
from vit_ray.data.prepare.convert.staged_files import read_facts
from vit_ray.data.prepare.in_place import check_in_place
from vit_ray.data.prepare.sources.columns import check_columns
from vit_ray.data.prepare.sources.label_map import check_names
from vit_ray.data.prepare.sources.source_index import units_of
from vit_ray.lock import HeldError, LockLostError, hold_lock
from vit_ray.storage import Location, absolute, locate

_LOG: Final = logging.getLogger(__name__)


def convert(config: ConvertConfig, seed: int = 0) -> ConvertReport:
    """Convert images to a data set, or finish a conversion that was interrupted.

    Where the destination holds the data set of this source and these settings already, nothing is
    done, and its report is returned. Ray must be up.

    Args:
        seed: of the one shuffle of all rows.

    Raises:
        ValueError: if the source holds no images, is damaged or has several splits, the
            destination holds a data set of another source or other settings, or another conversion
            writes it, an interrupted one had other settings, or too much is rejected; or the
            destination is in the source.
    """
    # Workers of another cluster have working directories of their own.
    places = {key: absolute(getattr(config, key)) for key in ("source", "destination")}
    config = config.model_copy(update=places)
    folder = locate(config.destination)
    check_names(config.classes or (), "convert.classes")
    check_columns(config.columns)
    check_apart(config)
    check_free(folder)
    if config.in_place:
        check_in_place(config, folder)
    staging = folder.child(STAGING_FOLDER)
    if not staging.exists() and (report := _finished(config, seed, folder)) is not None:
        return report
    is_held = False
    try:
        with _alone(folder) as lock_number:
            is_held = True
            check_free(folder)  # again: another conversion may have ended meanwhile
            planned = _Planned(folder)
            if planned.is_committed:
                planned.delete()
            report = _finished(config, seed, folder)
            if report is None:
                plan = plan_conversion(config, seed, folder)
                make_shards(plan, config)
                report = commit(plan, folder, config.max_rejected_fraction, lock_number)
                _Planned(folder).delete_unlisted()
    except ValueError:
        # What holds nothing but the lock of a conversion that was refused is no use to a set.
        if is_held and folder.child(MANIFEST_FILE).exists() and not staged_files(staging):
            staging.delete()
        raise
    _delete_staging(staging)
    return report


class _Planned:
    """The plan in a staging folder, and what was made by it."""

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        file = folder.child(STAGING_FOLDER).child(PLAN)
        self._plan = Plan(**read_facts(file)) if file.exists() else None

    @property
    def is_committed(self) -> bool:
        """Whether the data set that is there, whole, is the one that was planned."""
        record = read_record(self._folder)
        if self._plan is None or record is None:
            return False
        return record.fingerprint == open_dataset(self._folder.uri).fingerprint

    def delete_unlisted(self) -> None:
        """Delete the plan's shards that the data set does not list."""
        if self._plan is not None:
            listed = {file.path for file in open_dataset(self._folder.uri).files}
            names = map(self._plan.name_of, range(self._plan.num_shards))
            for name in (name for name in names if name not in listed):
                self._folder.child(name).delete()

    def delete(self) -> None:
        """Also delete the plan's files in the staging folder, the plan itself last."""
        if self._plan is not None:
            self.delete_unlisted()
            staging = self._folder.child(STAGING_FOLDER)
            for name in sorted(staged_files(staging), key=lambda name: name == PLAN):
                if STAGED.fullmatch(name):
                    staging.child(name).delete()


def _delete_staging(staging: Location) -> None:
    if foreign := foreign_files(staging):
        _LOG.warning("%s stays: it holds %r, which is not ours", staging.uri, foreign[0])
    else:
        staging.delete()


@contextmanager
def _alone(folder: Location) -> Iterator[int]:
    """Keep other conversions out of a destination; yields the number that `check_lock` takes.

    The lock lies among what is deleted in the end. A conversion that has lost it, to another that
    could not see it alive, may continue for a while, since both make the same shards, but does not
    commit.
    """
    try:
        with hold_lock(folder.child(STAGING_FOLDER), on_lost=_LOG.warning) as number:
            yield number
    except HeldError as error:
        raise ValueError(
            f"convert.destination={folder.uri!r} is being written by another conversion: "
            f"{error}; wait for it or stop it, or choose another folder"
        ) from error
    except LockLostError as error:
        raise ValueError(f"convert.destination={folder.uri!r}: {error}") from error


def _finished(config: ConvertConfig, seed: int, folder: Location) -> ConvertReport | None:
    """The report of the data set that is there; None if there is something to do.

    Raises:
        ValueError: it is of other settings, or its source has changed.
    """
    record = read_record(folder)
    if record is None:
        return None
    if record.fingerprint != open_dataset(folder.uri).fingerprint:
        if folder.child(STAGING_FOLDER).child(PLAN).exists():
            return None  # a conversion was interrupted before its last file
        raise ValueError(
            f"{folder.child(SOURCE_FILE).uri!r} is of another data set than the {MANIFEST_FILE} "
            "in the same folder; restore both from a copy, or convert to another folder"
        )
    what = f"convert.destination={folder.uri!r} already holds a data set"
    if other := changed_settings(record.settings, settings_of(config, seed)):
        raise ValueError(
            f"{what} of other settings: {other}; put these back, or choose another folder"
        )
    changes = changes_since(record, units_of(config))
    if changes:
        raise ValueError(
            f"{what}, and its source has changed since: {text_of_changes(changes)}; choose "
            "another folder"
        )
    return report_of(folder)
