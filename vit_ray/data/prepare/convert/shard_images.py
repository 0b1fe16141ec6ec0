"""From entries of an index to rows of a shard: read ahead, checked, and shrunk if asked."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.crops import decode, open_image
from vit_ray.data.dataset import checksum
from vit_ray.data.jpeg import START, encode_jpeg, size_of_jpeg
from vit_ray.data.jpeg_index.headers import has_zeroed_data, num_scans
from vit_ray.data.jpeg_index.libjpeg_process import WARNINGS
from vit_ray.data.jpeg_index.rewriting import (
    Libjpeg,
    RewrittenJpeg,
    with_restart_markers,
)
from vit_ray.data.prepare.convert.staged_files import ahead
from vit_ray.data.prepare.sources.entries import IndexEntry, LargerError, SourceChangedError
from vit_ray.data.shard_writer import EncodedImage

_READERS: Final = 8
"""Threads that read a shard's images ahead: object stores are slow to answer, but answer many."""

_MOST_AHEAD: Final = 1 << 28
"""Bytes that are read ahead, where images are no larger: of usual ones it is reached by none."""
_SMALL: Final = 1 << 22
"""Bytes of a file of unknown length that is read at once. On S3 a larger one takes two requests."""
_MOST_SCANS: Final = 100
"""Of a JPEG file, each of which a decoder passes over all pixels for: progressive files have about
10, and libjpeg-turbo's own tests of hostile files allow 500."""

_JPEG_QUALITY: Final = 95
"""Of images that are encoded again."""
_MOST_JPEG_PIXELS: Final = 65_500
"""Of a side, in libjpeg (JPEG_MAX_DIMENSION)."""


