"""The index of a whole source: made in parallel, kept on disk, read from its begin to its end.

Each unit's index is a parquet file in the staging folder, so that a restart does not repeat it.
Nobody ever reads it at random places: `shard_lists.py` draws it into another order.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vit_ray.data.prepare.label_map import (
    LabelsAre,
    check_class_count,
    class_names,
    declared_classes,
)
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.sources.entries import (
    INDEX_SCHEMA,
    DamagedUnitError,
    IndexEntry,
    SourceUnit,
    file_version,
    rejected,
    storable,
)
from vit_ray.data.prepare.sources.formats import class_names_in_file, files_beside, index_unit
from vit_ray.data.prepare.staged_files import (
    parquet_output,
    read_many_facts,
    read_row,
    read_row_groups,
    write_facts,
)
from vit_ray.retry import with_retries
from vit_ray.storage import Location, locate

ENTRIES_AT_A_TIME: Final = 1 << 14
"""Rows of a row group of an index file, at most."""
CHARACTERS_AT_A_TIME: Final = 16 << 20
"""After which one ends: captions, or lists of labels, may be long."""
BY_CONTENT: Final = ("folder", "loose", "csv", "jsonl")
"""Formats whose images are files of their own, so that the index says all that there is."""
_HASHES_AT_A_TIME: Final = 1 << 24
_REPEATED: Final = (
    "its key stands in an earlier row of the source; give all labels of an image in one row"
)


@dataclass(frozen=True)
class SourceIndex:
    """All images of a source.

    Attributes:
        parts: parquet files of `INDEX_SCHEMA`, one per unit.
        rows: entries of each part, usable or not.
        classes: class names in label order.
        are_indices: whether labels are indices into `classes`, and not names of them.
        digest: tells one source from another.
        bytes: of all images whose length is known, and of the fields that are passed through.
        unknown_lengths: entries of unknown length.
        repeated: rows whose key stands in an earlier row, sorted.
        units: path and version of each unit, by its name.
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

    @property
    def num_images(self) -> int:
        """Entries, usable or not."""
        return sum(self.rows)

    def tables(self) -> Iterator[tuple[int, pa.Table]]:
        """Number of the first row, and some rows, from the begin to the end."""
        first = 0
        for part in self.parts:
            for table in read_row_groups(part):
                yield first, self._marked(table, first)
                first += table.num_rows

    def entries(self, rows: NDArray[np.int64]) -> Iterator[IndexEntry]:
        """A few entries, in the order of the source; reads the row groups that they lie in."""
        ends = np.cumsum(self.rows)
        for row in np.sort(rows).tolist():
            part = int(np.searchsorted(ends, row, side="right"))
            table = read_row(self.parts[part], row - int(ends[part]) + self.rows[part])
            yield from table_entries(self._marked(table, row))

    def _marked(self, table: pa.Table, first: int) -> pa.Table:
        """With the reason why a repeated row is not usable."""
        begin, end = np.searchsorted(self.repeated, [first, first + table.num_rows])
        if begin == end:
            return table
        is_repeated = np.zeros(table.num_rows, bool)
        is_repeated[self.repeated[begin:end] - first] = True
        known = table["problem"]
        problem = pc.if_else(pa.array(is_repeated), pc.coalesce(known, _REPEATED), known)
        return table.set_column(
            table.schema.get_field_index("problem"), "problem", problem.cast(known.type)
        )


