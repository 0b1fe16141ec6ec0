"""The rows of a whole source: indexed by tasks, kept on disk, and drawn into another order.

A task indexes some units, and writes their rows to a parquet file in the staging folder; images
that do not lie anywhere as they are (of parquet, of compressed records) go to a plain file next to
it, where they can be read at any offset.
"""

import contextlib
import errno
import functools
import hashlib
import os
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.labels import SourceFacts
from vit_ray.data.convert.rows import (
    ROW_SCHEMA,
    DamagedUnitError,
    Row,
    Unit,
    in_pieces,
    row_table,
)
from vit_ray.data.convert.sources import class_names_in_file, fields_in_file, rows_of
from vit_ray.data.convert.staged_files import (
    parquet_output,
    read_facts,
    read_row_groups,
    write_facts,
)
from vit_ray.data.convert.tfrecords import names_beside
from vit_ray.data.progress import Shown, report_done
from vit_ray.data.run_tasks import run_tasks
from vit_ray.storage import Location, locate, with_retries

# Most rows of a row group of an index file.
ROWS_AT_A_TIME: Final = 1 << 14
# Characters after which a row group ends: captions, or lists of labels, may be long.
CHARACTERS_AT_A_TIME: Final = 16 << 20
# Most tasks that index a source; of tens of thousands of class folders, each takes several.
MOST_PARTS: Final = 1024
_PIECE: Final = 1 << 20
REPEATED: Final = (
    "an earlier row of the source has the same key; give all labels of an image in one row"
)


def versions_of(units: list[Unit]) -> dict[str, str]:
    """The present version of each unit, by its path."""
    found = run_tasks(_versions, _parts(units), shown=Shown("looking at the source"))
    return {path: version for versions in found for path, version in versions}


