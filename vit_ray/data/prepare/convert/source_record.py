"""What a data set was converted from, kept with it, and what has changed in the source since."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from vit_ray.data.dataset import SOURCE_FILE
from vit_ray.data.prepare.convert.staged_files import read_facts, write_facts
from vit_ray.data.prepare.sources.entries import SourceUnit
from vit_ray.data.prepare.sources.source_index import versions_of
from vit_ray.storage import Location

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
    """The record of a folder; None where there is none, as in that of a subset."""
    file = folder.child(SOURCE_FILE)
    return SourceRecord(**read_facts(file)) if file.exists() else None


def changed_settings(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Each setting that differs, as a user gives it; empty for none."""
    names = [name for name in {**now, **then} if then.get(name) != now.get(name)]
    keys = {name: "seed" if name == "seed" else f"convert.{name}" for name in names}
    return ", ".join(f"{keys[n]}={now.get(n)!r} (it was {then.get(n)!r})" for n in names)


def changes_since(record: SourceRecord, units: list[SourceUnit]) -> dict[str, dict[str, str]]:
    """What a source has of units that are `new`, `changed` or `gone`: path by id, by kind."""
    then, now = record.units, versions_of(units)
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
