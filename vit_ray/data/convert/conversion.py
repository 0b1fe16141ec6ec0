"""Converts a source of images to a data set, which is shuffled, checked, and committed as a whole.

Two rounds of Ray tasks. The first indexes the source; then the rows are shuffled with the recorded
seed. The second makes the shards, one task each: a task reads the images of its shard from the
source, checks them, and writes the shard and its facts. A finished shard is never made again. The
manifest is written last, after a check of every shard, and is the commit.
"""

import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.checks import (
    OUTPUT,
    PLAN,
    SAMPLED,
    check_destination,
    sampled,
    shards_for,
)
from vit_ray.data.convert.index import RowStore, build_index, read_facts, versions_of, write_facts
from vit_ray.data.convert.labels import (
    SourceFacts,
    check_not_empty,
    checked_label,
    checked_names,
    classes_of,
)
from vit_ray.data.convert.rows import FOLDERS, LISTS, Unit, table_rows
from vit_ray.data.convert.shards import (
    SHUFFLE,
    ConvertReport,
    Plan,
    commit,
    listed,
    make_shards,
    write_lists,
)
from vit_ray.data.convert.sources import units_of
from vit_ray.data.dataset import (
    MANIFEST_FILE,
    REPORT_FILE,
    SOURCE_FILE,
    STAGING_FOLDER,
    open_dataset,
)
from vit_ray.data.keyed_random import KeyedPermutation
from vit_ray.data.shard_writer import RESERVED_NAMES
from vit_ray.lock import HeldError, LockLostError, check_lock, hold_lock
from vit_ray.storage import Location, absolute, locate, with_retries

_LOG: Final = logging.getLogger(__name__)
# Formats in which several rows may have the same key.
_MAY_REPEAT: Final = (*LISTS, "webdataset")
# Keys of `convert` that may change between a conversion and its restart.
_MAY_CHANGE: Final = {"destination", "max_rejected_fraction"}
# What to do if it is unknown which conversion wrote a folder.
_ELSEWHERE: Final = "choose another convert.destination"
# Version of the files in the staging folder, and of `source.json`.
_VERSION: Final = 9


def convert(config: ConvertConfig, seed: int = 0) -> ConvertReport:
    """Convert images to a data set, or finish an interrupted conversion. Ray must be running.

    If the destination already has the data set of this source and these settings, nothing is done,
    and its report is returned.

    Args:
        seed: for the shuffle of all rows.

    Raises:
        ValueError: the source has no images, is damaged or has several splits; too many images are
            rejected; or the destination is in the source, is being written by another conversion,
            or has a complete or interrupted data set of another source or other settings.
    """
    config = _resolved(config)
    check_destination(config)
    # A restart must have the same settings.
    keys = config.model_dump(mode="json", exclude=_MAY_CHANGE)
    settings: dict[str, Any] = {"version": _VERSION, "seed": seed, **keys}
    folder = locate(config.destination)
    staging, manifest = folder.child(STAGING_FOLDER), folder.child(MANIFEST_FILE)
    if manifest.exists() and not staging.exists():
        return _finished(config, settings, folder)
    with _alone(folder) as lock_number:
        try:
            check_destination(config)  # again: another conversion may have finished meanwhile
            if manifest.exists():
                report = _finished(config, settings, folder)
            else:
                plan = _plan(config, settings, folder)
                make_shards(plan, config)
                report = commit(plan, folder, config.max_rejected_fraction, lock_number)
        except ValueError:
            _delete_what_no_restart_needs(folder, lock_number)
            raise
    staging.delete()
    return report


def _resolved(config: ConvertConfig) -> ConvertConfig:
    """Make addresses absolute, as workers have other working directories, and check names.

    Raises:
        ValueError: names of columns or classes cannot be used.
    """
    if reserved := {*config.columns} & {*RESERVED_NAMES}:
        raise ValueError(
            f"convert.columns={list(config.columns)}: all data sets have columns "
            f"{sorted(reserved)}; name other fields"
        )
    update: dict[str, Any] = {k: absolute(getattr(config, k)) for k in ("source", "destination")}
    if config.classes is not None:
        update["classes"] = tuple(checked_names(config.classes, "convert.classes"))
    return config.model_copy(update=update)


def _delete_what_no_restart_needs(folder: Location, lock_number: int) -> None:
    """Clean up after a refusal, as an empty folder could be taken for a class of the next source.

    Nothing is deleted if another conversion has taken the folder over.
    """
    staging = folder.child(STAGING_FOLDER)
    with contextlib.suppress(LockLostError, OSError):
        check_lock(staging, lock_number)
        if not staging.child(PLAN).exists() or folder.child(MANIFEST_FILE).exists():
            staging.delete()
        if folder.is_local:
            os.rmdir(folder.path)  # fails if the folder is not empty, or a link


@contextlib.contextmanager
def _alone(folder: Location) -> Iterator[int]:
    """Hold the lock of a destination; yields the number for `check_lock`.

    A conversion that has lost its lock may continue for a while, since both conversions make the
    same shards, but it does not commit.
    """
    try:
        with hold_lock(folder.child(STAGING_FOLDER), on_lost=_LOG.warning) as number:
            yield number
    except (HeldError, LockLostError) as error:
        raise ValueError(
            f"convert.destination={folder.uri!r} is being written by another conversion: "
            f"{error}; wait for it or stop it, or choose another folder"
        ) from error


