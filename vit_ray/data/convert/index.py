"""The rows of a source: indexed by tasks, stored on disk, and read in another order.

A task indexes some units, and writes their rows to a parquet file in the staging folder. Images
that no file of the source has as consecutive bytes (images in parquet, changed records) go to a
plain file next to it, where they can be read by offset.
"""

import contextlib
import errno
import functools
import hashlib
import itertools
import json
import os
import unicodedata
import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.archives import names_beside
from vit_ray.data.convert.labels import SourceFacts
from vit_ray.data.convert.rows import (
    FOLDERS,
    LISTS,
    ROW_SCHEMA,
    DamagedUnitError,
    Row,
    Unit,
    row_table,
)
from vit_ray.data.convert.sources import declared_classes, rows_of
from vit_ray.data.shard_writer import closed_after
from vit_ray.data.tasks import run_tasks
from vit_ray.storage import Location, locate, naming, read_again

_ROWS_AT_A_TIME: Final = 1 << 12
# Maximum number of tasks that index a source; with more class folders, a task indexes several.
_MAX_PARTS: Final = 1024
_REPEATED: Final = (
    "an earlier row of the source has the same key; give all labels of an image in one row"
)


def write_facts(file: Location, facts: dict[str, Any]) -> None:
    """Write JSON and its checksum."""
    content = json.dumps(facts).encode()
    file.write(b"%s\n%08x" % (content, zlib.crc32(content)))


def read_facts(file: Location) -> dict[str, Any]:
    """What `write_facts` wrote; raises ValueError if the checksum differs."""

    def read() -> dict[str, Any]:
        content, _, crc32 = file.read().rpartition(b"\n")
        if crc32 != b"%08x" % zlib.crc32(content):
            raise ValueError(
                f"{file.uri!r} is not what was written; delete it and run the same command again, "
                "or choose another convert.destination"
            )
        return dict(json.loads(content))

    return read_again(read, ValueError)


@contextlib.contextmanager
def parquet_output(destination: Location, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A parquet writer; the file appears at `destination` when the block ends without an error."""
    with destination.output() as stream:
        writer = pq.ParquetWriter(stream, schema, compression="zstd", write_page_checksum=True)
        with closed_after(writer):
            yield writer


def read_groups(location: Location) -> Iterator[pa.Table]:
    """The row groups of a parquet file, each read again if its checksum differs."""
    with naming(location.uri), location.open() as source:
        file = pq.ParquetFile(source, page_checksum_verification=True)
        for number in range(file.num_row_groups):
            read = functools.partial(file.read_row_group, number)
            yield read_again(read, OSError, pa.ArrowException)


def versions_of(units: list[Unit]) -> dict[str, str]:
    """The current version of each unit, by path."""
    results = run_tasks(_versions, _parts(units), title="looking at the source")
    return dict(itertools.chain(*results))


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
) -> tuple[list[Location], dict[str, str], str, set[tuple[str, ...]]]:
    """Index every unit.

    Returns:
        Parquet files of `ROW_SCHEMA`, in the order of the source; the version of each unit, by
        path; a digest of all images; and the class names of the units that declare them.

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
    digest = hashlib.sha256("".join(result["digest"] for result in results).encode())
    declared = {tuple(classes) for result in results for classes in result["declared"]}
    files = [staging.child(f"{name}.parquet") for name, _ in parts]
    return files, versions, digest.hexdigest()[:16], declared


def _index(part: tuple[str, list[Unit]], staging: Location) -> dict[str, Any]:
    """Write the rows of some units to files of this name, and return the facts of the units."""
    name, units = part
    facts: dict[str, Any] = {"versions": {}, "damages": [], "declared": []}
    digest, pack = hashlib.sha256(), staging.child(f"{name}.bin")
    with (
        parquet_output(staging.child(f"{name}.parquet"), ROW_SCHEMA) as writer,
        pack.output() as images,
    ):
        rows = _stored_rows(units, pack.uri, images, facts)
        while piece := list(itertools.islice(rows, _ROWS_AT_A_TIME)):
            writer.write_table(row_table(piece))
            lines = (f"{row.key}|{row.length}|{row.labels}\n" for row in piece)
            digest.update("".join(lines).encode())
    return facts | {"digest": digest.hexdigest()}


def _stored_rows(units: list[Unit], pack: str, images: Any, facts: dict[str, Any]) -> Iterator[Row]:
    """Rows without image bytes: the images are written to the stream `images` of the file `pack`.

    Rows in an archive get its version. Versions, declared classes and damages are added to `facts`.
    """
    for unit in units:
        listed, version = _listed(unit)
        facts["versions"][unit.path] = version
        try:
            for row in map(Row.storable, listed):
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
    repeated = pc.if_else(pa.array(is_first), None, _REPEATED).cast(problem.type)
    index = rows.schema.get_field_index("problem")
    return rows.set_column(index, ROW_SCHEMA.field(index), pc.coalesce(problem, repeated))
