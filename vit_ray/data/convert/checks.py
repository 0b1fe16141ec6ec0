"""Parts of a conversion that need no Ray: checks of the destination and of images, the estimate.

An unusable destination is refused early. Images are read ahead, checked, turned and shrunk. The
estimate takes seconds, reads a sample of the images, and writes nothing.
"""

import contextlib
import os
import random
import re
import statistics
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import chain, islice
from typing import Final

import cv2

from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.labels import SourceFacts, check_not_empty
from vit_ray.data.convert.rows import (
    DamagedUnitError,
    Row,
    SourceChangedError,
    Unit,
    printable,
    row_table,
)
from vit_ray.data.convert.sources import declared_classes, rows_of, units_of
from vit_ray.data.dataset import (
    DAMAGED_FILE,
    MANIFEST_FILE,
    REJECTED_FILE,
    REPORT_FILE,
    SOURCE_FILE,
    STAGING_FOLDER,
)
from vit_ray.data.images import TURNS, UInt8Array, decode, is_hidden, open_image, orientation_of
from vit_ray.data.jpeg import START, encode_jpeg, has_zeroed_data, num_scans, size_of_jpeg
from vit_ray.data.libjpeg_process import WARNINGS
from vit_ray.data.restart_markers import Libjpeg, restart_writer, with_restart_markers
from vit_ray.data.shard_writer import EncodedImage
from vit_ray.lock import is_lock_file
from vit_ray.storage import Location, locate

STAGED: Final = "(index|list|shard)-.*"
"""Pattern of the names of files in the staging folder, other than locks."""
OUTPUT: Final = "|".join(
    [
        r"part-\d+-of-\d+\.parquet",
        *map(re.escape, (MANIFEST_FILE, REJECTED_FILE, DAMAGED_FILE, REPORT_FILE, SOURCE_FILE)),
    ]
)
"""Pattern of the names of the files that a conversion writes."""
# Threads that read the images of a shard ahead: object stores are slow, but serve many requests.
_READERS: Final = 8
# Maximum size of the images that were read ahead.
_AHEAD_BYTES: Final = 1 << 26
# Assumed size of an image, if the source does not give it.
_ASSUMED_BYTES: Final = 1 << 22
# Maximum number of scans of a JPEG file; a decoder visits all pixels for each. Progressive files
# have about 10, and libjpeg-turbo's own tests of hostile files allow 500.
_MAX_SCANS: Final = 100
_JPEG_QUALITY: Final = 95
# Longest side that libjpeg writes (JPEG_MAX_DIMENSION).
_MAX_JPEG_SIDE: Final = 65_500
# Time limits of an estimate: for counting, and for reading the sample.
COUNTED_S: Final = 20.0
_SAMPLED_S: Final = 5.0
# Images in the sample of an estimate; their mean size is correct within 10 %.
SAMPLED: Final = 128


def convert_of(recipe: Recipe) -> ConvertConfig:
    """The recipe's conversion; raises ValueError if it has none."""
    return require(
        recipe.convert,
        "convert",
        "convert.source and convert.destination, such as "
        "convert='{source: images/, destination: data/}'",
    )


def check_conversion(recipe: Recipe) -> None:
    """Refuse what can be seen without opening images, and without looking into a source folder.

    Raises:
        ValueError: the recipe has no conversion, the source does not exist or is a file of no known
            format, or the destination is in the source or taken (as `check_destination`).
    """
    config = convert_of(recipe)
    if locate(config.source).info().kind != "directory":
        units_of(config)
    check_destination(config)


