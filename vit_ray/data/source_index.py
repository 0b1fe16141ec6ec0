"""The index of a whole source: made in parallel, kept on disk, read in any order.

Each unit's index is a parquet file in the staging folder, so that a restart does not repeat it. The
driver joins them into one Arrow file on its local disk and maps it into memory.
"""

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.run_tasks import run_tasks
from vit_ray.data.sources import (
    INDEX_SCHEMA,
    IndexEntry,
    SourceUnit,
    class_names_in_file,
    index_unit,
)
from vit_ray.retry import with_retries
from vit_ray.storage import Location, locate

_ENTRIES_AT_A_TIME: Final = 1 << 14


@dataclass(frozen=True)
class SourceIndex:
    """All images of a source.

    Attributes:
        table: memory-mapped, of `INDEX_SCHEMA`.
        classes: class names in label order.
        digest: tells one source from another.
        bytes: of all images whose length is known.
    """

    table: pa.Table
    classes: list[str]
    digest: str
    bytes: int

    @property
    def num_images(self) -> int:
        """Entries, usable or not."""
        return int(self.table.num_rows)

    def entries(self, rows: NDArray[np.int64]) -> pa.Table:
        """The index of some images, in the order given."""
        return self.table.take(pa.array(rows))


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
    missing = [
        {"index": i, "unit": unit}
        for i, unit in enumerate(units)
        if not staging.child(_facts_name(i)).exists()
    ]
    run_tasks(_UnitIndexer(staging.uri), missing, num_cpus)
    facts = [json.loads(staging.child(_facts_name(i)).read()) for i in range(len(units))]
    names = _class_names(facts, classes, may_be_indices=units[0].format != "folder")
    file = scratch / "index.arrow"
    _join(staging, len(units), file)
    table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    if table.num_rows == 0:
        raise ValueError(f"the source {units[0].folder!r} holds no images; check its layout.")
    digest = hashlib.sha256("".join(fact["digest"] for fact in facts).encode()).hexdigest()[:16]
    return SourceIndex(table, names, digest, sum(fact["bytes"] for fact in facts))


def _facts_name(index: int) -> str:
    return f"index-{index:06d}.json"


def _part_name(index: int) -> str:
    return f"index-{index:06d}.parquet"


@dataclass(frozen=True)
class _UnitIndexer:
    staging: str

    def __call__(self, task: dict[str, Any]) -> int:
        staging, unit, index = locate(self.staging), task["unit"], int(task["index"])
        facts = with_retries(lambda: self._index(staging, unit, index), f"indexing {unit.path}")
        staging.child(_facts_name(index)).write(json.dumps(facts).encode())
        return index

    def _index(self, staging: Location, unit: SourceUnit, index: int) -> dict[str, Any]:
        labels: set[str] = set()
        digest, total = hashlib.sha256(), 0
        with _PartWriter(staging.child(_part_name(index))) as writer:
            for entry in index_unit(unit, staging.child(f"pack-{index:06d}.bin")):
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


def _join(staging: Location, count: int, file: Path) -> None:
    """All parts as one Arrow file, a row group at a time."""
    with pa.ipc.new_file(str(file), INDEX_SCHEMA) as output:
        for index in range(count):
            for table in read_row_groups(staging.child(_part_name(index))):
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
