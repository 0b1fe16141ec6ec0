"""What a conversion would make: counted and sampled within seconds, without Ray; writes nothing."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.jpeg_index.restart_markers import restart_writer
from vit_ray.data.prepare.conversion_plan import shards_for
from vit_ray.data.prepare.convert.shard_images import checked
from vit_ray.data.prepare.sources.entries import (
    DamagedUnitError,
    IndexEntry,
    SourceChangedError,
    SourceUnit,
)
from vit_ray.data.prepare.sources.formats import class_names_in_file, index_unit, list_units
from vit_ray.data.prepare.sources.hub import facts_in_place, rows_of
from vit_ray.data.prepare.sources.source_index import units_of
from vit_ray.data.prepare.sources.splits import ALL_SPLITS, split_of
from vit_ray.storage import locate

COUNTED_S: Final = 20.0
SAMPLED_S: Final = 5.0
SAMPLED: Final = 128
"""Images that are read and checked, at most."""


@dataclass(frozen=True)
class Estimate:
    """What a source holds, and what a conversion makes of it.

    Attributes:
        splits: of the whole source, and not only of the one that is converted; None = no split.
        num_parts, num_counted: folders, archives or files, and how many of them were counted; the
            images and bytes of the others are taken to be like these.
        source_bytes: 0 where lists do not say the sizes of files.
        written_bytes, seconds: for all images, by those sampled; one core.
        num_sampled, num_rejected: images that were read, and those of them that are not usable.
        reason: why the first of these is not; empty where there is none.
    """

    num_images: int
    num_classes: int
    splits: list[str | None]
    num_parts: int
    num_counted: int
    source_bytes: int
    written_bytes: int
    num_shards: int
    seconds: float
    num_sampled: int
    num_rejected: int
    reason: str


def estimate_conversion(config: ConvertConfig, seed: int = 0) -> Estimate:
    """Count what a source lists for up to 20 s, and read and check a few of its images.

    Raises:
        ValueError: the source is missing or empty, or has several splits and none is chosen.
    """
    units = units_of(config)
    every = units  # where no split is chosen there is one
    if config.split is not None:
        every = list_units(config.source, config.format, ALL_SPLITS)
    order = random.Random(seed)  # noqa: S311  # a sample
    counted, images, num_bytes = 0, 0, 0
    labels, sample = set(config.classes or ()), _Sample(order)
    end_s = time.monotonic() + COUNTED_S
    for unit in order.sample(units, len(units)):
        labels.update(() if config.classes else class_names_in_file(unit) or ())
        if unit.format == "huggingface":
            found = facts_in_place(unit)
            images += sum(rows for rows, _ in found.groups)
            num_bytes += sum(size for _, size in found.groups)
            labels |= set() if labels else found.labels
        else:
            for entry in _entries(unit):
                images += 1
                num_bytes += max(entry.length, 0) + entry.extra_bytes
                labels.update(() if config.classes else entry.labels)
                sample.offer(entry)
                if time.monotonic() > end_s:
                    break
        counted += 1
        if time.monotonic() > end_s:
            break
    if not images:
        raise ValueError(
            f"convert.source holds no images: {units[0].path!r} is the first of {len(units)} parts "
            "that were looked at; check its format"
        )
    images, num_bytes = (round(n * len(units) / counted) for n in (images, num_bytes))
    is_read_whole = units[0].format == "huggingface"
    read = (image for _, _, image in rows_of(units[0])) if is_read_whole else sample.images()
    tried, reasons, mean_bytes, mean_s = _tried(read, config)
    written = 0 if config.in_place else round(images * mean_bytes)
    return Estimate(
        num_images=images,
        num_classes=len(labels),
        splits=sorted({split_of(unit.name) for unit in every}, key=str),
        num_parts=len(units),
        num_counted=counted,
        source_bytes=num_bytes,
        written_bytes=written,
        num_shards=len(units) if config.in_place else shards_for(written, images, config),
        seconds=images * mean_s,
        num_sampled=tried,
        num_rejected=len(reasons),
        reason=next(iter(reasons), ""),
    )


def num_cores() -> int:
    """Of this machine, that this process may use."""
    return len(os.sched_getaffinity(0))


def _entries(unit: SourceUnit) -> Iterator[IndexEntry]:
    """What the index of a unit lists, up to its damage if there is any."""
    try:
        yield from index_unit(unit, locate(unit.path))
    except DamagedUnitError:
        return


class _Sample:
    """Some of the entries that it is offered, each as likely as the others."""

    def __init__(self, order: random.Random) -> None:
        self._order, self._kept, self._num_offered = order, list[IndexEntry](), 0

    def offer(self, entry: IndexEntry) -> None:
        self._num_offered += 1
        if len(self._kept) < SAMPLED:
            self._kept.append(entry)
        elif (place := self._order.randrange(self._num_offered)) < SAMPLED:
            self._kept[place] = entry

    def images(self) -> Iterator[bytes | ValueError]:
        for entry in self._kept:
            try:
                yield entry.read()
            except SourceChangedError:
                raise
            except ValueError as error:
                yield error


def _tried(
    images: Iterator[bytes | ValueError], config: ConvertConfig
) -> tuple[int, list[str], float, float]:
    """Images that were read and checked, why some are rejected, and bytes and seconds of one."""
    libjpeg, reasons = restart_writer(), list[str]()
    tried = num_bytes = 0
    begin_s = time.monotonic()
    for image in images:
        tried += 1
        try:
            num_bytes += len(checked(image, "", (), config, libjpeg).image)
        except ValueError as error:
            reasons.append(str(error))
        if tried == SAMPLED or time.monotonic() - begin_s > SAMPLED_S:
            break
    return tried, reasons, num_bytes / tried, (time.monotonic() - begin_s) / tried
