"""The result of a conversion, counted and sampled within seconds, without Ray; writes nothing."""

import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.checks import checked
from vit_ray.data.convert.files import is_pattern
from vit_ray.data.convert.hub import facts_of_file
from vit_ray.data.convert.labels import SourceFacts
from vit_ray.data.convert.rows import DamagedUnitError, Row, SourceChangedError, Unit
from vit_ray.data.convert.shards import shards_for
from vit_ray.data.convert.sources import (
    Format,
    class_names_in_file,
    list_units,
    rows_of,
    units_of,
)
from vit_ray.data.file_names import is_image_name
from vit_ray.data.jpeg_index.rewriting import restart_writer
from vit_ray.storage import locate

COUNTED_S: Final = 20.0
SAMPLED_S: Final = 5.0
# Most images that are read and checked.
SAMPLED: Final = 128


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
        empty_classes: class folders, of those that were counted, without a file named as an image.
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


def empty_text(source: str, classes: Sequence[str]) -> str:
    """The line about classes without images."""
    shown = ", ".join(classes[:10]) + (" and others" if len(classes) > 10 else "")
    what = (
        "1 class has no images" if len(classes) == 1 else f"{len(classes)} classes have no images"
    )
    return f"warning: {source}: {what}: {shown}; add images, or remove them there"


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
        if (names := class_names_in_file(units[0])) is None:
            raise ValueError(
                f"convert.source={source!r} does not declare its classes, which are only counted "
                "in a conversion; set plan.num_images and plan.num_classes, or convert it first"
            )
        return sum(facts_of_file(unit, with_labels=False)[0].rows for unit in units), len(names)
    facts = SourceFacts()
    for row in (row for unit in units for row in _rows(unit) if row.problem is None):
        facts.add(row)
    return facts.rows, len(facts.labels)


def estimate_conversion(config: ConvertConfig, seed: int = 0) -> Estimate:
    """Count what a source lists for up to 20 s, and read and check a few of its images.

    Raises:
        ValueError: the source is missing or empty, has several splits and none is chosen, or none
            of the images that were read is usable.
    """
    order = random.Random(seed)  # noqa: S311  # a sample
    units = units_of(config)
    order.shuffle(units)
    facts, parts, rows, empty = _counted(units, order)
    if not facts.rows:
        raise ValueError(
            f"convert.source holds no images: {units[0].path!r} is the first of {len(units)} "
            "parts that were checked; check its format"
        )
    images, num_bytes = (round(n * len(units) / parts) for n in (facts.rows, facts.bytes))
    classes = set(config.classes or ()) or {*chain(*facts.declared)} or facts.labels
    if not config.classes:  # folders that were not counted
        left = (unit for unit in units[int(parts) :] if unit.format == "folder")
        classes = classes | {unit.path.rpartition("/")[2] for unit in left}
    libjpeg, sides, reasons, mean_bytes = restart_writer(), list[int](), list[str](), 0.0
    begin_s = time.monotonic()
    for row in rows:
        try:
            made = checked(row.read(), "", (), config, libjpeg)
            mean_bytes += (len(made.image) - mean_bytes) / (len(sides) + len(reasons) + 1)
            sides.append(min(made.width, made.height))
        except SourceChangedError:
            raise
        except ValueError as error:
            reasons.append(str(error))
        if time.monotonic() - begin_s > SAMPLED_S:
            break
    tried, elapsed_s = len(sides) + len(reasons), time.monotonic() - begin_s
    if not sides:
        raise ValueError(
            f"convert.source={config.source!r}: none of {tried} sampled images can be used; the "
            f"first: {reasons[0]}"
        )
    written = 0 if config.in_place else round(images * mean_bytes)
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
        empty_classes=tuple(sorted(empty)),
    )


def _counted(
    units: list[Unit], order: random.Random
) -> tuple[SourceFacts, float, Iterator[Row], list[str]]:
    """Counts units one after another, until the time is over.

    A file with images is left in the middle; lists and folders are counted completely.

    Returns:
        The facts of this many units and a fraction of one, some rows, each equally likely, and the
        class folders without a file that is named as an image.
    """
    facts, parts, sample, empty = SourceFacts(), 0.0, list[Row](), list[str]()
    end_s = time.monotonic() + COUNTED_S
    if units[0].format == "huggingface":
        for unit in units:
            facts += facts_of_file(unit)[0]
            parts += 1
            if time.monotonic() > end_s:
                break
        return facts, parts, islice((r for unit in units for r in rows_of(unit)), SAMPLED), []
    for unit in units:
        facts.declared.update({tuple(class_names_in_file(unit) or ())} - {()})
        num_named = 0
        for row in _rows(unit):
            facts.add(row, unit.columns)
            num_named += is_image_name(row.path)
            if len(sample) < SAMPLED:
                sample.append(row)
            elif (place := order.randrange(facts.rows)) < SAMPLED:
                sample[place] = row
            if row.offset >= 0 and row.problem is None and time.monotonic() > end_s:
                size = max(locate(unit.path).info().size, facts.bytes, 1)
                return facts, parts + (row.offset + row.length) / size, iter(sample), empty
        parts += 1
        if unit.format == "folder" and not num_named:
            empty.append(unit.path.rpartition("/")[2])
        if time.monotonic() > end_s:
            break
    return facts, parts, iter(sample), empty


def _rows(unit: Unit) -> Iterator[Row]:
    """The rows of a unit, up to its damage if there is any."""
    with contextlib.suppress(DamagedUnitError):
        yield from rows_of(unit)