def check_destination(config: ConvertConfig) -> None:
    """Refuse a folder in the source, or one that is neither empty nor of a conversion."""
    folder = locate(config.destination)
    source = units_of(config)[0].folder if config.in_place else config.source
    if _real(folder).startswith(_real(locate(source))):
        raise ValueError(
            f"convert.destination={config.destination!r} is in convert.source={config.source!r} or "
            f"next to its files; choose a folder outside {source!r}"
        )
    folder.refuse_file_in_its_place("convert.destination")
    names = {info.base_name for info in folder.list_files(recursive=False)}
    staged = {info.base_name for info in folder.child(STAGING_FOLDER).list_files()}
    # Without this file it is unknown which conversion wrote the shards of a folder.
    if SOURCE_FILE in names and (MANIFEST_FILE in names or staged):
        return
    is_ours = all(re.fullmatch(STAGED, name) or is_lock_file(name) for name in staged)
    names |= {*folder.list_folders()} - ({STAGING_FOLDER} if is_ours else set())
    if foreign := sorted(name for name in names if not is_hidden(name)):
        raise ValueError(
            f"convert.destination={folder.uri!r} is not empty and holds no data set with its "
            f"{SOURCE_FILE}: it has {foreign[0]!r}; choose a new folder, or move it away"
        )


def _real(location: Location) -> str:
    # The address without symbolic links, and with a slash at its end.
    path = os.path.realpath(location.path) if location.is_local else location.uri
    return f"{path.rstrip('/')}/"


def delete_files(folder: Location, pattern: str) -> None:
    """Delete the files directly in a folder whose names match a pattern."""
    # In the order of names, so that the plan, `source.json`, goes after the shards: without a plan
    # they could be from someone else.
    for info in folder.list_files(recursive=False):
        if re.fullmatch(pattern, info.base_name):
            folder.child(info.base_name).delete()


def read_ahead(rows: Iterable[Row]) -> Iterator[tuple[Row, Future[bytes]]]:
    """Each row with its image, in order, read ahead by threads; of large images only few."""
    with ThreadPoolExecutor(_READERS) as pool:
        waiting: deque[tuple[int, Row, Future[bytes]]] = deque()
        for row in rows:
            size = _ASSUMED_BYTES if row.length < 0 else row.length
            while waiting and (
                len(waiting) > 2 * _READERS
                or size + sum(ahead for ahead, *_ in waiting) > _AHEAD_BYTES
            ):
                yield waiting.popleft()[1:]
            waiting.append((size, row, pool.submit(row.read)))
        while waiting:  # a loop over the deque would keep all images in memory
            yield waiting.popleft()[1:]


def checked(
    image: bytes,
    key: str,
    labels: tuple[int, ...],
    config: ConvertConfig,
    libjpeg: Libjpeg | None,
) -> EncodedImage:
    """Check an image, turn or shrink it as the recipe says, and add restart markers.

    Args:
        libjpeg: finds damage in JPEG files, and adds restart markers; None does neither.

    Raises:
        ValueError: the image is empty, not an image, truncated, damaged, has too many pixels or
            scans, or cannot be shrunk.
    """
    if not image:
        raise ValueError("the file is empty")
    if (scans := num_scans(image)) > _MAX_SCANS:
        raise ValueError(f"it is a JPEG of {scans:,} scans; the most are {_MAX_SCANS}")
    jpeg_size = size_of_jpeg(image)
    height, width = jpeg_size or (0, 0)
    if jpeg_size is None:
        # Pillow's plugins raise errors of any type; decoding the image will tell what is wrong.
        with contextlib.suppress(Exception), open_image(image) as opened:
            width, height = opened.size
    is_over, orientation = height * width > config.max_pixels, orientation_of(image)
    turn = orientation if config.apply_orientation else 1
    is_large = config.shrink_to is not None and min(height, width) > config.shrink_to
    writer, damage = libjpeg if config.index_jpeg else None, ""
    stored = None
    # To add restart markers, libjpeg reads the whole file, and fails or warns if it is damaged.
    if writer and not (is_over or is_large or turn != 1 or has_zeroed_data(image)):
        stored = with_restart_markers(image, writer)
    if stored is None:
        # Before the check of the size: a header without data may declare any size.
        damage = _damage_of(image, libjpeg, config)
        if is_over:
            raise ValueError(
                f"it has {width} x {height} pixels, more than "
                f"convert.max_pixels={config.max_pixels}"
            )
        # Other files need no decoding: `_damage_of` let libjpeg decode them.
        if jpeg_size is None or is_large or turn != 1 or libjpeg is None or damage:
            pixels = decode(image)
            if is_large or turn != 1:
                pixels = _changed(pixels, turn, config.shrink_to if is_large else None)
                image = encode_jpeg(pixels, _JPEG_QUALITY)
                stored = None if writer is None else with_restart_markers(image, writer)
            height, width = pixels.shape[:2]
    return EncodedImage(
        image if stored is None else bytes(stored.content), labels, key, width, height,
        index=None if stored is None else stored.index, damage=damage, is_turned=orientation != 1,
    )  # fmt: skip


