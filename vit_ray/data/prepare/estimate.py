"""The result of a conversion, counted and sampled within seconds, without Ray; writes nothing."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.jpeg_index.rewriting import restart_writer
from vit_ray.data.prepare.conversion_plan import shards_for
from vit_ray.data.prepare.convert.shard_images import checked
from vit_ray.data.prepare.sources.entries import (
    DamagedUnitError,
    IndexEntry,
    SourceChangedError,
    SourceUnit,
)
from vit_ray.data.prepare.sources.folders import class_of, is_image_name
from vit_ray.data.prepare.sources.formats import class_names_in_file, index_unit, list_units
from vit_ray.data.prepare.sources.hub import facts_in_place, rows_of
from vit_ray.data.prepare.sources.source_index import units_of
from vit_ray.data.prepare.sources.splits import ALL_SPLITS, split_of
from vit_ray.storage import Location, locate

COUNTED_S: Final = 20.0
SAMPLED_S: Final = 5.0
SAMPLED: Final = 128
"""Most images that are read and checked."""


@dataclass(frozen=True)
class Estimate:
    """What a source holds, and what a conversion makes of it.

    Attributes:
        num_images: extrapolated if not all parts were counted.
        num_classes: a lower bound if not all parts were counted.
        splits: of the whole source, not only of the converted one; None = no split.
        num_parts, num_counted: folders, archives or files, and how many of them were counted
            completely; the images and bytes of the others are assumed to be similar.
        source_bytes: 0 if lists do not give the sizes of files.
        written_bytes, seconds: for all images, extrapolated from the sample; one core.
        num_sampled, num_rejected: images that were read, and unusable ones among them.
        shorter_side: median of the usable ones, in pixels.
        reason: why the first of the others is unusable; empty if there is none.
        empty_classes: class folders, of those that were counted, without a file named as an image.
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
    shorter_side: int
    reason: str
    empty_classes: tuple[str, ...] = ()

    @property
    def counts(self) -> str:
        """Images and classes as text; files if some of them are not images."""
        about, least = ("", "") if self.is_exact else ("about ", "at least ")
        what = "files" if self.num_rejected else "images"
        return f"{about}{self.num_images:,} {what} of {least}{self.num_classes:,} classes"

    @property
    def is_exact(self) -> bool:
        """Whether all images and classes were counted."""
        return self.num_counted == self.num_parts


def estimate_conversion(config: ConvertConfig, seed: int = 0) -> Estimate:
    """Count what a source lists for up to 20 s, and read and check a few of its images.

    Raises:
        ValueError: the source is missing or empty, has several splits and none is chosen, or none
            of the images that were read is usable.
    """
    units = units_of(config)
    every = units  # if no split is chosen there is one
    if config.split is not None:
        every = list_units(config.source, config.format, ALL_SPLITS)
    order = random.Random(seed)  # noqa: S311  # a sample
    with tempfile.TemporaryDirectory() as scratch:
        found = _counted(order.sample(units, len(units)), config, _Sample(order), scratch)
        if not found.images:
            raise ValueError(
                f"convert.source holds no images: {units[0].path!r} is the first of {len(units)} "
                "parts that were checked; check its format"
            )
        images, num_bytes = (
            round(n * len(units) / found.parts) for n in (found.images, found.bytes)
        )
        read = found.sample.images()
        if units[0].format == "huggingface":
            read = (image for unit in units for _, _, image in rows_of(unit))
        tried, sides, reasons, mean_bytes, mean_s = _tried(read, config)
    if not sides:
        raise ValueError(
            f"convert.source={config.source!r}: none of {tried} sampled images can be used; the "
            f"first: {reasons[0]}"
        )
    written = 0 if config.in_place else round(images * mean_bytes)
    return Estimate(
        num_images=images,
        num_classes=len(found.labels),
        splits=sorted({split_of(unit.name) for unit in every}, key=str),
        num_parts=len(units),
        num_counted=int(found.parts),
        source_bytes=num_bytes,
        written_bytes=written,
        num_shards=len(units) if config.in_place else shards_for(written, images, config),
        seconds=images * mean_s,
        num_sampled=tried,
        num_rejected=len(reasons),
        shorter_side=round(statistics.median(sides)),
        reason=next(iter(reasons), ""),
        empty_classes=tuple(sorted(label for label, count in found.named.items() if not count)),
    )


@dataclass
class _Counted:
    """Images, their bytes and classes, in this many parts and a fraction of one."""

    sample: _Sample
    labels: set[str]
    images: int = 0
    bytes: int = 0
    parts: float = 0
    named: Counter[str] = field(default_factory=Counter)
    """Files named as images in each class folder."""


def _counted(
    units: list[SourceUnit], config: ConvertConfig, sample: _Sample, scratch: str
) -> _Counted:
    """Counts units one after another, until the time is over.

    A file with images is left in the middle; lists and folders are counted completely.
    """
    found = _Counted(sample, set(config.classes or ()))
    end_s = time.monotonic() + COUNTED_S
    for number, unit in enumerate(units):
        declared = config.classes or class_names_in_file(unit)
        found.labels.update(declared or ())
        if unit.format == "huggingface":
            facts = facts_in_place(unit)
            found.images += sum(rows for rows, _ in facts.groups)
            found.bytes += sum(size for _, size in facts.groups)
            found.labels.update(() if declared else facts.labels)
        else:
            folder = class_of(unit)
            found.named.update({folder: 0} if folder else {})
            for entry in _entries(unit, locate(f"{scratch}/{number}")):
                found.images += 1
                found.bytes += max(entry.length, 0) + entry.extra_bytes
                found.labels.update(() if config.classes else entry.labels)
                if folder and is_image_name(entry.path):
                    found.named[folder] += 1
                sample.offer(entry)
                is_inside = entry.path == unit.path and entry.problem is None
                if is_inside and time.monotonic() > end_s:
                    # In a compressed file the offsets are those of its content.
                    size = max(locate(unit.path).info().size or 0, found.bytes, 1)
                    found.parts += max(entry.offset + entry.length, 1) / size
                    return found
        found.parts += 1
        if time.monotonic() > end_s:
            break
    if units[0].format == "folder" and not config.classes:
        found.labels.update(filter(None, map(class_of, units[int(found.parts) :])))
    return found


def _entries(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """The index entries of a unit, up to its damage if there is any."""
    try:
        yield from index_unit(unit, pack)
    except DamagedUnitError:
        return


class _Sample:
    """Some of the entries that it is offered, each equally likely."""

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
) -> tuple[int, list[int], list[str], float, float]:
    """Images that were read and checked: how many, the shorter sides of the usable ones, why others
    are rejected, and bytes and seconds of one.
    """
    libjpeg, reasons, sides = restart_writer(), list[str](), list[int]()
    tried = num_bytes = 0
    begin_s = time.monotonic()
    for image in images:
        tried += 1
        try:
            row = checked(image, "", (), config, libjpeg)
            num_bytes += len(row.image)
            sides.append(min(row.width, row.height))
        except ValueError as error:
            reasons.append(str(error))
        if tried == SAMPLED or time.monotonic() - begin_s > SAMPLED_S:
            break
    return tried, sides, reasons, num_bytes / tried, (time.monotonic() - begin_s) / tried
