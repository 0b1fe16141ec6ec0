"""The index of a whole source: made in parallel, kept on disk, read in any order.

Each unit's index is a parquet file in the staging folder, so that a restart does not repeat it. The
driver joins them into one Arrow file on its local disk and maps it into memory.
"""

import functools
import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.sources import (
    INDEX_SCHEMA,
    IndexEntry,
    SourceUnit,
    class_names_in_file,
    index_unit,
)
from vit_ray.retry import with_retries
from vit_ray.storage import Location, locate

_ENTRIES_AT_A_TIME: Final = 1 << 14
_READERS: Final = 16
_HASHES_AT_A_TIME: Final = 1 << 24
_REPEATED: Final = (
    "its key stands in an earlier row of the source; give all labels of an image in one row"
)


@dataclass(frozen=True)
class SourceIndex:
    """All images of a source.

    Attributes:
        table: memory-mapped, of `INDEX_SCHEMA`.
        classes: class names in label order.
        digest: tells one source from another.
        bytes: of all images whose length is known.
        repeated: rows whose key stands in an earlier row.
    """

    table: pa.Table
    classes: list[str]
    digest: str
    bytes: int
    repeated: NDArray[np.int64]

    @property
    def num_images(self) -> int:
        """Entries, usable or not."""
        return int(self.table.num_rows)

    def entries(self, rows: NDArray[np.int64]) -> pa.Table:
        """The index of some images, in the order given."""
        table = self.table.take(pa.array(rows))
        is_repeated = np.isin(rows, self.repeated)
        if not is_repeated.any():
            return table
        known = table["problem"]
        problem = pc.if_else(pa.array(is_repeated), pc.coalesce(known, _REPEATED), known)
        return table.set_column(table.schema.get_field_index("problem"), "problem", problem)


def build_index(
    units: list[SourceUnit],
    staging: Location,
    scratch: Path,
    classes: list[str] | None,
    num_cpus: float,
) -> SourceIndex:
    """Index every unit that has not been indexed, and join the parts.

    Raises:
        ValueError: if the source has no images, or a label that is no given class.
    """
    done = {info.base_name for info in staging.list_files()}
    missing = [unit for unit in units if _facts_name(unit) not in done]
    run_tasks(_UnitIndexer(staging.uri), missing, num_cpus)
    contents = read_many(staging.child(_facts_name(unit)) for unit in units)
    facts = [json.loads(content) for content in contents]
    names = _class_names(facts, classes, may_be_indices=units[0].format != "folder")
    file = scratch / "index.arrow"
    _join(staging, units, file)
    table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    if table.num_rows == 0:
        raise ValueError(f"the source {units[0].folder!r} holds no images; check its layout.")
    digest = hashlib.sha256("".join(fact["digest"] for fact in facts).encode()).hexdigest()[:16]
    may_repeat = units[0].format in ("csv", "jsonl", "webdataset")
    repeated = _repeated_keys(table["key"], scratch) if may_repeat else np.empty(0, np.int64)
    return SourceIndex(table, names, digest, sum(fact["bytes"] for fact in facts), repeated)


def read_many(files: Iterable[Location]) -> Iterator[bytes]:
    """The contents of small files, in order, a few read ahead: object stores answer slowly."""
    with ThreadPoolExecutor(_READERS) as pool:
        waiting: deque[Future[bytes]] = deque()
        for file in files:
            waiting.append(pool.submit(file.read))
            if len(waiting) > 2 * _READERS:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def _name(unit: SourceUnit) -> str:
    """By its path, so that a restart finds what it needs though units have come or gone."""
    return f"index-{hashlib.sha256(unit.path.encode()).hexdigest()[:16]}"


def _facts_name(unit: SourceUnit) -> str:
    return f"{_name(unit)}.json"


def _part_name(unit: SourceUnit) -> str:
    return f"{_name(unit)}.parquet"


@dataclass(frozen=True)
class _UnitIndexer:
    staging: str

    def __call__(self, unit: SourceUnit) -> str:
        staging = locate(self.staging)
        facts = with_retries(lambda: self._index(staging, unit), f"indexing {unit.path}")
        staging.child(_facts_name(unit)).write(json.dumps(facts).encode())
        return unit.path

    def _index(self, staging: Location, unit: SourceUnit) -> dict[str, Any]:
        labels: set[str] = set()
        digest, total = hashlib.sha256(), 0
        with _PartWriter(staging.child(_part_name(unit))) as writer:
            for entry in index_unit(unit, staging.child(f"{_name(unit)}.bin")):
                writer.add(entry)
                labels.update(entry.labels)
                total += max(entry.length, 0)
                digest.update(f"{entry.key}|{entry.length}|{entry.labels}\n".encode())
        return {
            "labels": sorted(labels),
            "declared": class_names_in_file(unit),
            "digest": digest.hexdigest(),
            "bytes": total,
        }


