"""How many images and classes a source holds, before it is converted; nothing is written."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.parquet as pq

from vit_ray.data.prepare.sources import (
    Format,
    SourceUnit,
    class_names_in_file,
    index_unit,
    list_units,
)
from vit_ray.storage import locate


@dataclass(frozen=True)
class SourceCount:
    """Images that the source lists, readable or not, and their classes."""

    num_images: int
    num_classes: int


def count_source(source: str, format: Format = "auto") -> SourceCount:
    """Count by listing files and reading indices; images are not opened.

    Raises:
        ValueError: the source is missing or empty, or does not tell its classes.
    """
    units = list_units(source, format)
    if units[0].format == "huggingface":
        return _count_parquet(source, units)
    count, labels = 0, set[str]()
    for unit in units:
        for entry in index_unit(unit, locate(unit.path)):
            if entry.problem is None:
                count += 1
                labels.update(entry.labels)
    return SourceCount(count, len(labels))


def _count_parquet(source: str, units: list[SourceUnit]) -> SourceCount:
    names = class_names_in_file(units[0])
    if names is None:
        raise ValueError(
            f"convert.source={source!r} does not declare its classes, which are counted as it is "
            "converted; tell plan.num_images and plan.num_classes, or convert it first"
        )
    return SourceCount(sum(_num_rows(unit) for unit in units), len(names))


def _num_rows(unit: SourceUnit) -> int:
    location = locate(unit.path)
    with location.filesystem.open_input_file(location.path) as file:
        return int(pq.ParquetFile(file).metadata.num_rows)