def _parts(units: list[Unit]) -> list[list[Unit]]:
    """The units in runs of equal length, one for each task."""
    size = -(-len(units) // MOST_PARTS)
    return [units[at : at + size] for at in range(0, len(units), size)]


def _versions(units: list[Unit]) -> list[tuple[str, str]]:
    versions = []
    for number, unit in enumerate(units, 1):
        read = functools.partial(_version, unit)
        versions.append((_place(unit), with_retries(read, f"looking at {unit.path}")))
        report_done(number)
    return versions


def _place(unit: Unit) -> str:
    """What a unit is called in a record: a folder, and the images next to its classes, differ."""
    return f"{unit.path}/*" if unit.format == "loose" else unit.path


def _version(unit: Unit) -> str:
    """Of an archive, and of the file next to it with its class names; of a folder or a list its
    content, so that touching a list is no change.
    """
    digest = hashlib.sha256()
    if unit.is_folder:
        for row in rows_of(unit):
            digest.update(repr((row.key, row.length, row.version, row.problem)).encode())
    elif unit.is_list:
        with unit.opened() as (file, _):
            while piece := file.read(_PIECE):
                digest.update(piece)
    else:
        names = [names_beside(unit)] if unit.format == "tfrecord" else []
        infos = [place.info() for place in (locate(unit.path), *names)]
        return " ".join(info.version for info in infos if info.kind != "nothing")
    return digest.hexdigest()[:32]


def build_index(
    units: list[Unit], versions: dict[str, str], staging: Location, config: ConvertConfig
) -> tuple[list[Location], SourceFacts]:
    """Index every unit; parts that an earlier start has indexed are reused.

    Returns:
        Parquet files of `ROW_SCHEMA`, in the order of the source, and the facts of all.

    Raises:
        ValueError: the source has no images, an archive is damaged, or no image has one of the
            columns.
    """
    parts = {}
    for number, part in enumerate(_parts(units)):
        now = [versions.get(_place(unit), "") for unit in part]
        digest = hashlib.sha256(repr((number, part, now)).encode()).hexdigest()
        parts[f"index-{digest[:16]}"] = (part, now)
    for info in staging.list_files(recursive=False):
        if info.base_name.startswith("index-") and info.base_name.partition(".")[0] not in parts:
            staging.child(info.base_name).delete()  # of other settings, or an earlier source
    shown = Shown(f"indexing {config.source}")
    by_name = dict(run_tasks(_index, list(parts.items()), staging.uri, shown=shown))
    found = sum((by_name[name] for name in parts), SourceFacts())
    if found.damages:
        some = "; ".join(found.damages[:5]) + ("; and others" if len(found.damages) > 5 else "")
        raise ValueError(
            f"convert: {len(found.damages)} files of the source are damaged: {some}; replace them"
        )
    if not found.rows:
        raise ValueError(
            f"convert.source holds no images: {units[0].path!r} is the first of {len(units)} parts "
            "that were checked; check its format"
        )
    if absent := [name for name in config.columns if name not in found.columns]:
        raise ValueError(
            f"convert.columns={list(config.columns)}: no image of the source has a field "
            f"{absent[0]!r}; check its name"
        )
    return [staging.child(f"{name}.parquet") for name in parts], found


def _index(
    item: tuple[str, tuple[list[Unit], list[str]]], staging_uri: str
) -> tuple[str, SourceFacts]:
    """Write the rows of some units, and their facts when the rows are complete."""
    name, (units, versions) = item
    staging = locate(staging_uri)
    file = staging.child(f"{name}.json")
    if file.exists():
        return name, SourceFacts.of(read_facts(file))
    what = f"indexing {units[0].path}"
    facts = with_retries(lambda: _write_rows(units, versions, staging, name), what)
    if not facts.damages:  # a repaired file may have the same size and time
        write_facts(file, vars(facts))
    return name, facts


def _write_rows(
    units: list[Unit], versions: list[str], staging: Location, name: str
) -> SourceFacts:
    facts, digest = SourceFacts(), hashlib.sha256()
    rows = _packed(_rows_of_units(units, versions, facts), staging.child(f"{name}.bin"))
    with parquet_output(staging.child(f"{name}.parquet"), ROW_SCHEMA) as writer:
        for piece in in_pieces(rows, ROWS_AT_A_TIME, CHARACTERS_AT_A_TIME):
            writer.write_table(row_table(piece))
            for row in piece:
                facts.add(row, units[0].columns)
                digest.update(f"{row.key}|{row.length}|{row.labels}\n".encode())
            report_done(facts.rows)
    facts.digest = digest.hexdigest()
    return facts


def _rows_of_units(units: list[Unit], versions: list[str], facts: SourceFacts) -> Iterator[Row]:
    """Rows that can be stored, with the version of the archive that they lie in."""
    for unit, version in zip(units, versions, strict=True):
        of_archive = version.partition(" ")[0]
        try:
            for found in rows_of(unit):
                row = found.storable()
                in_archive = row.path == unit.path and row.offset >= 0
                yield replace(row, version=of_archive) if in_archive else row
        except DamagedUnitError as error:
            facts.damages.append(str(error))
            continue
        if (declared := class_names_in_file(unit)) is not None:
            facts.declared.add(tuple(declared))
        facts.fields.update(fields_in_file(unit).items())


def _packed(rows: Iterable[Row], pack: Location) -> Iterator[Row]:
    """Rows whose images all lie somewhere: those in hand are written to a plain file."""
    offset = 0
    with contextlib.ExitStack() as files:
        output: Any = None
        for row in rows:
            if row.image is None or row.problem is not None:
                yield replace(row, image=None)
                continue
            output = output or files.enter_context(pack.output())
            output.write(row.image)
            length = len(row.image)
            yield replace(row, image=None, path=pack.uri, offset=offset, length=length)
            offset += length


class RowStore:
    """All rows of an index in a file of this machine, which is mapped into memory, not read.

    Args:
        scratch: a folder on a local disk, with room for the index: some 100 bytes and the path for
            each image.
    """

    def __init__(self, parts: list[Location], scratch: str) -> None:
        path = f"{scratch}/rows.arrow"
        try:
            with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, ROW_SCHEMA) as writer:
                for part in parts:
                    for table in read_row_groups(part):
                        writer.write_table(table.combine_chunks())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno, f"{os.strerror(error.errno)}; set TMPDIR to a larger disk", path
            ) from error
        reader = pa.ipc.open_file(pa.memory_map(path))
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self.is_repeated = np.zeros(self._starts[-1], bool)

    def find_repeated(self) -> None:
        """Find the rows with the key of an earlier row, which `take` then rejects.

        Keys are compared in one form of Unicode, since two names of one file may differ in that.
        """
        keys = (key for batch in self._batches for key in batch["key"].to_pylist())
        hashes = (hash(unicodedata.normalize("NFC", key)) for key in keys)
        found = np.fromiter(hashes, np.int64, len(self.is_repeated))
        self.is_repeated[:] = True
        self.is_repeated[np.unique(found, return_index=True)[1]] = False

    def take(self, rows: NDArray[np.int64]) -> pa.Table:
        """Some rows, in the order given."""
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        cuts = np.searchsorted(ascending, self._starts)
        pieces = [
            batch.take(pa.array(ascending[a:b] - start))
            for batch, start, a, b in zip(
                self._batches, self._starts[:-1], cuts[:-1], cuts[1:], strict=True
            )
            if a < b
        ]
        back = np.argsort(order, kind="stable")
        table = pa.Table.from_batches(pieces, ROW_SCHEMA).combine_chunks().take(pa.array(back))
        known, at = table["problem"], table.schema.get_field_index("problem")
        repeated = pc.if_else(pa.array(self.is_repeated[rows]), pc.coalesce(known, REPEATED), known)
        return table.set_column(at, ROW_SCHEMA.field(at), repeated.cast(known.type))