def _changed(pixels: UInt8Array, orientation: int, shorter_side: int | None) -> UInt8Array:
    """Pixels upright, and with this shorter side; raises ValueError if no JPEG can hold them."""
    pixels = TURNS[orientation](pixels)
    factor = 1.0 if shorter_side is None else shorter_side / min(pixels.shape[:2])
    height, width = (round(side * factor) for side in pixels.shape[:2])
    if max(height, width) > _MAX_JPEG_SIDE:
        raise ValueError(
            f"re-encoded with {width} x {height} pixels it is too long for a JPEG, whose sides "
            f"have at most {_MAX_JPEG_SIDE:,}"
        )
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)  # type: ignore[return-value]


def _damage_of(image: bytes, libjpeg: Libjpeg | None, config: ConvertConfig) -> str:
    """libjpeg's warnings when it decodes a JPEG file; empty if there are none.

    Raises:
        ValueError: `convert.damaged` rejects the image.
    """
    if libjpeg is None or not image.startswith(START):
        return ""
    warnings = libjpeg.ask(WARNINGS, image)
    lines = ["libjpeg cannot read it"] if warnings is None else warnings.decode().splitlines()
    lines += ["zeros stand in the place of coded data"] * has_zeroed_data(image)
    damage = "; ".join(lines)
    ends_early = "premature end" in damage.lower()
    if damage and (config.damaged == "reject" or (config.damaged == "auto" and ends_early)):
        raise ValueError(f"it is damaged: {damage}")
    return damage


def image_or_reason(
    row: Row,
    read: Callable[[], bytes],
    config: ConvertConfig,
    label_of: Mapping[str, int] | None = None,
) -> EncodedImage | str:
    """The image of a row as a shard stores it, or why it is rejected.

    Args:
        label_of: class index of each label; None leaves the labels out.

    Raises:
        SourceChangedError: the source has changed since it was indexed.
    """
    try:
        content = read()
        labels = () if label_of is None else tuple(label_of[text] for text in row.labels)
        image = checked(content, row.key, labels, config, restart_writer())
    except SourceChangedError:
        raise
    except ValueError as error:
        return printable(str(error))
    return replace(image, extra=row.extra)