def build_index(
    units: list[SourceUnit],
    staging: Location,
    scratch: Path,
    *,
    classes: list[str] | None = None,
    labels_are: LabelsAre = "auto",
    columns: Sequence[str] = (),
    label_field: str | None = None,
    keep_damaged: bool = False,
    num_cpus: float = 1.0,
) -> SourceIndex:
    """Index every unit that has not been indexed.

    Args:
        columns: fields that are passed through.
        label_field: as in `SourceUnit`.
        keep_damaged: takes what stands before the damage of an archive.

    Raises:
        ValueError: if the source has no images, an archive is damaged, a label is no given class,
            or no image has one of the columns.
    """
    if columns and units[0].format in ("folder", "loose"):
        raise ValueError(
            f"convert.columns={list(columns)}: class folders have nothing beside their images; "
            f"leave it out, or give a list (CSV, JSONL) of the images."
        )
    if label_field is not None and units[0].format != "tfrecord":
        raise ValueError(
            f"convert.label_field={label_field!r} is of TFRecord files, and convert.source is of "
            f"the format {units[0].format}; leave it out"
        )
    units = [replace(unit, columns=tuple(columns), label_field=label_field) for unit in units]
    facts = index_units(units, staging, num_cpus)
    if not keep_damaged:
        refuse_damage(units, facts, staging)
    parts = [staging.child(IndexedUnit(unit).part_name) for unit in units]
    rows = [fact.rows for fact in facts]
    if not sum(rows):
        raise ValueError(
            f"convert.source holds no images: {units[0].path!r} is the first of {len(units)} parts "
            f"that were looked at; check its format."
        )
    _check_found(columns, facts)
    declared = [(fact.path, fact.declared) for fact in facts if fact.declared]
    labels = {label for fact in facts for label in fact.labels}
    kinds = {kind for fact in facts for kind in fact.kinds}
    names, are_indices = class_names(
        labels,
        kinds,
        classes or declared_classes(declared),
        labels_are,
        of_folders=units[0].format in ("folder", "loose"),
    )
    digest = hashlib.sha256("".join(fact.digest for fact in facts).encode()).hexdigest()[:16]
    may_repeat = units[0].format in ("csv", "jsonl", "webdataset")
    return SourceIndex(
        parts,
        rows,
        names,
        are_indices,
        digest,
        sum(fact.bytes for fact in facts),
        sum(fact.unknown_lengths for fact in facts),
        find_repeated_keys(parts, sum(rows), scratch) if may_repeat else np.empty(0, np.int64),
        {
            IndexedUnit(unit).name: (unit.path, fact.version)
            for unit, fact in zip(units, facts, strict=True)
        },
    )


def index_units(units: list[SourceUnit], staging: Location, num_cpus: float) -> list["UnitFacts"]:
    """The facts of each unit; what is indexed in the staging folder, and has not changed, stays."""
    done = {info.base_name for info in staging.list_files()}
    known = [unit for unit in units if IndexedUnit(unit).facts_name in done]
    facts = read_many_facts(staging.child(IndexedUnit(unit).facts_name) for unit in known)
    then = {
        IndexedUnit(unit).name: fact["version"] for unit, fact in zip(known, facts, strict=True)
    }
    now = versions_of(known, num_cpus) if known else {}
    missing = [
        unit
        for unit in units
        if then.get(IndexedUnit(unit).name) != now.get(IndexedUnit(unit).name, "")
    ]
    run_tasks(_UnitIndexer(staging.uri), missing, num_cpus)
    found = read_many_facts(staging.child(IndexedUnit(unit).facts_name) for unit in units)
    return [UnitFacts(**one) for one in found]


def versions_of(units: list[SourceUnit], num_cpus: float) -> dict[str, str]:
    """What each unit is now, by its name.

    Args:
        units: with their columns and label field, as they are indexed.
    """
    return dict(run_tasks(_named_version, units, num_cpus))


def _named_version(unit: SourceUnit) -> tuple[str, str]:
    what = f"looking at {unit.path}"
    return IndexedUnit(unit).name, with_retries(lambda: _version_of(unit), what)


def _version_of(unit: SourceUnit) -> str:
    """That of an archive, and of the file beside it that names its classes.

    Of a folder or a list of files it is what it says, so that one that was only touched has not
    changed.
    """
    if unit.format in BY_CONTENT:
        tally = _Tally(unit, "")
        for entry in index_unit(unit, locate(unit.path)):
            tally.add(entry)
        return tally.content
    files = [locate(unit.path), *filter(Location.exists, files_beside(unit))]
    return " ".join(map(file_version, files))


def _check_found(columns: Sequence[str], facts: list["UnitFacts"]) -> None:
    found = {name for fact in facts for name in fact.columns}
    if missing := [name for name in columns if name not in found]:
        raise ValueError(
            f"convert.columns={list(columns)}: no image of the source has a field {missing[0]!r}; "
            f"check its name."
        )


def refuse_damage(units: list[SourceUnit], facts: list["UnitFacts"], staging: Location) -> None:
    """Refuse archives that are damaged; one that is mended with equal size and time counts, too.

    Raises:
        ValueError: some are.
    """
    damages = [fact.damage for fact in facts if fact.damage]
    for unit, fact in zip(units, facts, strict=True):
        if fact.damage:
            staging.child(IndexedUnit(unit).facts_name).delete()
    if damages:
        shown = "; ".join(damages[:5]) + ("; and others" if len(damages) > 5 else "")
        raise ValueError(
            f"convert: {len(damages)} files of the source are damaged: {shown}. Replace them, or "
            "set convert.keep_damaged_archives=true to take what stands before the damage"
        )


@dataclass(frozen=True)
class IndexedUnit:
    """A unit, and the names of what the staging folder has of it."""

    unit: SourceUnit

    @property
    def name(self) -> str:
        """By its path, so that a restart finds what it needs though units have come or gone."""
        unit = self.unit
        name = f"{unit.path}#{unit.start}" if unit.start else unit.path
        return f"index-{hashlib.sha256(name.encode()).hexdigest()[:16]}"

    @property
    def facts_name(self) -> str:
        """Of its facts."""
        return f"{self.name}.json"

    @property
    def part_name(self) -> str:
        """Of its index."""
        return f"{self.name}.parquet"


