"""Converts a source of images to a data set, which is shuffled, checked, and committed as a whole.

Two rounds of Ray tasks. The first indexes the source; then the rows are shuffled with the recorded
seed. The second makes the shards, one task each: a task reads the images of its shard from the
source, checks them, and writes the shard and its facts. A finished shard is never made again. The
manifest is written last, after a check of every shard, and is the commit.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import pyarrow as pa

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.checks import (
    OUTPUT,
    SAMPLED,
    STAGED,
    check_destination,
    delete_files,
    sampled,
    shards_for,
)
from vit_ray.data.convert.index import (
    build_index,
    read_facts,
    read_index,
    taken,
    versions_of,
    without_repeats,
    write_facts,
)
from vit_ray.data.convert.labels import (
    SourceFacts,
    check_not_empty,
    checked_label,
    checked_names,
    classes_of,
)
from vit_ray.data.convert.rows import FOLDERS, LISTS, table_rows
from vit_ray.data.convert.shards import (
    SHUFFLE,
    ConvertReport,
    Plan,
    commit,
    listed,
    make_shards,
    report_of,
    write_lists,
)
from vit_ray.data.convert.sources import units_of
from vit_ray.data.dataset import (
    MANIFEST_FILE,
    SOURCE_FILE,
    STAGING_FOLDER,
)
from vit_ray.data.keyed_random import KeyedPermutation
from vit_ray.data.shard_writer import RESERVED_NAMES
from vit_ray.lock import HeldError, check_lock, hold_lock
from vit_ray.outcomes import LockLostError
from vit_ray.storage import Location, absolute, locate, with_retries

_LOG: Final = logging.getLogger(__name__)
# Formats in which several rows may have the same key. Files of two folders are none, even if the
# folders differ only in the Unicode form of their names.
_MAY_REPEAT: Final = (*LISTS, "webdataset")
# Keys of `convert` that may change between a conversion and its restart.
_MAY_CHANGE: Final = {"destination", "max_rejected_fraction"}
# Settings of a conversion that are no keys of `convert`.
_OTHER_SETTINGS: Final = ("seed", "version")
# Version of the files in the staging folder, and of `source.json`.
_VERSION: Final = 11


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
        _earlier_plan(config, settings, folder)
        return report_of(folder, was_done=True)
    with _alone(folder) as lock_number:
        check_destination(config)  # again: another conversion may have finished meanwhile
        plan = _earlier_plan(config, settings, folder) or _new_plan(config, settings, folder)
        if not (was_done := manifest.exists()):
            make_shards(plan, config)
            commit(plan, folder, config.max_rejected_fraction, lock_number)
    staging.delete()
    return report_of(folder, was_done=was_done)


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


@contextlib.contextmanager
def _alone(folder: Location) -> Iterator[int]:
    """Hold the lock of a destination; yields the number for `check_lock`.

    A conversion that has lost its lock may continue for a while, since both conversions make the
    same shards, but it does not commit. After a refusal, what no restart needs is deleted: an empty
    folder could be taken for a class of the next source.
    """
    staging = folder.child(STAGING_FOLDER)
    try:
        with hold_lock(staging, on_lost=_LOG.warning) as number:
            try:
                yield number
            except ValueError:
                with contextlib.suppress(LockLostError, OSError):
                    check_lock(staging, number)  # else the folder is another conversion's
                    if (
                        not folder.child(SOURCE_FILE).exists()
                        or folder.child(MANIFEST_FILE).exists()
                    ):
                        staging.delete()
                    if folder.is_local:
                        os.rmdir(folder.path)  # fails if the folder is not empty, or a link
                raise
    except (HeldError, LockLostError) as error:
        raise ValueError(f"convert.destination={folder.uri!r}: {error}") from error


def _earlier_plan(config: ConvertConfig, settings: dict[str, Any], folder: Location) -> Plan | None:
    """The plan of the finished or interrupted conversion in a folder; None for a new one.

    Raises:
        ValueError: that conversion had other settings, or is finished and its source has changed.
    """
    file, is_finished = folder.child(SOURCE_FILE), folder.child(MANIFEST_FILE).exists()
    if not file.exists():
        return None
    holds = "already holds a data set" if is_finished else "holds an interrupted conversion"
    what = f"convert.destination={folder.uri!r} {holds}"
    record = read_facts(file)
    differences = [
        f"{'' if key in _OTHER_SETTINGS else 'convert.'}{key}={value!r} (it was {then!r})"
        for key, value in settings.items()
        if (then := record["settings"].get(key)) != value
    ]
    if differences:
        raise ValueError(
            f"{what} of other settings: {', '.join(differences)}; repeat them, or choose another "
            "folder"
        )
    # Units that are new, changed or gone.
    units = versions_of(units_of(config)).items() ^ record["versions"].items()
    changes = sorted({path for path, _ in units})
    if not changes:
        return Plan(**record)
    if is_finished:
        raise ValueError(
            f"{what}, and its source has changed since: {listed(changes)} (new, changed or gone); "
            "choose another folder"
        )
    _LOG.warning("the source has changed, so it is planned again: %s", listed(changes))
    delete_files(folder, OUTPUT)
    return None


def _new_plan(config: ConvertConfig, settings: dict[str, Any], folder: Location) -> Plan:
    """Index the source, and write the list of rows of each shard, and then the plan.

    Raises:
        ValueError: the source cannot be indexed, or the meaning of its labels is not clear.
    """
    staging, units, seed = folder.child(STAGING_FOLDER), units_of(config), settings["seed"]
    delete_files(staging, STAGED)
    parts, versions, digest, declared = build_index(units, staging, config)
    with tempfile.TemporaryDirectory() as scratch:
        rows, facts = with_retries(lambda: read_index(parts, scratch, config), "reading the index")
        facts.declared = declared
        check_not_empty(facts, config)
        if absent := [name for name, count in facts.columns.items() if not count]:
            raise ValueError(
                f"convert.columns={list(config.columns)}: no image of the source has a field "
                f"{absent[0]!r}; check its name"
            )
        classes, label_of = classes_of(facts, config, of_folders=units[0].format in FOLDERS)
        plan = Plan(
            settings,
            versions,
            digest,
            classes,
            label_of,
            num_images=facts.rows,
            num_shards=len(units) if config.in_place else _num_shards(facts, rows, seed, config),
            folder=units[0].folder,
        )
        # Folders without images are no classes, and so have no label.
        folders = (unit.path.rpartition("/")[2] for unit in units if unit.format == "folder")
        plan.no_classes.extend(sorted({*map(checked_label, folders)} - label_of.keys()))
        if not config.in_place:
            if units[0].format in _MAY_REPEAT:
                rows = without_repeats(rows)
            with_retries(lambda: write_lists(plan, rows, staging), "writing the shard lists")
    write_facts(folder.child(SOURCE_FILE), asdict(plan))
    return plan


def _num_shards(facts: SourceFacts, rows: pa.Table, seed: int, config: ConvertConfig) -> int:
    image_bytes = float(facts.bytes)
    if config.shrink_to is not None or not facts.bytes:  # lists do not give the sizes of files
        order = KeyedPermutation(facts.rows, SHUFFLE, seed)
        sample = np.sort(order.ranks(np.arange(min(SAMPLED, facts.rows), dtype=np.int64)))
        images = sampled(table_rows(taken(rows.to_batches(), sample)), config)
        sizes = (len(image.image) for image in images if not isinstance(image, str))
        image_bytes = sum(sizes) / len(sample) * facts.rows
    return shards_for(image_bytes, facts.rows, config)
