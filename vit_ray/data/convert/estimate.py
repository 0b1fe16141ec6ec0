"""The result of a conversion, counted and sampled within seconds, without Ray; writes nothing."""

import contextlib
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain, islice
from typing import Final

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.checks import checked, read_ahead
from vit_ray.data.convert.labels import SourceFacts, check_not_empty
from vit_ray.data.convert.rows import (
    DamagedUnitError,
    Row,
    SourceChangedError,
    Unit,
    pieces,
    row_table,
)
from vit_ray.data.convert.sources import declared_classes, rows_of, units_of
from vit_ray.data.dataset import checksum
from vit_ray.data.restart_markers import restart_writer
from vit_ray.storage import locate

COUNTED_S: Final = 20.0
SAMPLED_S: Final = 5.0
# Most images that are read and checked; their mean size is correct within 10 %.
SAMPLED: Final = 128
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Estimate:
    """What a source holds, and what a conversion makes of it.

    Attributes:
        num_images: extrapolated if not all parts were counted.
        num_classes: a lower bound if not all parts were counted.
        num_parts, num_counted: folders, archives or files, and how many of them were counted
            completely; the images and bytes of the others are assumed to be similar.
        source_bytes: 0 if lists do not give the sizes of files.
        written_bytes, seconds: for all images, extrapolated from the sample; one core.
        num_sampled, num_rejected: images that were read, and unusable ones among them.
        shorter_side: median of the usable ones, in pixels.
        reason: why the first of the others is unusable; empty if there is none.
    """

    num_images: int
    num_classes: int
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

    @property
    def counts(self) -> str:
        """Images and classes as text."""
        about, least = ("", "") if self.is_exact else ("about ", "at least ")
        return f"{about}{self.num_images:,} images of {least}{self.num_classes:,} classes"

    @property
    def is_exact(self) -> bool:
        """Whether all images and classes were counted."""
        return self.num_counted == self.num_parts


def shards_for(written_bytes: float, num_images: int, config: ConvertConfig) -> int:
    """How many shards hold this many bytes of images, each of at least one row group."""
    groups = -(-num_images // config.rows_per_row_group)
    return min(groups, max(1, round(written_bytes / (config.shard_mib * _MIB))))


def estimate_conversion(config: ConvertConfig, seed: int = 0) -> Estimate:
    """Count what a source lists for up to 20 s, and read and check a few of its images.

    Raises:
        ValueError: the source is missing or empty, has several splits and none is chosen, or none
            of the images that were read is usable.
    """
    units = units_of(config)
    random.Random(seed).shuffle(units)  # noqa: S311  # a sample
    facts, parts, rows = _counted(units, config, seed)
    check_not_empty(facts, config)
    images, num_bytes = (round(n * len(units) / parts) for n in (facts.rows, facts.bytes))
    left = {unit.path.rpartition("/")[2] for unit in units[int(parts) :] if unit.format == "folder"}
    classes = set(config.classes or ()) or {*chain(*facts.declared)} or facts.labels | left
    begin_s = time.monotonic()
    sizes, sides, reasons = sampled(rows, config, SAMPLED_S)
    tried, elapsed_s = len(sizes) + len(reasons), time.monotonic() - begin_s
    if not sizes:
        raise ValueError(
            f"convert.source={config.source!r}: none of {tried} sampled images can be used; the "
            f"first: {reasons[0]}"
        )
    written = 0 if config.in_place else round(images * sum(sizes) / tried)
    return Estimate(
        num_images=images,
        num_classes=len(classes),
        num_parts=len(units),
        num_counted=int(parts),
        source_bytes=num_bytes,
        written_bytes=written,
        num_shards=len(units) if config.in_place else shards_for(written, images, config),
        seconds=images * elapsed_s / tried,
        num_sampled=tried,
        num_rejected=len(reasons),
        shorter_side=round(statistics.median(sides)),
        reason=next(iter(reasons), ""),
    )


def sampled(
    rows: Iterable[Row], config: ConvertConfig, limit_s: float = float("inf")
) -> tuple[list[int], list[int], list[str]]:
    """Bytes and shorter sides of some images as a set holds them, and why others are rejected."""
    sizes, sides, reasons, begin_s = list[int](), list[int](), list[str](), time.monotonic()
    for row, image in read_ahead(rows):
        try:
            # no limit: the storage limits each file
            made = checked(image.result(), row.key, (), config, restart_writer())
            sizes.append(len(made.image))
            sides.append(min(made.width, made.height))
        except SourceChangedError:
            raise
        except ValueError as error:
            reasons.append(str(error))
        if time.monotonic() - begin_s > limit_s:
            break
    return sizes, sides, reasons


def _counted(
    units: list[Unit], config: ConvertConfig, seed: int
) -> tuple[SourceFacts, float, Iterable[Row]]:
    """Counts units one after another, until the time is over; an archive is left in its middle.

    Returns:
        The facts of this many units and a fraction of one, and some rows, each equally likely; of
        parquet files the first ones, since their rows are read with their images.
    """
    facts = SourceFacts(dict.fromkeys(config.columns, 0))
    sample, num_units, end_s = list[Row](), 0.0, time.monotonic() + COUNTED_S
    for unit in units:
        facts.declared.update({tuple(declared_classes(unit) or ())} - {()})
        for piece in pieces(_rows_before_damage(unit), end_s):
            facts.add(row_table(piece))
            some = [*sample, *piece]
            sample = nsmallest(SAMPLED, some, lambda row: checksum(f"{seed} {row.key}".encode()))
            last = piece[-1]
            if last.offset >= 0 and last.problem is None and time.monotonic() > end_s:
                size = max(locate(unit.path).info().size, facts.bytes, 1)
                return facts, num_units + (last.offset + last.length) / size, sample
        num_units += 1
        if time.monotonic() > end_s:
            break
    of_parquet = islice(chain.from_iterable(map(rows_of, units)), SAMPLED)
    return facts, num_units, of_parquet if units[0].format == "huggingface" else sample


def _rows_before_damage(unit: Unit) -> Iterator[Row]:
    with contextlib.suppress(DamagedUnitError):
        for row in rows_of(unit, with_images=False):
            yield row.storable()
