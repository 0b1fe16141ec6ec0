"""The index of a whole source: made in parallel, kept on disk, read in order.

Each unit's index is a parquet file in the staging folder, so that a restart does not repeat it. It
is never read at random; `shard_lists.py` draws it into another order.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.prepare.convert.staged_files import (
    parquet_output,
    read_many_facts,
    read_row_groups,
    read_rows,
    write_facts,
)
from vit_ray.data.prepare.progress import Shown, report_done
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.sources.entries import (
    INDEX_SCHEMA,
    DamagedUnitError,
    IndexEntry,
    SourceUnit,
    storable,
)
from vit_ray.data.prepare.sources.formats import (
    class_names_in_file,
    fields_in_file,
    files_beside,
    index_unit,
    list_units,
)
from vit_ray.data.prepare.sources.hub import InPlace
from vit_ray.data.prepare.sources.label_map import check_class_count, class_names, declared_classes
from vit_ray.storage import Location, locate, with_retries

ENTRIES_AT_A_TIME: Final = 1 << 14
"""Most rows of a row group of an index file."""
CHARACTERS_AT_A_TIME: Final = 16 << 20
"""Characters after which a row group ends: captions, or lists of labels, may be long."""
BY_CONTENT: Final = ("folder", "loose", "csv", "jsonl")
"""Formats with one file per image, so that the index has all the information."""
_FOLDERS: Final = ("folder", "loose")
_HASHES_AT_A_TIME: Final = 1 << 24
REPEATED: Final = (
    "an earlier row of the source has the same key; give all labels of an image in one row"
)


@dataclass(frozen=True)
class SourceIndex:
    """All images of a source.

    Attributes:
        parts: parquet files of `INDEX_SCHEMA`, one per unit.
        rows: entries of each part, usable or not.
        classes: class names in label order.
        are_indices: whether labels are indices into `classes`, not names of them.
        digest: differs between sources.
        bytes: of all images whose length is known, and of the fields that are passed through.
        unknown_lengths: entries of unknown length.
        repeated: rows with the key of an earlier row, sorted.
        units: path and version of each unit, by its id.
        fields: names of those that images, and labels, are read from, if a file has the same for
            all.
    """

    parts: list[Location]
    rows: list[int]
    classes: list[str]
    are_indices: bool
    digest: str
    bytes: int
    unknown_lengths: int
    repeated: NDArray[np.int64]
    units: dict[str, tuple[str, str]] = field(default_factory=dict)
    fields: dict[str, list[str]] = field(default_factory=dict)

    @property
    def num_images(self) -> int:
        """Number of entries, usable or not."""
        return sum(self.rows)

    def tables(self) -> Iterator[tuple[int, pa.Table]]:
        """Number of the first row, and some rows, in order."""
        first = 0
        for part in self.parts:
            for table in read_row_groups(part):
                yield first, self._marked(table, first)
                first += table.num_rows

    def entries(self, rows: NDArray[np.int64]) -> Iterator[IndexEntry]:
        """A few entries, in the order of the source; reads the row groups that they lie in."""
        rows, first = np.sort(rows), 0
        for part, count in zip(self.parts, self.rows, strict=True):
            begin, end = np.searchsorted(rows, [first, first + count])
            if begin < end:
                for row, table in zip(
                    rows[begin:end].tolist(), read_rows(part, rows[begin:end] - first), strict=True
                ):
                    yield from table_entries(self._marked(table, row))
            first += count

    def _marked(self, table: pa.Table, first: int) -> pa.Table:
        """With the reason why a repeated row is not usable."""
        begin, end = np.searchsorted(self.repeated, [first, first + table.num_rows])
        if begin == end:
            return table
        is_repeated = np.zeros(table.num_rows, bool)
        is_repeated[self.repeated[begin:end] - first] = True
        known = table["problem"]
        problem = pc.if_else(pa.array(is_repeated), pc.coalesce(known, REPEATED), known)
        return table.set_column(
            table.schema.get_field_index("problem"), "problem", problem.cast(known.type)
        )


def units_of(config: ConvertConfig) -> list[SourceUnit]:
    """The units of the source of a conversion, in its present state."""
    fields = {
        "columns": config.columns,
        "label_field": config.label_field,
        "image_field": config.image_field,
    }
    found = list_units(config.source, config.format, config.split)
    return [SourceUnit(**vars(unit) | fields) for unit in found]


def build_index(config: ConvertConfig, staging: Location, scratch: Path) -> SourceIndex:
    """Index every unit that has not been indexed.

    Raises:
        ValueError: the source has no images, an archive is damaged, a label is not a given class,
            or no image has one of the columns.
    """
    units = units_of(config)
    format = units[0].format
    for key in ("columns", "label_field", "image_field"):
        if (value := getattr(config, key)) and format in _FOLDERS:
            raise ValueError(
                f"convert.{key}={value!r}: class folders have no fields; leave it out, or give a "
                "list (CSV, JSONL) of the images"
            )
    facts = index_units(units, staging, config)
    parts = [staging.child(f"{unit.staged}.parquet") for unit in units]
    rows = [fact.rows for fact in facts]
    if not sum(rows):
        raise ValueError(
            f"convert.source holds no images: {units[0].path!r} is the first of {len(units)} parts "
            "that were checked; check its format"
        )
    found = {name for fact in facts for name in fact.columns}
    if missing := [name for name in config.columns if name not in found]:
        raise ValueError(
            f"convert.columns={list(config.columns)}: no image of the source has a field "
            f"{missing[0]!r}; check its name"
        )
    declared = [(unit.path, f.declared) for unit, f in zip(units, facts, strict=True) if f.declared]
    names, are_indices = class_names(
        {label for fact in facts for label in fact.labels},
        {kind for fact in facts for kind in fact.kinds},
        list(config.classes or ()) or declared_classes(declared),
        config.labels_are,
        of_folders=format in _FOLDERS,
    )
    may_repeat = format in ("csv", "jsonl", "webdataset")
    return SourceIndex(
        parts,
        rows,
        names,
        are_indices,
        digest_of(facts),
        sum(fact.bytes for fact in facts),
        sum(fact.unknown_lengths for fact in facts),
        find_repeated_keys(parts, sum(rows), scratch) if may_repeat else np.empty(0, np.int64),
        versions_by_id(units, facts),
        fields_of(facts),
    )


@dataclass
class UnitFacts:
    """What is kept of a unit in addition to its index.

    Attributes:
        version: when it was indexed, from `versions_of`.
        kinds: of its labels, as `IndexEntry.label_kind`.
        declared: its class names, if it declares them.
        columns: those that are passed through and that some image has.
        damage: position and reason if its index ends before the unit.
        fields: those that images and labels are read from, if they are the same for the whole unit.
    """

    version: str = ""
    labels: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    declared: list[str] | None = None
    digest: str = ""
    rows: int = 0
    bytes: int = 0
    unknown_lengths: int = 0
    columns: set[str] = field(default_factory=set)
    damage: str | None = None
    fields: dict[str, str] = field(default_factory=dict)

    def add(self, unit: SourceUnit, entry: IndexEntry) -> None:
        self.rows += 1
        if entry.problem is None:
            self.labels.update(entry.labels)
            self.kinds.add(entry.label_kind)
            values = zip(unit.columns, entry.extra, strict=True)
            self.columns.update(name for name, value in values if value is not None)
            self.bytes += max(entry.length, 0) + entry.extra_bytes
            self.unknown_lengths += entry.length < 0
            check_class_count(len(self.labels), unit.path)


def fields_of(facts: Iterable[UnitFacts | InPlace]) -> dict[str, list[str]]:
    """The fields that some units are read from."""
    found: dict[str, set[str]] = {}
    for fact in facts:
        for what, name in fact.fields.items():
            found.setdefault(what, set()).add(name)
    return {what: sorted(names) for what, names in found.items()}


def digest_of(facts: Iterable[UnitFacts]) -> str:
    """A digest that differs between the images of different units."""
    return hashlib.sha256("".join(fact.digest for fact in facts).encode()).hexdigest()[:16]


def versions_by_id(units: list[SourceUnit], facts: list[UnitFacts]) -> dict[str, tuple[str, str]]:
    """Path and version of each unit, by its id."""
    return {u.id: (u.path, fact.version) for u, fact in zip(units, facts, strict=True)}


def index_units(
    units: list[SourceUnit], staging: Location, config: ConvertConfig
) -> list[UnitFacts]:
    """The facts of each unit; those in the staging folder are reused for unchanged units.

    Raises:
        ValueError: a unit is damaged. Its facts are removed, so that a repaired file of equal size
            and time is read again.
    """
    files = {unit.id: staging.child(f"{unit.staged}.json") for unit in units}
    done = {info.base_name for info in staging.list_files()}
    stems = {unit.staged for unit in units}
    for name in done:
        if name.startswith("index-") and name.partition(".")[0] not in stems:
            staging.child(name).delete()  # of other settings, or of a source that has changed
    known = [unit for unit in units if f"{unit.staged}.json" in done]
    then = read_many_facts(files[unit.id] for unit in known)
    now = versions_of(known)
    same = {u.id for u, facts in zip(known, then, strict=True) if facts["version"] == now[u.id]}
    missing = [unit for unit in units if unit.id not in same]
    shown = Shown(f"indexing {config.source}")
    run_tasks(_index, missing, staging.uri, shown=shown)
    found = [UnitFacts(**facts) for facts in read_many_facts(files[unit.id] for unit in units)]
    damages = [fact.damage for fact in found if fact.damage]
    for unit, fact in zip(units, found, strict=True):
        if fact.damage:
            files[unit.id].delete()
    if damages:
        listed = "; ".join(damages[:5]) + ("; and others" if len(damages) > 5 else "")
        raise ValueError(
            f"convert: {len(damages)} files of the source are damaged: {listed}; replace them"
        )
    return found


def versions_of(units: list[SourceUnit]) -> dict[str, str]:
    """The present version of each unit, by its id.

    Args:
        units: with the columns and label field with which they are indexed.
    """
    shown = Shown("comparing the source with what was converted")
    return dict(run_tasks(_id_and_version, units, shown=shown))


def _id_and_version(unit: SourceUnit) -> tuple[str, str]:
    return unit.id, with_retries(lambda: _version_of(unit), f"looking at {unit.path}")


def _version_of(unit: SourceUnit) -> str:
    """Version of an archive, and of the file next to it with its class names.

    For a folder or a list of files it is the content, so that touching a file does not count as a
    change.
    """
    location = locate(unit.path)
    if unit.format in BY_CONTENT:
        return content_text(sum(map(content_of, map(storable, index_unit(unit, location)))))
    infos = [one.info() for one in (location, *files_beside(unit))]
    return " ".join(info.version for info in infos if info.kind != "nothing")


def _index(unit: SourceUnit, staging_uri: str) -> None:
    """Write the index of a unit, and its facts when the index is complete."""
    staging = locate(staging_uri)
    facts = with_retries(lambda: _write_index(unit, staging), f"indexing {unit.path}")
    lists = {name: sorted(v) if isinstance(v, set) else v for name, v in vars(facts).items()}
    write_facts(staging.child(f"{unit.staged}.json"), lists)


def _write_index(unit: SourceUnit, staging: Location) -> UnitFacts:
    facts = UnitFacts("" if unit.format in BY_CONTENT else _version_of(unit))
    version = facts.version.partition(" ")[0]
    digest, content, num_images = hashlib.sha256(), 0, 0

    def entries() -> Iterator[IndexEntry]:
        try:
            for found in index_unit(unit, staging.child(f"{unit.staged}.bin")):
                entry = storable(found)
                is_of_unit = version and entry.path == unit.path
                yield replace(entry, version=version) if is_of_unit else entry
        except DamagedUnitError as error:
            facts.damage = str(error)

    with parquet_output(staging.child(f"{unit.staged}.parquet"), INDEX_SCHEMA) as writer:
        for piece in in_pieces(entries()):
            writer.write_table(entries_table(piece))
            num_images += len(piece)
            report_done(num_images)
            for entry in piece:
                facts.add(unit, entry)
                content += content_of(entry)
                digest.update(f"{entry.key}|{entry.length}|{entry.labels}\n".encode())
    facts.version = facts.version or content_text(content)
    if facts.damage is None:
        facts.declared, facts.fields = class_names_in_file(unit), fields_in_file(unit)
    facts.digest = digest.hexdigest()
    return facts


def content_text(total: int) -> str:
    """Text of the sum of some entries' digests."""
    return f"{total % (1 << 128):032x}"