@dataclass(frozen=True)
class Estimate:
    """What a source contains, and what a conversion will write.

    Attributes:
        num_images: extrapolated if not all parts were counted.
        num_classes: a lower bound if not all parts were counted.
        num_parts, num_counted: folders, archives or files, and how many of them were counted
            completely; the others are assumed to be similar.
        source_bytes: 0 if the source is a list, which does not give the sizes of files.
        written_bytes, seconds: for all images, extrapolated from the sample; on one core.
        num_sampled, num_rejected: images that were read, and unusable ones among them.
        shorter_side: median of the usable images, in pixels.
        reason: why the first rejected image is unusable; empty if there is none.
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
        is_exact = self.num_counted == self.num_parts
        about, at_least = ("", "") if is_exact else ("about ", "at least ")
        return f"{about}{self.num_images:,} images of {at_least}{self.num_classes:,} classes"


def shards_for(written_bytes: float, num_images: int, config: ConvertConfig) -> int:
    """Number of shards for this many bytes of images; each has at least one row group."""
    groups = -(-num_images // config.rows_per_row_group)
    return min(groups, max(1, round(written_bytes / (config.shard_mib * 2**20))))


def estimate_conversion(config: ConvertConfig, seed: int = 0) -> Estimate:
    """Count the images of a source for up to 20 s, and read and check a sample of them.

    Raises:
        ValueError: the source is missing or empty, has several splits and none is chosen, or none
            of the sampled images is usable.
    """
    units = units_of(config)
    random.Random(seed).shuffle(units)  # noqa: S311  # a sample
    facts, parts, rows = _counted(units, config, seed)
    check_not_empty(facts, config)
    images, num_bytes = (round(n * len(units) / parts) for n in (facts.rows, facts.bytes))
    others = units[int(parts) :]
    folders = {unit.path.rpartition("/")[2] for unit in others if unit.format == "folder"}
    classes = set(config.classes or ()) or {*chain(*facts.declared)} or facts.labels | folders
    sizes, sides, reasons, begin_s = list[int](), list[int](), list[str](), time.monotonic()
    for image in sampled(rows, config, _SAMPLED_S):
        if isinstance(image, str):
            reasons.append(image)
        else:
            sizes.append(len(image.image))
            sides.append(min(image.width, image.height))
    num_sampled, elapsed_s = len(sizes) + len(reasons), time.monotonic() - begin_s
    if not sizes:
        raise ValueError(
            f"convert.source={config.source!r}: none of {num_sampled} sampled images can be used; "
            f"the first: {reasons[0]}"
        )
    written = 0 if config.in_place else round(images * sum(sizes) / num_sampled)
    return Estimate(
        num_images=images,
        num_classes=len(classes),
        num_parts=len(units),
        num_counted=int(parts),
        source_bytes=num_bytes,
        written_bytes=written,
        num_shards=len(units) if config.in_place else shards_for(written, images, config),
        seconds=images * elapsed_s / num_sampled,
        num_sampled=num_sampled,
        num_rejected=len(reasons),
        shorter_side=round(statistics.median(sides)),
        reason=next(iter(reasons), ""),
    )


def sampled(
    rows: Iterable[Row], config: ConvertConfig, limit_s: float = float("inf")
) -> Iterator[EncodedImage | str]:
    """Images as a shard stores them, or why they are rejected; ends after the limit."""
    end_s = time.monotonic() + limit_s
    for row, image in read_ahead(rows):
        yield image_or_reason(row, image.result, config)  # no limit: the storage limits each file
        if time.monotonic() > end_s:
            return


def _counted(
    units: list[Unit], config: ConvertConfig, seed: int
) -> tuple[SourceFacts, float, Iterable[Row]]:
    """Count units one after another until the time is over, which may end inside an archive.

    Returns:
        The facts of the counted units, their number (with a fraction for an archive), and a random
        sample of rows; for parquet files the first rows, as rows are read with their images.
    """
    facts = SourceFacts(dict.fromkeys(config.columns, 0))
    sample, end_s = list[Row](), time.monotonic() + COUNTED_S
    for number, unit in enumerate(units, 1):
        facts.declared.update({tuple(declared_classes(unit) or ())} - {()})
        rows = _rows_before_damage(unit)
        while piece := list(islice(rows, SAMPLED)):
            facts.add(row_table(piece))
            sample = nsmallest(
                SAMPLED, [*sample, *piece], lambda row: zlib.crc32(f"{seed} {row.key}".encode())
            )
            last = piece[-1]
            if last.offset >= 0 and last.problem is None and time.monotonic() > end_s:
                size = max(locate(unit.path).info().size, facts.bytes, 1)
                return facts, number - 1 + (last.offset + last.length) / size, sample
        if time.monotonic() > end_s:
            break
    if units[0].format == "huggingface":
        return facts, number, islice(chain.from_iterable(map(rows_of, units)), SAMPLED)
    return facts, number, sample


def _rows_before_damage(unit: Unit) -> Iterator[Row]:
    with contextlib.suppress(DamagedUnitError):
        for row in rows_of(unit, with_images=False):
            yield row.storable()
