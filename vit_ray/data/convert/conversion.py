"""Converts a source of images to a data set, which is shuffled, checked, and committed as a whole.

Two rounds of Ray tasks. The first indexes the source; then the rows are shuffled with the recorded
seed. The second makes the shards, one task each: a task reads the images of its shard from the
source, checks them, and writes the shard and its facts. A finished shard is never made again. The
manifest is written last, after a check of every shard, and is the commit.
"""

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import tempfile
import unicodedata
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.archives import names_beside
from vit_ray.data.convert.checks import (
    OUTPUT,
    SAMPLED,
    STAGED,
    check_destination,
    delete_files,
    sampled,
    shards_for,
)
from vit_ray.data.convert.labels import (
    SourceFacts,
    check_not_empty,
    checked_label,
    checked_names,
    classes_of,
)
from vit_ray.data.convert.rows import (
    FOLDERS,
    LISTS,
    ROW_SCHEMA,
    DamagedUnitError,
    Row,
    Unit,
    row_table,
    table_rows,
)
from vit_ray.data.convert.shards import (
    LIST,
    ConvertReport,
    Plan,
    commit,
    listed,
    make_shards,
    parquet_output,
    read_facts,
    read_groups,
    report_of,
    write_facts,
)
from vit_ray.data.convert.sources import declared_classes, rows_of, units_of
from vit_ray.data.dataset import (
    MANIFEST_FILE,
    SOURCE_FILE,
    STAGING_FOLDER,
)
from vit_ray.data.keyed_random import KeyedPermutation
from vit_ray.data.shard_writer import RESERVED_NAMES
from vit_ray.data.tasks import run_tasks
from vit_ray.lock import HeldError, check_lock, hold_lock
from vit_ray.outcomes import LockLostError
from vit_ray.storage import Location, absolute, locate, with_retries

_LOG: Final = logging.getLogger(__name__)
SHUFFLE: Final = 5
_ROWS_AT_A_TIME: Final = 1 << 12
# Maximum number of tasks that index a source; with more class folders, a task indexes several.
_MAX_PARTS: Final = 1024
# Formats in which several rows may have the same key. Files of two folders are none, even if the
# folders differ only in the Unicode form of their names.
_MAY_REPEAT: Final = (*LISTS, "webdataset")
# Keys of `convert` that may change between a conversion and its restart.
_MAY_CHANGE: Final = {"destination", "max_rejected_fraction"}
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
    settings = {"version": _VERSION, "seed": seed} | {f"convert.{k}": v for k, v in keys.items()}
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
            commit(plan, config, lock_number)
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
        f"{key}={value!r} (it was {then!r})"
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
    parts, versions, declared = build_index(units, staging, config)
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
        folders = {unit.path.rpartition("/")[2] for unit in units if unit.format == "folder"}
        plan = Plan(
            settings,
            versions,
            classes,
            label_of,
            num_images=facts.rows,
            num_shards=len(units) if config.in_place else _num_shards(facts, rows, seed, config),
            folder=units[0].folder,
            # Folders without images are no classes, and so have no label.
            no_classes=sorted({*map(checked_label, folders)} - label_of.keys()),
        )
        if not config.in_place:
            if units[0].format in _MAY_REPEAT:
                rows = without_repeats(rows)
            with_retries(lambda: write_lists(plan, config, rows), "writing the shard lists")
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