@dataclass
class UnitFacts:
    """What is kept of a unit beside its index.

    Attributes:
        version: what it was when it was indexed, as `versions_of` gives it.
        kinds: of its labels, as `IndexEntry.label_kind`.
        declared: its class names, where it says them.
        columns: those that are passed through and that an image has.
        damage: where and why its index ends before the unit.
    """

    path: str
    version: str
    labels: list[str]
    kinds: list[str]
    declared: list[str] | None
    digest: str
    rows: int
    bytes: int
    unknown_lengths: int
    columns: list[str]
    damage: str | None


@dataclass(frozen=True)
class _UnitIndexer:
    staging: str

    def __call__(self, unit: SourceUnit) -> str:
        staging = locate(self.staging)
        facts = with_retries(lambda: self._index(staging, unit), f"indexing {unit.path}")
        write_facts(staging.child(IndexedUnit(unit).facts_name), asdict(facts))
        return unit.path

    def _index(self, staging: Location, unit: SourceUnit) -> UnitFacts:
        version = "" if unit.format in BY_CONTENT else _version_of(unit)
        tally = _Tally(unit, version)
        entries = map(
            tally.add, _until_damage(unit, staging.child(f"{IndexedUnit(unit).name}.bin"))
        )
        with parquet_output(staging.child(IndexedUnit(unit).part_name), INDEX_SCHEMA) as writer:
            for piece in in_pieces(entries):
                writer.write_table(entries_table(piece))
        declared = None if tally.damage else class_names_in_file(unit)
        return UnitFacts(
            unit.path,
            version or tally.content,
            sorted(tally.labels),
            sorted(tally.kinds),
            declared,
            tally.digest.hexdigest(),
            tally.rows,
            tally.bytes,
            tally.unknown_lengths,
            sorted(tally.columns),
            tally.damage,
        )


def _until_damage(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry | DamagedUnitError]:
    try:
        yield from index_unit(unit, pack)
    except DamagedUnitError as error:
        yield error


class _Tally:
    """Counts the entries of one unit."""

    def __init__(self, unit: SourceUnit, version: str) -> None:
        self._unit, self._version = unit, version
        self._content = 0
        self.damage: str | None = None
        self.labels: set[str] = set()
        self.kinds: set[str] = set()
        self.columns: set[str] = set()
        self.digest = hashlib.sha256()
        self.rows = self.bytes = self.unknown_lengths = 0

    def add(self, found: IndexEntry | DamagedUnitError) -> IndexEntry:
        """The entry as it is kept."""
        if isinstance(found, DamagedUnitError):
            self.damage = str(found)
            found = rejected(self._unit.path, self._unit.name, self.damage)
        entry = storable(found)
        if entry.path == self._unit.path and self._version:
            entry = replace(entry, version=self._version.partition(" ")[0])
        self._content += content_of(entry)
        self.rows += 1
        self.digest.update(f"{entry.key}|{entry.length}|{entry.labels}\n".encode())
        if entry.problem is None:
            self.labels.update(entry.labels)
            self.kinds.add(entry.label_kind)
            values = zip(self._unit.columns, entry.extra, strict=True)
            self.columns.update(name for name, value in values if value is not None)
            self.bytes += max(entry.length, 0) + entry.extra_bytes
            self.unknown_lengths += entry.length < 0
            check_class_count(len(self.labels), self._unit.path)
        return entry

    @property
    def content(self) -> str:
        """Digest of all entries, in whatever order."""
        return content_text(self._content)


def content_text(total: int) -> str:
    """Of the sum of the digests of some entries."""
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
    """The entries in lists that a process can hold, each of one at least."""
    piece: list[IndexEntry] = []
    characters = 0
    for entry in entries:
        piece.append(entry)
        characters += entry.characters
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
    """Rows whose key stands in an earlier row; the hashes of all keys are sorted on disk."""
    hashes = np.memmap(scratch / "hashes", np.int64, "w+", shape=(rows,))
    for first, keys in _keys(parts):
        hashes[first : first + len(keys)] = np.fromiter(map(hash, keys), np.int64, len(keys))
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


def _keys(parts: list[Location]) -> Iterator[tuple[int, list[str]]]:
    """Number of the first row, and the keys of some rows."""
    first = 0
    for part in parts:
        for table in read_row_groups(part, columns=["key"]):
            yield first, table["key"].to_pylist()
            first += table.num_rows
