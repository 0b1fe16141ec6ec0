"""Plain JPEG files: their size from the header, and decoding no finer than needed."""

import struct
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from vit_ray.data.jpeg_index.headers import END, FRAMES, SCAN, START, header_segments

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