def write_lists(plan: Plan, config: ConvertConfig, source_rows: pa.Table) -> None:
    """Shuffle all rows, and write the list of rows of each shard."""
    order = KeyedPermutation(plan.num_images, SHUFFLE, plan.settings["seed"])
    # A row group is never divided between shards.
    groups = -(-plan.num_images // config.rows_per_row_group)
    firsts = [
        shard * groups // plan.num_shards * config.rows_per_row_group
        for shard in range(plan.num_shards)
    ]
    staging, batches = locate(config.destination).child(STAGING_FOLDER), source_rows.to_batches()
    for shard, (first, end) in enumerate(itertools.pairwise([*firsts, plan.num_images])):
        numbers = order.ranks(np.arange(first, end, dtype=np.int64))
        with parquet_output(staging.child(LIST.format(shard)), ROW_SCHEMA) as writer:
            writer.write_table(taken(batches, numbers))


def versions_of(units: list[Unit]) -> dict[str, str]:
    """The current version of each unit, by path."""
    return dict(
        itertools.chain(*run_tasks(_versions, _parts(units), title="looking at the source"))
    )


def _parts(units: list[Any]) -> list[list[Any]]:
    size = -(-len(units) // _MAX_PARTS)
    return [units[at : at + size] for at in range(0, len(units), size)]


def _versions(units: list[Unit]) -> list[tuple[str, str]]:
    return [(unit.path, _listed(unit)[1]) for unit in units]


def _listed(unit: Unit) -> tuple[Iterable[Row], str]:
    """The rows of a unit, and its version.

    The version of a folder or a list is a digest of its content, so that touching a list changes
    nothing. The version of an archive is that of its file and of the file with its class names.
    """
    rows: Iterable[Row] = rows_of(unit, with_images=not unit.config.in_place)
    if unit.format in FOLDERS:
        rows = list(rows)
        facts = [(row.key, row.length, row.version, row.problem) for row in rows]
        return rows, hashlib.sha256(repr(facts).encode()).hexdigest()
    if unit.format in LISTS:
        with unit.opened() as (file, _):
            return rows, hashlib.file_digest(file, "sha256").hexdigest()
    names = [names_beside(unit)] if unit.format == "tfrecord" else []
    infos = [location.info() for location in (locate(unit.path), *names)]
    return rows, " ".join(info.version for info in infos if info.kind != "nothing")


def build_index(
    units: list[Unit], staging: Location, config: ConvertConfig
) -> tuple[list[Location], dict[str, str], set[tuple[str, ...]]]:
    """Index every unit.

    Returns:
        Parquet files of `ROW_SCHEMA`, in the order of the source; the version of each unit, by
        path; and the class names of the units that declare them.

    Raises:
        ValueError: an archive is damaged.
    """
    token = uuid.uuid4().hex[:8]  # late tasks of an earlier start write other files
    parts = [(f"index-{token}-{i:04d}", part) for i, part in enumerate(_parts(units))]
    results = run_tasks(_index, parts, staging, title=f"indexing {config.source}")
    if damages := [damage for result in results for damage in result["damages"]]:
        raise ValueError(
            f"convert: {len(damages)} files of the source are damaged: {'; '.join(damages[:5])}; "
            "replace them"
        )
    versions = dict(itertools.chain(*(result["versions"].items() for result in results)))
    declared = {tuple(classes) for result in results for classes in result["declared"]}
    files = [staging.child(f"{name}.parquet") for name, _ in parts]
    return files, versions, declared


def _index(part: tuple[str, list[Unit]], staging: Location) -> dict[str, Any]:
    """Write the rows of some units to files of this name, and return the facts of the units."""
    name, units = part
    facts: dict[str, Any] = {"versions": {}, "damages": [], "declared": []}
    pack = staging.child(f"{name}.bin")
    with (
        parquet_output(staging.child(f"{name}.parquet"), ROW_SCHEMA) as writer,
        pack.output() as images,
    ):
        rows = _stored_rows(units, pack.uri, images, facts)
        while piece := list(itertools.islice(rows, _ROWS_AT_A_TIME)):
            writer.write_table(row_table(piece))
    return facts


def _stored_rows(units: list[Unit], pack: str, images: Any, facts: dict[str, Any]) -> Iterator[Row]:
    """Rows without image bytes: the images are written to the stream `images` of the file `pack`.

    Rows in an archive get its version. Versions, declared classes and damages are added to `facts`.
    """
    for unit in units:
        unit_rows, version = _listed(unit)
        facts["versions"][unit.path] = version
        try:
            for row in map(Row.storable, unit_rows):
                if row.image is not None and row.problem is None:
                    start, length = images.tell(), len(row.image)
                    images.write(row.image)
                    row = replace(row, path=pack, offset=start, length=length)
                elif row.path == unit.path and row.offset >= 0:
                    row = replace(row, version=version.partition(" ")[0])
                yield replace(row, image=None)
            facts["declared"] += filter(None, [declared_classes(unit)])
        except DamagedUnitError as error:
            facts["damages"].append(str(error))


def read_index(
    parts: list[Location], scratch: str, config: ConvertConfig
) -> tuple[pa.Table, SourceFacts]:
    """All rows of an index, in a local file that is mapped into memory, and their facts.

    Args:
        scratch: a folder on a local disk; each image needs about 100 bytes and its path.
        config: with `in_place`, rows are only counted.
    """
    path, facts = f"{scratch}/rows.arrow", SourceFacts(dict.fromkeys(config.columns, 0))
    try:
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, ROW_SCHEMA) as writer:
            for table in itertools.chain.from_iterable(map(read_groups, parts)):
                facts.add(table)
                if not config.in_place:
                    writer.write_table(table)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = f"{os.strerror(error.errno)}; set TMPDIR to a larger disk"
        raise OSError(error.errno, text, path) from error
    return pa.ipc.open_file(pa.memory_map(path)).read_all(), facts


def taken(batches: list[pa.RecordBatch], numbers: NDArray[np.int64]) -> pa.Table:
    """The rows of a source with these numbers, in this order.

    `Table.take` would copy the lists of all rows into memory first.
    """
    starts = np.cumsum([0, *map(len, batches)])
    order = np.argsort(numbers)
    cuts = np.searchsorted(numbers[order], starts)
    parts = [
        batches[i].take(pa.array(numbers[order[cuts[i] : cuts[i + 1]]] - starts[i]))
        for i in np.flatnonzero(np.diff(cuts)).tolist()
    ]
    table = pa.Table.from_batches(parts, ROW_SCHEMA).combine_chunks()
    return table.take(pa.array(np.argsort(order)))


def without_repeats(rows: pa.Table) -> pa.Table:
    """The rows, of which those with the key of an earlier row have a problem.

    Keys are compared in the form NFC, since two names of one file may differ in their form.
    """
    keys = (key for chunk in rows["key"].chunks for key in chunk.to_pylist())
    hashes = (hash(unicodedata.normalize("NFC", key)) for key in keys)
    _, firsts = np.unique(np.fromiter(hashes, np.int64, len(rows)), return_index=True)
    is_first = np.isin(np.arange(len(rows)), firsts)
    problem = rows["problem"]
    text = "an earlier row of the source has the same key; give all labels of an image in one row"
    repeated = pc.if_else(pa.array(is_first), None, text).cast(problem.type)
    index = rows.schema.get_field_index("problem")
    return rows.set_column(index, ROW_SCHEMA.field(index), pc.coalesce(problem, repeated))