def content_of(entry: IndexEntry) -> int:
    """Digest of one entry; sums of them do not depend on their order."""
    facts = (
        entry.path, entry.key, entry.length, entry.labels, entry.extra, entry.problem,
        entry.version,
    )  # fmt: skip
    digest = hashlib.blake2b(repr(facts).encode("utf-8", "surrogatepass"), digest_size=16)
    return int.from_bytes(digest.digest())


def in_pieces(entries: Iterable[IndexEntry]) -> Iterator[list[IndexEntry]]:
    """The entries in lists that fit into a process, each with at least one."""
    piece: list[IndexEntry] = []
    characters = 0
    for entry in entries:
        piece.append(entry)
        texts = entry.path, entry.key, *entry.labels, entry.problem, *entry.extra
        characters += sum(len(text) for text in texts if text is not None)
        if len(piece) == ENTRIES_AT_A_TIME or characters >= CHARACTERS_AT_A_TIME:
            yield piece
            piece, characters = [], 0
    if piece:
        yield piece


def entries_table(entries: list[IndexEntry]) -> pa.Table:
    """Index entries as an Arrow table."""
    rows = [[getattr(entry, f.name) for entry in entries] for f in INDEX_SCHEMA]
    arrays = [pa.array(column, f.type) for column, f in zip(rows, INDEX_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)


def table_entries(table: pa.Table) -> Iterator[IndexEntry]:
    """The rows of an index table."""
    for row in table.to_pylist():
        lists = {name: tuple(row[name]) for name in ("labels", "extra")}
        yield IndexEntry(**{**row, **lists})


def find_repeated_keys(parts: list[Location], rows: int, scratch: Path) -> NDArray[np.int64]:
    """Rows with the key of an earlier row; the hashes of all keys are sorted on disk."""
    hashes = np.memmap(scratch / "hashes", np.int64, "w+", shape=(rows,))
    for first, keys in _keys(parts):
        hashes[first : first + len(keys)] = hashes_of(keys)
    hashes.sort()
    twice: set[int] = set()
    for start in range(0, len(hashes), _HASHES_AT_A_TIME):
        part = hashes[start : start + _HASHES_AT_A_TIME + 1]
        twice.update(part[1:][part[1:] == part[:-1]].tolist())
    seen: set[str] = set()
    repeated = []
    for first, keys in _keys(parts) if twice else ():
        for row, key in enumerate(keys, first):
            if hash(key) in twice:
                if key in seen:
                    repeated.append(row)
                seen.add(key)
    return np.array(repeated, np.int64)


def hashes_of(keys: list[str]) -> NDArray[np.int64]:
    """Hashes of texts, the same only within this process."""
    return np.fromiter(map(hash, keys), np.int64, len(keys))


def _keys(parts: list[Location]) -> Iterator[tuple[int, list[str]]]:
    """Number of the first row, and the keys of some rows."""
    first = 0
    for part in parts:
        for table in read_row_groups(part, columns=["key"]):
            yield first, table["key"].to_pylist()
            first += table.num_rows