_EXIF_ORIENTATION: Final = 0x0112
_TURNS: Final[dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]]] = {
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: lambda pixels: np.swapaxes(pixels, 0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(np.swapaxes(pixels, 0, 1), 2),
    8: np.rot90,
}
"""By EXIF's orientation (CIPA DC-008, 4.6.4): from the pixels that are stored to those shown."""


def read_ahead(entries: list[IndexEntry]) -> Iterator[tuple[IndexEntry, bytes | ValueError]]:
    """Each entry with its bytes, or why it has none, in order, a few reads ahead."""
    begun = ahead(_begin, entries, _READERS)
    images = ahead(_bytes_or_reason, begun, _READERS, _bytes_to_hold, _MOST_AHEAD)
    return zip(entries, images, strict=True)


_Begun = tuple[IndexEntry, bytes | ValueError | None]
"""An entry, and what reading it has given, if it has been read."""


def _begin(entry: IndexEntry) -> _Begun:
    """The entry; a file that a list names is read, or its length is found where that is large."""
    if entry.length >= 0 or entry.problem is not None:
        return entry, None
    try:
        return entry, entry.read(_SMALL)
    except LargerError as error:
        return replace(entry, length=error.size), None
    except ValueError as error:
        return entry, error


def _bytes_to_hold(begun: _Begun) -> int:
    entry, image = begun
    return len(image) if isinstance(image, bytes) else entry.length


def _bytes_or_reason(begun: _Begun) -> bytes | ValueError:
    entry, image = begun
    if image is not None:
        return image
    try:
        return entry.read()
    except SourceChangedError:
        raise
    except ValueError as error:
        return error


def checked(
    image: bytes | ValueError,
    key: str,
    labels: tuple[int, ...],
    config: ConvertConfig,
    libjpeg: Libjpeg | None = None,
) -> EncodedImage:
    """A row of the data set.

    Args:
        libjpeg: looks for damage in JPEG files, and gives them their restart markers.

    Raises:
        ValueError: if the image could not be read, is empty, not an image, cut short, damaged, or
            cannot be shrunk.
    """
    if isinstance(image, ValueError):
        raise image
    if not image:
        raise ValueError("the file is empty")
    original, original_crc32 = image, checksum(image)
    writer = libjpeg if config.index_jpeg else None
    found = None
    of_jpeg = size_of_jpeg(image)
    declared = of_jpeg or _declared_size(image)
    is_over = declared is not None and declared[0] * declared[1] > config.max_pixels
    if (scans := num_scans(image)) > _MOST_SCANS:
        raise ValueError(f"it is a JPEG of {scans:,} scans; the most are {_MOST_SCANS}")
    turned = orientation_of(image) if config.apply_orientation else 1
    is_large = _is_too_large(of_jpeg, config.shrink_to)
    is_zeroed = has_zeroed_data(image)
    keeps_pixels = not is_over and not is_large and turned == 1
    # libjpeg reads all of a file that it rewrites, and warns of damage: that is check enough.
    if keeps_pixels and not is_zeroed:
        found = _rewritten(image, writer)
    damage = ""
    if found is None:
        damage = _damage_of(image, libjpeg)  # first: a header without data may say any size
        if is_zeroed and libjpeg is not None:
            damage = "; ".join(filter(None, (damage, "zeros stand in the place of coded data")))
        ends_early = "premature end" in damage.lower()
        if damage and (config.damaged == "reject" or (config.damaged == "auto" and ends_early)):
            raise ValueError(f"it is damaged: {damage}")
        if is_over and declared is not None:
            raise ValueError(
                f"it has {declared[1]} x {declared[0]} pixels, more than "
                f"convert.max_pixels={config.max_pixels}"
            )
        if of_jpeg is not None and keeps_pixels and libjpeg is not None and not damage:
            size = of_jpeg  # libjpeg has read all coded data, as in a file that it rewrites
        else:
            pixels = decoded = _TURNS[turned](decode(image))
            if config.shrink_to is not None and _is_too_large(pixels.shape, config.shrink_to):
                pixels = _shrunk(pixels, config.shrink_to)
            if turned != 1 or pixels is not decoded:
                _check_sides(pixels.shape)
                image = encode_jpeg(pixels, _JPEG_QUALITY)
                found = _rewritten(image, writer)
            size = pixels.shape[:2]
    index = None
    if found is not None:
        image, size, index = found.image, found.size, found.index
    height, width = size
    crc32 = original_crc32 if image is original else None
    return EncodedImage(
        image, labels, key, width, height,
        original_crc32=original_crc32, index=index, damage=damage, crc32=crc32,
    )  # fmt: skip


def _declared_size(image: bytes) -> tuple[int, int] | None:
    """Height and width by the header of a file that is no plain JPEG; None where it has none."""
    # Pillow's plugins raise anything; decoding the image will say what is wrong.
    with contextlib.suppress(Exception), open_image(image) as opened:
        return opened.height, opened.width
    return None


def orientation_of(image: bytes) -> int:
    """What EXIF says of how the pixels are to be turned: 1 to 8, where 1 is not at all."""
    with contextlib.suppress(Exception), open_image(image) as opened:  # Pillow raises anything
        return found if (found := opened.getexif().get(_EXIF_ORIENTATION, 1)) in _TURNS else 1
    return 1


def _damage_of(image: bytes, libjpeg: Libjpeg | None) -> str:
    """What libjpeg warns of when it decodes a JPEG file; empty for nothing."""
    if libjpeg is None or not image.startswith(START):
        return ""
    warnings = libjpeg.ask(WARNINGS, image)
    return (
        "libjpeg cannot read it" if warnings is None else "; ".join(warnings.decode().splitlines())
    )


def _rewritten(image: bytes, writer: Libjpeg | None) -> RewrittenJpeg | None:
    return None if writer is None else with_restart_markers(image, writer)


def _is_too_large(size: tuple[int, ...] | None, shrink_to: int | None) -> bool:
    return shrink_to is not None and size is not None and min(size[:2]) > shrink_to


def written_bytes(entries: list[IndexEntry], config: ConvertConfig) -> int:
    """Bytes of these images as a shard would hold them, without those that it would reject."""
    total = 0
    for entry, image in read_ahead(entries):
        with contextlib.suppress(ValueError):
            total += len(checked(image, entry.key, (), config).image) + entry.extra_bytes
    return total


def _shrunk(pixels: NDArray[np.uint8], shorter_side: int) -> NDArray[np.uint8]:
    """The image with its shorter side at a length."""
    factor = shorter_side / min(pixels.shape[:2])
    height, width = (max(shorter_side, round(side * factor)) for side in pixels.shape[:2])
    _check_sides((height, width))
    size = (width, height)
    return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)  # type: ignore[return-value]


def _check_sides(shape: tuple[int, ...]) -> None:
    if max(shape[:2]) > _MOST_JPEG_PIXELS:
        raise ValueError(
            f"re-encoded with {shape[1]} x {shape[0]} pixels it is too long for a JPEG, whose "
            f"sides have at most {_MOST_JPEG_PIXELS:,}"
        )
