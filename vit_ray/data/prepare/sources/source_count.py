"""How many images and classes a source holds, before it is converted; nothing is written."""

import contextlib
from dataclasses import dataclass

import pyarrow.parquet as pq

from vit_ray.data.prepare.sources.entries import DamagedUnitError, SourceUnit
from vit_ray.data.prepare.sources.formats import (
    Format,
    class_names_in_file,
    index_unit,
    list_units,
)
from vit_ray.data.prepare.sources.patterns import is_pattern
from vit_ray.storage import locate


@dataclass(frozen=True)
class SourceCount:
    """Images that the source lists, readable or not, and their classes."""

    num_images: int
    num_classes: int


def is_source(source: str) -> bool:
    """Whether anything exists there; for a pattern, assumed."""
    return is_pattern(source) or locate(source).exists()


def count_source(source: str, format: Format = "auto", split: str | None = None) -> SourceCount:
    """Count by listing files and reading indices; images are not opened.

    A damaged archive is counted up to the damage.

    Raises:
        ValueError: the source is missing or empty, or does not declare its classes.
    """
    units = list_units(source, format, split)
    if units[0].format == "huggingface":
        names = class_names_in_file(units[0])
        if names is None:
            raise ValueError(
                f"convert.source={source!r} does not declare its classes, which are only counted "
                "in a conversion; set plan.num_images and plan.num_classes, or convert it first"
            )
        return SourceCount(sum(map(_num_rows, units)), len(names))
    count, labels = 0, set[str]()
    for unit in units:
        with contextlib.suppress(DamagedUnitError):
            for entry in index_unit(unit, locate(unit.path)):
                if entry.problem is None:
                    count += 1
                    labels.update(map(str, entry.labels))
    return SourceCount(count, len(labels))


def _num_rows(unit: SourceUnit) -> int:
    location = locate(unit.path)
    with location.filesystem.open_input_file(location.path) as file:
        return int(pq.ParquetFile(file).metadata.num_rows)
