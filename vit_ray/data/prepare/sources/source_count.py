"""How many images and classes a source holds, before it is converted; nothing is written."""

import contextlib

from vit_ray.data.prepare.sources.entries import DamagedUnitError
from vit_ray.data.prepare.sources.formats import (
    Format,
    class_names_in_file,
    index_unit,
    list_units,
)
from vit_ray.data.prepare.sources.hub import facts_in_place
from vit_ray.data.prepare.sources.patterns import is_pattern
from vit_ray.storage import locate


def is_source(source: str) -> bool:
    """Whether anything exists there; for a pattern, assumed."""
    return is_pattern(source) or locate(source).exists()


def count_source(source: str, format: Format = "auto", split: str | None = None) -> tuple[int, int]:
    """Images and classes, counted by listing files and reading indices; images are not opened.

    Images that cannot be decoded count too, and a damaged archive up to the damage.

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
        groups = [facts_in_place(unit, with_labels=False).groups for unit in units]
        return sum(rows for of_unit in groups for rows, _ in of_unit), len(names)
    count, labels = 0, set[str]()
    for unit in units:
        with contextlib.suppress(DamagedUnitError):
            for entry in index_unit(unit, locate(unit.path)):
                if entry.problem is None:
                    count += 1
                    labels.update(map(str, entry.labels))
    return count, len(labels)