class _PartWriter:
    def __init__(self, destination: Location) -> None:
        self._output = destination.atomic_output()
        self._pending: list[IndexEntry] = []

    def __enter__(self) -> "_PartWriter":
        target = self._output.__enter__()
        self._writer = pq.ParquetWriter(
            target.path, INDEX_SCHEMA, filesystem=target.filesystem, compression="zstd"
        )
        return self

    def add(self, entry: IndexEntry) -> None:
        self._pending.append(entry)
        if len(self._pending) == _ENTRIES_AT_A_TIME:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(entries_table(self._pending))
        self._pending = []

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        if error_type is None:
            self._flush()
        self._writer.close()
        self._output.__exit__(error_type, error, trace)


def entries_table(entries: list[IndexEntry]) -> pa.Table:
    """Index entries as an Arrow table."""
    rows = [[getattr(entry, f.name) for entry in entries] for f in INDEX_SCHEMA]
    arrays = [pa.array(column, f.type) for column, f in zip(rows, INDEX_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)


def table_entries(table: pa.Table) -> Iterator[IndexEntry]:
    """The rows of an index table."""
    for row in table.to_pylist():
        yield IndexEntry(**{**row, "labels": tuple(row["labels"])})


def _class_names(
    facts: list[dict[str, Any]], classes: list[str] | None, may_be_indices: bool
) -> list[str]:
    """Given names, else names that the source declares, else its labels in sorted order."""
    labels = sorted({label for fact in facts for label in fact["labels"]})
    declared = classes or next((fact["declared"] for fact in facts if fact["declared"]), None)
    are_numbers = may_be_indices and all(label.isdigit() for label in labels)
    if declared is not None:
        allowed = {*declared, *(str(i) for i in range(len(declared)) if are_numbers)}
        unknown = [label for label in labels if label not in allowed]
        if unknown:
            raise ValueError(
                f"convert: labels {unknown[:5]} are not in the classes {declared[:20]}."
            )
        return list(declared)
    if are_numbers and labels:
        return [str(i) for i in range(max(map(int, labels)) + 1)]
    return labels


def _repeated_keys(keys: pa.ChunkedArray, scratch: Path) -> NDArray[np.int64]:
    """Rows whose key stands in an earlier row; the hashes of all keys are sorted on disk."""
    hashes = np.memmap(scratch / "hashes", np.int64, "w+", shape=(len(keys),))
    for row, key in enumerate(_texts(keys)):
        hashes[row] = hash(key)
    hashes.sort()
    twice: set[int] = set()
    for start in range(0, len(hashes), _HASHES_AT_A_TIME):
        part = hashes[start : start + _HASHES_AT_A_TIME + 1]
        twice.update(part[1:][part[1:] == part[:-1]].tolist())
    seen: set[str] = set()
    repeated = []
    for row, key in enumerate(_texts(keys) if twice else ()):
        if hash(key) in twice:
            if key in seen:
                repeated.append(row)
            seen.add(key)
    return np.array(repeated, np.int64)


def _texts(column: pa.ChunkedArray) -> Iterator[str]:
    for chunk in column.chunks:
        yield from chunk.to_pylist()


def _join(staging: Location, units: list[SourceUnit], file: Path) -> None:
    """All parts as one Arrow file, a row group at a time."""
    with pa.ipc.new_file(str(file), INDEX_SCHEMA) as output:
        for unit in units:
            for table in read_row_groups(staging.child(_part_name(unit))):
                output.write_table(table.cast(INDEX_SCHEMA))


def read_row_groups(location: Location, only: int | None = None) -> Iterator[pa.Table]:
    """The row groups of a parquet file, or one of them, each read with retries."""

    def read_one(number: int) -> tuple[pa.Table, int]:
        with location.filesystem.open_input_file(location.path) as source:
            file = pq.ParquetFile(source)
            count = file.metadata.num_row_groups
            table = (
                file.read_row_group(number) if number < count else file.schema_arrow.empty_table()
            )
            return table, count

    number, count = only or 0, 1 if only is None else only + 1
    while number < count:
        what = f"reading {location.path}"
        table, total = with_retries(functools.partial(read_one, number), what)
        count = total if only is None else count
        yield table
        number += 1
