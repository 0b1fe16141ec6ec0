"""Converts a source of images to a data set: shuffled once, checked, committed whole.

Two rounds of Ray tasks. The first indexes the source; the places of all images are then drawn into
the order of the data set by the recorded seed. The second makes the shards, a task each: it reads
the images of its shard wherever they lie, checks them, and writes the shard and its facts. A
finished shard is never made again; the manifest is written last, when every shard has been looked
at, and is the commit.
"""

import contextlib
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Final

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.commit import ConvertReport, commit, listed, report_of
from vit_ray.data.convert.destination import (
    OUTPUT,
    PLAN,
    check_apart,
    check_free,
    foreign_files,
    real_address,
    staged_files,
)
from vit_ray.data.convert.hub import check_in_place_bytes, facts_of_file
from vit_ray.data.convert.index import RowStore, build_index, versions_of
from vit_ray.data.convert.labels import (
    SourceFacts,
    check_columns,
    checked_label,
    checked_names,
    classes_of,
)
from vit_ray.data.convert.rows import Unit
from vit_ray.data.convert.shards import (
    PLAN_VERSION,
    Plan,
    make_shards,
    mean_written_bytes,
    shards_for,
    write_lists,
)
from vit_ray.data.convert.sources import units_of
from vit_ray.data.convert.staged_files import read_facts, write_facts
from vit_ray.data.dataset import MANIFEST_FILE, SOURCE_FILE, STAGING_FOLDER, open_dataset
from vit_ray.data.progress import Shown
from vit_ray.data.run_tasks import run_tasks
from vit_ray.lock import HeldError, LockLostError, check_lock, hold_lock
from vit_ray.storage import Location, absolute, locate, with_retries

_LOG: Final = logging.getLogger(__name__)
# Formats whose keys may be those of other rows.
_MAY_REPEAT: Final = ("csv", "jsonl", "webdataset")
# Keys of `convert` that may change between a conversion and its restart.
_DO_NOT_DECIDE: Final = {"destination", "max_rejected_fraction"}


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
    places: dict[str, Any] = {k: absolute(getattr(config, k)) for k in ("source", "destination")}
    if config.classes is not None:
        places["classes"] = tuple(checked_names(config.classes, "convert.classes"))
    config = config.model_copy(update=places)
    folder = locate(config.destination)
    check_columns(config.columns)
    check_apart(config)
    check_free(folder)
    if config.in_place:
        _check_in_place(config, folder)
    staging = folder.child(STAGING_FOLDER)
    if folder.child(MANIFEST_FILE).exists() and not staging.exists():
        return _finished(config, seed, folder)
    with _alone(folder) as lock_number:
        try:
            check_free(folder)  # again: another conversion may have ended meanwhile
            if folder.child(MANIFEST_FILE).exists():
                report = _finished(config, seed, folder)
            else:
                plan = _plan(config, seed, folder)
                make_shards(plan, config)
                report = commit(plan, folder, config.max_rejected_fraction, lock_number)
        except ValueError:
            _delete_what_no_restart_needs(folder, lock_number)
            raise
    _delete_staging(staging)
    return report


def _delete_what_no_restart_needs(folder: Location, lock_number: int) -> None:
    """After a refusal: an empty folder could be taken for a class of the next source.

    Nothing is deleted, and the refusal stays what is raised, if the folder is lost to another.
    """
    staging = folder.child(STAGING_FOLDER)
    with contextlib.suppress(LockLostError, OSError):
        check_lock(staging, lock_number)
        is_kept = staging.child(PLAN).exists() and not folder.child(MANIFEST_FILE).exists()
        if not is_kept and not foreign_files(staging):
            staging.delete()
        if folder.is_local:
            os.rmdir(folder.path)  # only if it is empty, and a folder of its own


def _delete_staging(staging: Location) -> None:
    if foreign := foreign_files(staging):
        _LOG.warning("%s stays: it holds %r, which is not ours", staging.uri, foreign[0])
    else:
        staging.delete()


@contextmanager
def _alone(folder: Location) -> Iterator[int]:
    """Keep other conversions out of a destination; yields the number that `check_lock` takes.

    A conversion that has lost the folder, to another that could not see it alive, may continue for
    a while, since both make the same shards, but does not commit.
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


def _settings_of(config: ConvertConfig, seed: int) -> dict[str, Any]:
    """What a restart must have in common with the first start, as JSON."""
    settings = config.model_dump(mode="json", exclude=_DO_NOT_DECIDE)
    return {"seed": seed, **settings, "classes": settings["classes"] or []}


def _changed_settings(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Each setting that differs, as a user gives it; empty for none."""
    names = [name for name in {**now, **then} if then.get(name) != now.get(name)]
    keys = {name: "seed" if name == "seed" else f"convert.{name}" for name in names}
    return ", ".join(f"{keys[n]}={now.get(n)!r} (it was {then.get(n)!r})" for n in names)


def _changes(then: dict[str, str], now: dict[str, str]) -> str:
    """Some paths of the source that are new, changed or gone; empty for none."""
    kinds = {
        "new": now.keys() - then.keys(),
        "changed": {path for path in now.keys() & then.keys() if now[path] != then[path]},
        "gone": then.keys() - now.keys(),
    }
    return ", ".join(f"{listed(sorted(paths))} {kind}" for kind, paths in kinds.items() if paths)


def _check_version(facts: dict[str, Any], folder: Location) -> None:
    if facts.get("version") != PLAN_VERSION:
        raise ValueError(
            f"convert.destination={folder.uri!r} was made by another version of vit_ray; convert "
            "to another folder, or delete this one"
        )


