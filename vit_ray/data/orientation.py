"""The orientation of an image by its EXIF, which decoders leave alone unless it is asked for."""

import contextlib
import struct
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.images import decode, open_image
from vit_ray.data.jpeg import START, header_segments

_EXIF_ORIENTATION: Final = 0x0112
_EXIF_MARKS: Final[tuple[bytes, ...]] = (b"Exif", b"eXIf", b"EXIF", b"exif", b"II*\0", b"MM\0*")
"""What a file with an orientation contains: names of segments in JPEG, PNG and WebP; or TIFF's."""
TURNS: Final[dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]]] = {
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


def orientation_of(image: bytes) -> int:
    """What EXIF says of how the pixels are to be turned: 1 to 8, where 1 is not at all."""
    marks, searched = _EXIF_MARKS, image
    if image[:2] == START:
        marks = _EXIF_MARKS[:1]
        with contextlib.suppress(IndexError, struct.error):  # a damaged header is searched whole
            *_, (_, scan_at, _) = header_segments(image)
            searched = image[:scan_at]
    if not any(mark in searched for mark in marks):
        return 1
    with contextlib.suppress(Exception), open_image(image) as opened:  # Pillow raises anything
        orientation = opened.getexif().get(_EXIF_ORIENTATION)
        if orientation in TURNS:
            return orientation
    return 1


def turned_pixels(image: bytes) -> NDArray[np.uint8]:
    """The pixels of an image as EXIF says they are shown; errors as `decode`."""
    return TURNS[orientation_of(image)](decode(image))
