"""From rows of a source to rows of a shard: read ahead, checked, turned and shrunk if asked."""

import contextlib
from collections.abc import Iterator
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.rows import LargerError, Row, SourceChangedError
from vit_ray.data.convert.staged_files import ahead
from vit_ray.data.crops import decode, open_image
from vit_ray.data.dataset import checksum
from vit_ray.data.jpeg import START, encode_jpeg, size_of_jpeg
from vit_ray.data.jpeg_index.headers import has_zeroed_data, num_scans
from vit_ray.data.jpeg_index.libjpeg_process import WARNINGS
from vit_ray.data.jpeg_index.rewriting import Libjpeg, RewrittenJpeg, with_restart_markers
from vit_ray.data.orientation import TURNS, orientation_of
from vit_ray.data.shard_writer import EncodedImage

# Threads that read a shard's images ahead: object stores are slow to answer, but answer many.
_READERS: Final = 8
# Bytes of a file that is read ahead. Larger ones are read one at a time; on S3 such a file of a
# list takes two requests.
_SMALL: Final = 1 << 24
# Of a JPEG file, each of which a decoder passes over all pixels for: progressive files have about
# 10, and libjpeg-turbo's own tests of hostile files allow 500.
_MOST_SCANS: Final = 100
# Of images that are encoded again.
_JPEG_QUALITY: Final = 95
# Of a side, in libjpeg (JPEG_MAX_DIMENSION).
_MOST_JPEG_PIXELS: Final = 65_500


def read_ahead(rows: list[Row]) -> Iterator[tuple[Row, bytes | ValueError]]:
    """Each row with its image, or why it has none, in order, a few reads ahead."""
    for row, image in zip(rows, ahead(_read_small, rows, _READERS), strict=True):
        yield row, _read(row) if isinstance(image, LargerError) else image


def bytes_of(image: bytes | ValueError) -> bytes:
    """What was read; raises why it was not."""
    if isinstance(image, ValueError):
        raise image
    return image


def _read_small(row: Row) -> bytes | ValueError:
    if row.length > _SMALL and row.problem is None:
        return LargerError()
    return _read(row, _SMALL)


def _read(row: Row, *most: int) -> bytes | ValueError:
    try:
        return row.read(*most)
    except SourceChangedError:
        raise
    except ValueError as error:
        return error


def checked(
    image: bytes,
    key: str,
    labels: tuple[int, ...],
    config: ConvertConfig,
    libjpeg: Libjpeg | None = None,
) -> EncodedImage:
    """A row of the data set.

    Args:
        libjpeg: looks for damage in JPEG files, and gives them their restart markers.

    Raises:
        ValueError: if the image is empty, not an image, cut short, damaged, or
            cannot be shrunk.
    """
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
            pixels = decoded = TURNS[turned](decode(image))
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


def written_bytes(rows: list[Row], config: ConvertConfig) -> int:
    """Bytes of these images as a shard would hold them, without those that it would reject."""
    total = 0
    for row, image in read_ahead(rows):
        with contextlib.suppress(ValueError):
            total += len(checked(bytes_of(image), row.key, (), config).image) + row.extra_bytes
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