def _finished(config: ConvertConfig, seed: int, folder: Location) -> ConvertReport:
    """The report of the data set that is there.

    Raises:
        ValueError: it is of other settings, or its source has changed.
    """
    record = read_facts(folder.child(SOURCE_FILE))
    _check_version(record, folder)
    if record["source_digest"] != open_dataset(folder.uri).origin.get("source_digest"):
        raise ValueError(
            f"{folder.child(SOURCE_FILE).uri!r} is of another data set than the {MANIFEST_FILE} "
            "in the same folder; restore both from a copy, or convert to another folder"
        )
    what = f"convert.destination={folder.uri!r} already holds a data set"
    if other := _changed_settings(record["settings"], _settings_of(config, seed)):
        raise ValueError(
            f"{what} of other settings: {other}; put these back, or choose another folder"
        )
    if changes := _changes(record["versions"], versions_of(units_of(config))):
        raise ValueError(
            f"{what}, and its source has changed since: {changes}; choose another folder"
        )
    return report_of(folder)


def _plan(config: ConvertConfig, seed: int, folder: Location) -> Plan:
    """The plan of an interrupted conversion, or a new one.

    Raises:
        ValueError: the interrupted conversion has other settings; or the source cannot be indexed.
    """
    staging, settings = folder.child(STAGING_FOLDER), _settings_of(config, seed)
    if staging.child(PLAN).exists():
        fields = read_facts(staging.child(PLAN))
        _check_version(fields, folder)
        plan = Plan(**fields)
        if other := _changed_settings(plan.settings, settings):
            raise ValueError(
                f"{folder.uri!r} holds an interrupted conversion with another source or settings: "
                f"{other}; repeat its command there to continue it, or delete the folder"
            )
        changes = _changes(plan.versions, versions_of(units_of(config)))
        if not changes:
            return plan
        _LOG.warning(
            "the source of %s has changed, so it is planned again: %s", folder.uri, changes
        )
        for name in staged_files(staging):
            if not name.startswith("index-") and name != PLAN:
                staging.child(name).delete()
        for info in folder.list_files(recursive=False):
            if re.fullmatch(OUTPUT, info.base_name):
                folder.child(info.base_name).delete()
        staging.child(PLAN).delete()  # last: without it they could be someone else's
    units = units_of(config)
    versions = versions_of(units)
    if config.in_place:
        parts, facts = list[Location](), _index_in_place(units, config)
    else:
        parts, facts = build_index(units, versions, staging, config)
    of_folders = units[0].is_folder
    classes, are_indices = classes_of(facts, config, of_folders=of_folders)
    folders = {checked_label(u.path.rpartition("/")[2]) for u in units if u.format == "folder"}
    fields = {what: sorted(n for w, n in facts.fields if w == what) for what in dict(facts.fields)}
    plan = Plan(
        settings,
        versions,
        hashlib.sha256(facts.digest.encode()).hexdigest()[:16],
        classes,
        are_indices,
        facts.rows,
        num_shards=len(units),
        fields=fields,
        empty_classes=[] if config.classes else sorted(folders - facts.labels),
    )
    if not config.in_place:
        with tempfile.TemporaryDirectory() as scratch:
            store = RowStore(parts, scratch)
            if units[0].format in _MAY_REPEAT:
                store.find_repeated()
            written = float(facts.bytes)
            if config.shrink_to is not None or facts.unknown_lengths:
                written = mean_written_bytes(store, facts.rows, seed, config) * facts.rows
            plan = replace(plan, num_shards=shards_for(written, facts.rows, config))
            with_retries(lambda: write_lists(plan, store, seed, staging), "writing the shard lists")
    write_facts(staging.child(PLAN), asdict(plan))
    return plan


def _check_in_place(config: ConvertConfig, folder: Location) -> None:
    """Refuse files that cannot be read in place, before anything is written.

    Raises:
        ValueError: they are not parquet files of the Hugging Face layout, or the destination is
            inside their folder.
    """
    units = units_of(config)
    if units[0].format != "huggingface":
        raise ValueError(
            f"convert.in_place=true: {config.source!r} is of the format {units[0].format!r}; only "
            "parquet files in the layout of the Hugging Face hub can be read in place"
        )
    target, source = (real_address(place) for place in (folder, locate(units[0].folder)))
    if f"{target.rstrip('/')}/".startswith(f"{source.rstrip('/')}/"):
        raise ValueError(
            f"convert.destination={folder.uri!r} is in the folder of the files, "
            f"{units[0].folder!r}, which convert.in_place does not change; choose another folder"
        )


def _index_in_place(units: list[Unit], config: ConvertConfig) -> SourceFacts:
    """Facts about files from their footers and labels; a shard is made for each.

    Raises:
        ValueError: a row group cannot be read in place.
    """
    shown = Shown(f"reading labels of {config.source}")
    by_path = dict(run_tasks(_facts_in_place, units, shown=shown))
    return sum((by_path[unit.path] for unit in units), SourceFacts())


def _facts_in_place(unit: Unit) -> tuple[str, SourceFacts]:
    facts, groups, _ = with_retries(lambda: facts_of_file(unit), f"reading {unit.path}")
    for group, (rows, size) in enumerate(groups):
        if not rows:
            raise ValueError(
                f"{unit.path!r}: row group {group} has no rows, and cannot be read in place; set "
                "convert.in_place=false"
            )
        check_in_place_bytes(unit, group, size)
    return unit.path, facts
