"""A data set over others' parquet files, which are read in place and never written.

Each of their files gets a shard of ours without images, row group by row group: labels, keys, sizes
and checksums. The manifest says which file has the images, its size and its version (time, or ETag
on S3). Images that would be rejected are left out as in a subset. Order, subsets and `verify` are
those of any data set.
"""

import hashlib

import numpy as np

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.prepare.progress import Shown
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.sources.entries import SourceUnit
from vit_ray.data.prepare.sources.hub import InPlace, check_in_place_bytes, facts_in_place
from vit_ray.data.prepare.sources.label_map import class_names, declared_classes
from vit_ray.data.prepare.sources.source_index import (
    SourceIndex,
    fields_of,
    units_of,
    versions_of,
)
from vit_ray.storage import Location, with_retries


def check_in_place(config: ConvertConfig, folder: Location) -> None:
    """Refuse files that cannot be read in place, before anything is written.

    Raises:
        ValueError: they are not parquet files of the Hugging Face layout, or the destination is
            inside their folder.
    """
    units = units_of(config)
    if units[0].format != "huggingface":
        raise ValueError(
            f"convert.in_place=true: {config.source!r} is of the format {units[0].format!r}; only "
            "parquet files in the layout of the Hugging Face hub can be read in place"
        )
    if (folder.uri.rstrip("/") + "/").startswith(units[0].folder.rstrip("/") + "/"):
        raise ValueError(
            f"convert.destination={folder.uri!r} is in the folder of the files, "
            f"{units[0].folder!r}, which convert.in_place does not change; choose another folder"
        )


def index_in_place(config: ConvertConfig) -> SourceIndex:
    """Facts about some files from their footers and labels; a shard is made for each.

    Raises:
        ValueError: a row group cannot be read in place, or the meaning of the labels is not clear.
    """
    units = units_of(config)
    shown = Shown(f"reading labels of {config.source}")
    facts = dict(run_tasks(_facts, units, shown=shown))
    found: list[InPlace] = [facts[unit.id] for unit in units]
    declared = [(u.path, f.declared) for u, f in zip(units, found, strict=True) if f.declared]
    classes, are_indices = class_names(
        {label for one in found for label in one.labels},
        {kind for one in found for kind in one.kinds},
        list(config.classes or ()) or declared_classes(declared),
        config.labels_are,
    )
    rows = [sum(count for count, _ in one.groups) for one in found]
    names = [f"{unit.name} {count}" for unit, count in zip(units, rows, strict=True)]
    versions = versions_of(units)
    return SourceIndex(
        [],
        rows,
        classes,
        are_indices,
        hashlib.sha256("\n".join(names).encode()).hexdigest()[:16],
        sum(size for one in found for _, size in one.groups),
        0,
        np.empty(0, np.int64),
        {unit.id: (unit.path, versions[unit.id]) for unit in units},
        fields_of(found),
    )


def _facts(unit: SourceUnit) -> tuple[str, InPlace]:
    found = with_retries(lambda: facts_in_place(unit), f"reading {unit.path}")
    for group, (rows, size) in enumerate(found.groups):
        if not rows:
            raise ValueError(
                f"{unit.path!r}: row group {group} has no rows, and cannot be read in place; set "
                "convert.in_place=false"
            )
        check_in_place_bytes(unit, group, size)
    return unit.id, found
