"""What a data set was converted from, kept with it, and what has changed in the source since."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.format.labels import keys as all_keys
from vit_ray.data.format.manifest import Manifest
from vit_ray.data.format.schema import REJECTED_FILE, SOURCE_FILE
from vit_ray.data.prepare.convert.staged_files import (
    parquet_output,
    read_facts,
    read_row_groups,
    write_facts,
)
from vit_ray.data.prepare.sources.entries import INDEX_SCHEMA, SourceUnit, with_problem
from vit_ray.data.prepare.sources.source_index import (
    BY_CONTENT,
    REPEATED,
    SourceIndex,
    UnitFacts,
    content_of,
    content_text,
    digest_of,
    entries_table,
    fields_of,
    find_repeated_keys,
    hashes_of,
    index_units,
    table_entries,
    units_of,
    versions_by_id,
    versions_of,
)
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
        write_facts(folder.child(SOURCE_FILE), asdict(self))


def read_record(folder: Location) -> SourceRecord | None:
    """The record of a folder; None where there is none, as of sets of earlier versions."""
    file = folder.child(SOURCE_FILE)
    return SourceRecord(**read_facts(file)) if file.exists() else None


def changed_settings(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Each setting that differs, as a user gives it; empty for none."""
    # A key that is newer than a data set had its default.
    then = {n: field.default for n, field in ConvertConfig.model_fields.items() if n in now} | then
    names = [name for name in {**now, **then} if then.get(name) != now.get(name)]
    keys = {name: "seed" if name == "seed" else f"convert.{name}" for name in names}
    return ", ".join(f"{keys[n]}={now.get(n)!r} (it was {then.get(n)!r})" for n in names)


def changes_since(
    record: SourceRecord, units: list[SourceUnit], num_cpus: float
) -> dict[str, dict[str, str]]:
    """What a source has of units that are `new`, `changed` or `gone`: path by id, by kind."""
    then, now = record.units, versions_of(units, num_cpus)
    paths = {unit.id: unit.path for unit in units}
    kinds = {
        "new": {i: paths[i] for i in now if i not in then},
        "changed": {i: paths[i] for i in now if i in then and now[i] != then[i][1]},
        "gone": {i: path for i, (path, _) in then.items() if i not in now},
    }
    return {kind: found for kind, found in kinds.items() if found}


def text_of_changes(changes: dict[str, dict[str, str]]) -> str:
    """Some paths of each kind, as they are shown."""
    return ", ".join(f"{_listed(found.values())} {kind}" for kind, found in changes.items())


def _listed(paths: Iterable[str]) -> str:
    shown = sorted(set(paths))
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"{', '.join(shown[:_SHOWN])}{more}"


def index_of_growth(
    record: SourceRecord,
    manifest: Manifest,
    config: ConvertConfig,
    staging: Location,
    scratch: Path,
) -> SourceIndex | None:
    """The images of a source that a data set does not have; None where there are none.

    Raises:
        ValueError: something else than new images has changed, or a new one is of no known class.
    """
    every_unit = units_of(config)
    changes = changes_since(record, every_unit, config.cpus_per_task)
    changed, other = changes.get("changed", {}), changes.get("gone", {})
    units = [unit for unit in every_unit if unit.id in changes.get("new", {}) | changed]
    other |= {u.id: u.path for u in units if u.id in changed and u.format not in BY_CONTENT}
    facts = index_units(units, staging, config)
    known = _known_keys(manifest, scratch)
    grown = UnitFacts()
    with parquet_output(staging.child(_GROWTH), INDEX_SCHEMA) as writer:
        for unit in units:
            old, expected = 0, record.units.get(unit.id, ("", content_text(0)))[1]
            for table in read_row_groups(staging.child(f"{unit.staged}.parquet")):
                keys = hashes_of(table["key"].to_pylist())
                is_old = known[np.searchsorted(known, keys).clip(max=len(known) - 1)] == keys
                new = []
                for entry, is_known in zip(table_entries(table), is_old, strict=True):
                    if not is_known:
                        new.append(entry)
                    elif content_text(old) != expected:
                        old += content_of(entry)
                    else:  # behind all that there was
                        new.append(with_problem(entry, REPEATED))
                writer.write_table(entries_table(new))
                for entry in new:
                    grown.add(unit, entry)
            if content_text(old) != expected:
                other[unit.id] = unit.path
    if other:
        raise ValueError(
            f"convert.extend: images that the data set {manifest.path!r} has are others in the "
            f"source, or are gone: {_listed(other.values())}; bring these back as they were, or "
            "convert to another folder"
        )
    are_numbers = record.are_indices
    allowed = set(map(str, range(manifest.num_classes)) if are_numbers else manifest.classes)
    if unknown_labels := sorted(grown.labels - allowed):
        raise ValueError(
            f"convert.extend: labels {unknown_labels[:5]} are none of the {manifest.num_classes} "
            f"classes of {manifest.path!r}, whose labels must stay; convert to another folder"
        )
    if not grown.rows:
        return None
    then = {name: unit for name, unit in record.units.items() if name not in changed}
    parts = [staging.child(_GROWTH)]
    return SourceIndex(
        parts,
        [grown.rows],
        manifest.classes,
        record.are_indices,
        digest_of(facts),
        grown.bytes,
        grown.unknown_lengths,
        find_repeated_keys(parts, grown.rows, scratch),
        then | versions_by_id(units, facts),
        fields_of(facts),
    )


def _known_keys(manifest: Manifest, scratch: Path) -> NDArray[np.int64]:
    """Hashes of the keys of a data set, and of those that it rejected, sorted, on disk."""
    file = scratch / "known"
    rejected = read_row_groups(locate(manifest.root).child(REJECTED_FILE), columns=["key"])
    with file.open("wb") as output:
        for some in chain(all_keys(manifest), (table["key"].to_pylist() for table in rejected)):
            output.write(hashes_of(some).tobytes())
    known = np.memmap(file, np.int64, "r+")
    known.sort()
    return known
