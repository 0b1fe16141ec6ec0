"""What a data set was converted from, kept beside it, and what has changed in the source since."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.format.schema import REJECTED_FILE, SOURCE_FILE
from vit_ray.data.prepare.source_index import (
    BY_CONTENT,
    IndexedUnit,
    SourceIndex,
    content_of,
    content_text,
    entries_table,
    find_repeated_keys,
    index_units,
    refuse_damage,
    table_entries,
    versions_of,
)
from vit_ray.data.prepare.sources.entries import INDEX_SCHEMA, SourceUnit
from vit_ray.data.prepare.staged_files import (
    parquet_output,
    read_facts,
    read_row_groups,
    write_facts,
)
from vit_ray.retry import with_retries
from vit_ray.storage import Location, locate

_GROWTH: Final = "index-0000000000000000.parquet"
_SHOWN: Final = 5


@dataclass(frozen=True)
class SourceRecord:
    """What a conversion read.

    Attributes:
        fingerprint: of the manifest that was made of it; empty while it is being made.
        settings: of the conversion.
        are_indices: whether labels are indices into the classes, and not names of them.
        units: path and version of each unit, by its name.
    """

    fingerprint: str
    settings: dict[str, Any]
    are_indices: bool
    units: dict[str, tuple[str, str]]

    def write(self, folder: Location) -> None:
        """Keep it in a folder."""
        write_facts(folder.child(SOURCE_FILE), asdict(self))


def read_record(folder: Location) -> SourceRecord | None:
    """The record of a folder; None where there is none, as of sets of earlier versions."""
    file = folder.child(SOURCE_FILE)
    return SourceRecord(**read_facts(file)) if file.exists() else None


def changed_settings(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Each setting that differs, as a user gives it; empty for none."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    keys = {name: "seed" if name == "seed" else f"convert.{name}" for name in names}
    return ", ".join(f"{keys[n]}={now.get(n)!r} (it was {then.get(n)!r})" for n in names)


@dataclass(frozen=True)
class SourceChanges:
    """Units that are new, that have changed, and that are gone: path by name."""

    new: dict[str, str]
    changed: dict[str, str]
    gone: dict[str, str]

    def __bool__(self) -> bool:
        return bool(self.new or self.changed or self.gone)

    def __str__(self) -> str:
        kinds = {"new": self.new, "changed": self.changed, "gone": self.gone}
        return ", ".join(f"{_listed(one.values())} {kind}" for kind, one in kinds.items() if one)


def _listed(paths: Any) -> str:
    shown = sorted(set(paths))
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"{', '.join(shown[:_SHOWN])}{more}"


def changes_since(record: SourceRecord, units: list[SourceUnit], num_cpus: float) -> SourceChanges:
    """Compare a source with what it was."""
    then, now = record.units, versions_of(units, num_cpus)
    paths = {indexed.name: indexed.unit.path for indexed in map(IndexedUnit, units)}
    return SourceChanges(
        {name: paths[name] for name in now if name not in then},
        {name: paths[name] for name in now if name in then and now[name] != then[name][1]},
        {name: path for name, (path, _) in then.items() if name not in now},
    )


def index_of_growth(
    record: SourceRecord,
    manifest: Manifest,
    units: list[SourceUnit],
    staging: Location,
    scratch: Path,
    *,
    keep_damaged: bool,
    num_cpus: float,
) -> SourceIndex | None:
    """The images of a source that a data set does not have; None where there are none.

    Raises:
        ValueError: something else than new images has changed, or a new one is of no known class.
    """
    changes = changes_since(record, units, num_cpus)
    names = {**changes.new, **changes.changed}
    of_units = [indexed for indexed in map(IndexedUnit, units) if indexed.name in names]
    other = changes.gone | {
        indexed.name: indexed.unit.path
        for indexed in of_units
        if indexed.name in changes.changed and indexed.unit.format not in BY_CONTENT
    }
    facts = index_units([indexed.unit for indexed in of_units], staging, num_cpus)
    if not keep_damaged:
        refuse_damage([indexed.unit for indexed in of_units], facts, staging)
    known = _hashes_of_set(manifest)
    labels: set[str] = set()
    rows = num_bytes = unknown = 0
    with parquet_output(staging.child(_GROWTH), INDEX_SCHEMA) as writer:
        for indexed in of_units:
            old = 0
            for table in read_row_groups(staging.child(indexed.part_name)):
                entries = list(table_entries(table))
                is_old = np.isin(_hashes(table["key"].to_pylist()), known)
                old += sum(content_of(e) for e, o in zip(entries, is_old, strict=True) if o)
                new = [e for e, o in zip(entries, is_old, strict=True) if not o]
                writer.write_table(entries_table(new))
                usable = [entry for entry in new if entry.problem is None]
                labels.update(label for entry in usable for label in entry.labels)
                rows += len(new)
                num_bytes += sum(max(e.length, 0) + e.extra_bytes for e in usable)
                unknown += sum(e.length < 0 for e in usable)
            if content_text(old) != record.units.get(indexed.name, ("", content_text(0)))[1]:
                other[indexed.name] = indexed.unit.path
    if other:
        raise ValueError(
            f"convert.extend: images that the data set {manifest.path!r} has are others in the "
            f"source, or are gone: {_listed(other.values())}; bring these back as they were, or "
            "convert to another folder"
        )
    allowed = (
        {str(i) for i in range(manifest.num_classes)} if record.are_indices else {*manifest.classes}
    )
    if unknown_labels := sorted(labels - allowed):
        raise ValueError(
            f"convert.extend: labels {unknown_labels[:5]} are none of the {manifest.num_classes} "
            f"classes of {manifest.path!r}, whose labels must stay; convert to another folder"
        )
    if not rows:
        return None
    then = {name: unit for name, unit in record.units.items() if name not in changes.changed}
    now = {i.name: (i.unit.path, f.version) for i, f in zip(of_units, facts, strict=True)}
    parts = [staging.child(_GROWTH)]
    return SourceIndex(
        parts,
        [rows],
        manifest.classes,
        record.are_indices,
        hashlib.sha256("".join(fact.digest for fact in facts).encode()).hexdigest()[:16],
        num_bytes,
        unknown,
        find_repeated_keys(parts, rows, scratch),
        then | now,
    )


def _hashes_of_set(manifest: Manifest) -> NDArray[np.int64]:
    """Of the keys of all images that a conversion has seen, in the set or rejected."""
    root = locate(manifest.root)
    files = [root.child(file.path) for file in manifest.files]
    found = [_hashes(_keys_of(file)) for file in [*files, root.child(REJECTED_FILE)]]
    return np.concatenate(found)


def _keys_of(file: Location) -> list[str]:
    def read() -> list[str]:
        with file.filesystem.open_input_file(file.path) as source:
            keys: list[str] = pq.read_table(source, columns=["key"])["key"].to_pylist()
            return keys

    return with_retries(read, f"reading {file.path}")


def _hashes(keys: list[str]) -> NDArray[np.int64]:
    return np.fromiter(map(hash, keys), np.int64, len(keys))
