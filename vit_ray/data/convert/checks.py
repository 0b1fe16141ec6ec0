"""From rows of a source to rows of a shard: read ahead, checked, turned and shrunk if asked."""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.rows import Row
from vit_ray.data.images import TURNS, decode, open_image, orientation_of
from vit_ray.data.jpeg import START, encode_jpeg, has_zeroed_data, num_scans, size_of_jpeg
from vit_ray.data.libjpeg_process import WARNINGS
from vit_ray.data.restart_markers import Libjpeg, with_restart_markers
from vit_ray.data.shard_writer import EncodedImage

# Threads that read a shard's images ahead: object stores are slow to answer, but answer many.
_READERS: Final = 8
# Bytes of images that wait.
_AHEAD_BYTES: Final = 1 << 26
# Of an image that waits to be read, where the source does not say how large it is.
_UNKNOWN_BYTES: Final = 1 << 23
# Of a JPEG file, each of which a decoder passes over all pixels for: progressive files have about
# 10, and libjpeg-turbo's own tests of hostile files allow 500.
_MOST_SCANS: Final = 100
# Of images that are encoded again.
_JPEG_QUALITY: Final = 95
# Of a side, in libjpeg (JPEG_MAX_DIMENSION).
_MOST_JPEG_PIXELS: Final = 65_500


def read_ahead(rows: Iterable[Row]) -> Iterator[tuple[Row, Future[bytes]]]:
    """Each row with its image, in order, read by threads; few images wait, and large ones alone."""
    with ThreadPoolExecutor(_READERS) as pool:
        waiting: deque[tuple[Row, Future[bytes]]] = deque()
        for row in rows:
            while waiting and (
                len(waiting) > 2 * _READERS
                or sum(_size_of(*one) for one in waiting) + max(row.length, 0) > _AHEAD_BYTES
            ):
                yield waiting.popleft()
            waiting.append((row, pool.submit(row.read)))
        while waiting:  # not kept when they have been looked at
            yield waiting.popleft()


def _size_of(row: Row, image: Future[bytes]) -> int:
    """Bytes of an image that waits, as far as they are known."""
    if row.length >= 0:
        return row.length
    if not image.done():
        return _UNKNOWN_BYTES
    return 0 if image.exception(0) else len(image.result(0))


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
    if (scans := num_scans(image)) > _MOST_SCANS:
        raise ValueError(f"it is a JPEG of {scans:,} scans; the most are {_MOST_SCANS}")
    damage = ""
    writer = libjpeg if config.index_jpeg else None
    of_jpeg = size_of_jpeg(image)
    size: tuple[int, ...] | None = of_jpeg or _declared_size(image)
    is_over = size is not None and size[0] * size[1] > config.max_pixels
    turned = orientation_of(image) if config.apply_orientation else 1
    keeps_pixels = turned == 1 and not is_over and not _is_too_large(of_jpeg, config)
    is_zeroed = has_zeroed_data(image)
    found = None
    # libjpeg reads all of a file that it rewrites, and warns of damage: that is check enough.
    if writer is not None and keeps_pixels and not is_zeroed:
        found = with_restart_markers(image, writer)
    if found is None:
        # First: a header without data may say any size.
        damage = _damage_of(image, libjpeg, config, is_zeroed=is_zeroed)
        if is_over and size is not None:
            raise ValueError(
                f"it has {size[1]} x {size[0]} pixels, more than "
                f"convert.max_pixels={config.max_pixels}"
            )
        # Else libjpeg has read all coded data, as in a file that it rewrites.
        if of_jpeg is None or not keeps_pixels or libjpeg is None or damage:
            pixels = decoded = TURNS[turned](decode(image))
            if config.shrink_to is not None and _is_too_large(pixels.shape, config):
                pixels = _shrunk(pixels, config.shrink_to)
            if turned != 1 or pixels is not decoded:
                if max(pixels.shape[:2]) > _MOST_JPEG_PIXELS:
                    raise ValueError(
                        f"re-encoded with {pixels.shape[1]} x {pixels.shape[0]} pixels it is too "
                        f"long for a JPEG, whose sides have at most {_MOST_JPEG_PIXELS:,}"
                    )
                image = encode_jpeg(pixels, _JPEG_QUALITY)
                found = None if writer is None else with_restart_markers(image, writer)
            size = pixels.shape[:2]
    if found is not None:
        image, size = found.image, found.size
    assert size is not None  # found, decoded or of a JPEG
    return EncodedImage(
        image, labels, key, size[1], size[0],
        index=None if found is None else found.index, damage=damage,
    )  # fmt: skip


def _declared_size(image: bytes) -> tuple[int, int] | None:
    """Height and width by the header of a file that is no plain JPEG; None where it has none."""
    # Pillow's plugins raise anything; decoding the image will say what is wrong.
    with contextlib.suppress(Exception), open_image(image) as opened:
        return opened.height, opened.width
    return None


def _damage_of(
    image: bytes, libjpeg: Libjpeg | None, config: ConvertConfig, *, is_zeroed: bool
) -> str:
    """What libjpeg warns of when it decodes a JPEG file; empty for nothing.

    Raises:
        ValueError: `convert.damaged` rejects it.
    """
    if libjpeg is None or not image.startswith(START):
        return ""
    warnings = libjpeg.ask(WARNINGS, image)
    lines = ["libjpeg cannot read it"] if warnings is None else warnings.decode().splitlines()
    lines += ["zeros stand in the place of coded data"] * is_zeroed
    damage = "; ".join(lines)
    ends_early = "premature end" in damage.lower()
    if damage and (config.damaged == "reject" or (config.damaged == "auto" and ends_early)):
        raise ValueError(f"it is damaged: {damage}")
    return damage


def _is_too_large(size: tuple[int, ...] | None, config: ConvertConfig) -> bool:
    return config.shrink_to is not None and size is not None and min(size[:2]) > config.shrink_to


def _shrunk(pixels: NDArray[np.uint8], shorter_side: int) -> NDArray[np.uint8]:
    """The image with its shorter side at a length."""
    factor = shorter_side / min(pixels.shape[:2])
    height, width = (max(shorter_side, round(side * factor)) for side in pixels.shape[:2])
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)  # type: ignore[return-value]