def _record_of(file: Location, now: dict[str, Any], what: str) -> dict[str, Any]:
    """The plan, or the record of the source, that a conversion wrote.

    Raises:
        ValueError: that conversion had other settings, which are listed.
    """
    record = read_facts(file, _ELSEWHERE)
    then = record["settings"]
    if then.get("version") != _VERSION:
        raise ValueError(f"{what} of another version of vit_ray; {_ELSEWHERE}")
    changes = [
        f"{'' if key == 'seed' else 'convert.'}{key}={now.get(key)!r} (it was {then.get(key)!r})"
        for key in {**now, **then}
        if then.get(key) != now.get(key)
    ]
    if changes:
        raise ValueError(
            f"{what} of other settings: {', '.join(changes)}; repeat them, or choose another folder"
        )
    return record


def _changes(then: dict[str, str], now: dict[str, str]) -> str:
    """The first paths of the source that are new, changed or gone; empty if there are none."""
    kinds = {
        "new": now.keys() - then.keys(),
        "changed": {path for path in now.keys() & then.keys() if now[path] != then[path]},
        "gone": then.keys() - now.keys(),
    }
    return ", ".join(f"{listed(sorted(paths))} {kind}" for kind, paths in kinds.items() if paths)


def _finished(config: ConvertConfig, settings: dict[str, Any], folder: Location) -> ConvertReport:
    """The report of the existing data set.

    Raises:
        ValueError: the data set has other settings, or its source has changed.
    """
    what = f"convert.destination={folder.uri!r} already holds a data set"
    record = _record_of(folder.child(SOURCE_FILE), settings, what)
    if changes := _changes(record["versions"], versions_of(units_of(config))):
        raise ValueError(
            f"{what}, and its source has changed since: {changes}; choose another folder"
        )
    fields = json.loads(folder.child(REPORT_FILE).read())
    fields |= {"was_done": True, "fingerprint": open_dataset(folder.uri).fingerprint}
    return ConvertReport(**fields)


def _plan(config: ConvertConfig, settings: dict[str, Any], folder: Location) -> Plan:
    """The plan of an interrupted conversion, or a new one.

    Raises:
        ValueError: the interrupted conversion has other settings; or the source cannot be indexed.
    """
    staging = folder.child(STAGING_FOLDER)
    file = staging.child(PLAN)
    what = f"convert.destination={folder.uri!r} holds an interrupted conversion"
    record = _record_of(file, settings, what) if file.exists() else None
    units = units_of(config)
    if record is not None:
        changes = _changes(record["versions"], versions_of(units))
        if not changes:
            return Plan(**record)
        _LOG.warning("the source has changed, so it is planned again: %s", changes)
        # The plan last: without a plan, the shards could be from someone else.
        _delete(folder, OUTPUT)
        file.delete()
    _delete(staging, "(list|shard)-.*")
    plan = _new_plan(units, settings, staging, config)
    write_facts(file, asdict(plan))
    return plan


def _delete(folder: Location, pattern: str) -> None:
    for info in folder.list_files(recursive=False):
        if re.fullmatch(pattern, info.base_name):
            folder.child(info.base_name).delete()


def _new_plan(
    units: list[Unit], settings: dict[str, Any], staging: Location, config: ConvertConfig
) -> Plan:
    """Index the source, and write the list of rows of each shard.

    Raises:
        ValueError: the source cannot be indexed, or the meaning of its labels is not clear.
    """
    parts, versions, digest, declared = build_index(units, staging, config)
    with tempfile.TemporaryDirectory() as scratch:
        store = with_retries(lambda: RowStore(parts, scratch, config), "reading the index")
        facts = replace(store.facts, declared=declared)
        check_not_empty(facts, config)
        if absent := [name for name, count in facts.columns.items() if not count]:
            raise ValueError(
                f"convert.columns={list(config.columns)}: no image of the source has a field "
                f"{absent[0]!r}; check its name"
            )
        classes, are_indices = classes_of(facts, config, of_folders=units[0].format in FOLDERS)
        if units[0].format in _MAY_REPEAT:
            store.find_repeated()
        plan = Plan(
            settings,
            versions,
            digest,
            classes,
            are_indices,
            num_images=facts.rows,
            num_shards=len(units)
            if config.in_place
            else _num_shards(facts, store, settings, config),
            folder=units[0].folder,
        )
        # Folders without images are no classes, and so have no label.
        names = (unit.path.rpartition("/")[2] for unit in units if unit.format == "folder")
        no_classes = sorted(set(map(checked_label, names)) - plan.label_of().keys())
        plan = replace(plan, no_classes=no_classes)
        if not config.in_place:
            with_retries(lambda: write_lists(plan, store, staging), "writing the shard lists")
    return plan


def _num_shards(
    facts: SourceFacts, store: RowStore, settings: dict[str, Any], config: ConvertConfig
) -> int:
    image_bytes = float(facts.bytes)
    if config.shrink_to is not None or facts.unknown_lengths:
        order = KeyedPermutation(facts.rows, SHUFFLE, settings["seed"])
        sample = order.ranks(np.arange(min(SAMPLED, facts.rows), dtype=np.int64))
        sizes, *_ = sampled(table_rows(store.take(np.sort(sample))), config)
        image_bytes = sum(sizes) / len(sample) * facts.rows
    return shards_for(image_bytes + facts.text_bytes, facts.rows, config)
