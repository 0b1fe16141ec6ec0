"""Plain JPEG files: their size from the header, and decoding no finer than needed."""

import struct
from collections.abc import Iterator
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

START: Final = b"\xff\xd8"
END: Final = b"\xff\xd9"
BLOCK: Final = 8
"""Side of a block of coefficients in pixels."""

BASELINE: Final = frozenset({0xC0, 0xC1})
_PROGRESSIVE: Final = 0xC2
FRAMES: Final = BASELINE | {_PROGRESSIVE}
"""Start of frame: baseline, extended sequential, progressive (ITU T.81, table B.1)."""
SCAN: Final = 0xDA
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers that no length follows."""
_MOST_PIXELS: Final = 178_956_970
"""Pixels at which Pillow suspects a decompression bomb (twice `Image.MAX_IMAGE_PIXELS`), and
refuses."""

_READ_FLAGS: Final = {
    1: cv2.IMREAD_COLOR_RGB,
    2: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_2,
    4: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_4,
    8: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_8,
}


def size_of_jpeg(image: bytes | memoryview) -> tuple[int, int] | None:
    """Height and width of a complete grey or YCbCr JPEG; None for anything else.

    A file that does not end with the end-of-image marker may be truncated, and OpenCV would fill
    the rest with grey without an error; it does not count as plain.
    """
    size = None
    if image[:2] == START and image[-2:] == END:
        try:
            for marker, at, _ in header_segments(image):
                if marker in FRAMES:
                    height, width, components = struct.unpack_from(">HHB", image, at + 3)
                    if components not in (1, 3) or not 0 < height * width <= _MOST_PIXELS:
                        return None
                    size = height, width
                elif marker == SCAN:
                    return size
        except (struct.error, IndexError):  # the file ends inside a segment
            return None
    return None


def header_segments(image: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """(marker, offset of its length field, length with that field) up to the first scan's."""
    at = 2
    while True:
        if image[at] != 0xFF:
            raise IndexError
        marker = image[at + 1]
        if marker == 0xFF:
            at += 1
        elif marker in _ALONE:
            at += 2
        else:
            (length,) = struct.unpack_from(">H", image, at + 2)
            if at + 2 + length > len(image):
                raise IndexError
            yield marker, at + 2, length
            if marker == SCAN:
                return
            at += 2 + length


def encode_jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """An RGB image as a JPEG file; `quality` is from 1 to 100."""
    bgr = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    return cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()


def decode_jpeg(
    image: bytes | memoryview | NDArray[np.uint8], scale: int = 1
) -> NDArray[np.uint8] | None:
    """Pixels at 1/`scale`: uint8 (height, width, 3), RGB; None if OpenCV cannot."""
    flags = _READ_FLAGS[scale] | cv2.IMREAD_IGNORE_ORIENTATION
    return cv2.imdecode(np.frombuffer(image, np.uint8), flags)  # type: ignore[return-value]
