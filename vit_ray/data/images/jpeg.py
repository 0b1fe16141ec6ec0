"""Plain JPEG files: their frame header, and decoding no more rows and no finer than needed.

Entropy decoding is most of the time and must start at the top, but it may stop early: a copy of the
file whose header claims fewer rows ends there (`_shortened`).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

_BASELINE_MARKERS: Final = frozenset({0xC0, 0xC1})
_PROGRESSIVE_MARKER: Final = 0xC2
_FRAME_MARKERS: Final = _BASELINE_MARKERS | {_PROGRESSIVE_MARKER}
"""Start of frame: baseline, extended sequential, progressive (ITU T.81, table B.1)."""
_SCAN_MARKER: Final = 0xDA
_RESTART_INTERVAL_MARKER: Final = 0xDD
_SECOND_APPLICATION_MARKER: Final = 0xE2
"""Holds the index of a file of several pictures (CIPA DC-007), as telephones write them."""
_END: Final = b"\xff\xd9"

_WORTHWHILE_SAVING: Final = 0.1
"""Least share of the rows that must be saved: copying and scanning the rest cost about 4 %."""

_MOST_PIXELS: Final = 178_956_970
"""Where Pillow suspects a decompression bomb (twice `Image.MAX_IMAGE_PIXELS`), and refuses."""

_READ_FLAGS: Final = {
    1: cv2.IMREAD_COLOR_RGB,
    2: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_2,
    4: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_4,
    8: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_8,
}


@dataclass(frozen=True)
class JpegHeader:
    """What the frame header of a plain JPEG says.

    `unit_rows` is the height of a coded unit; `height_at` the byte offset of the height field.
    """

    height: int
    width: int
    components: int
    unit_rows: int
    height_at: int
    can_stop_early: bool


def read_header(image: bytes) -> JpegHeader | None:
    """The header of a whole grey or YCbCr JPEG; None for anything else.

    A file that does not end with the end-of-image marker may be cut short, which OpenCV would fill
    with grey without a word; it is not taken for plain.
    """
    if image[:2] != b"\xff\xd8" or image[-2:] != _END:
        return None
    try:
        return _find_frame(image)
    except (struct.error, IndexError):  # the file ends inside a segment
        return None


def decode_jpeg(
    image: bytes, header: JpegHeader, scale: int = 1, rows: int | None = None
) -> NDArray[np.uint8] | None:
    """Pixels at 1/`scale`: uint8 (height, width, 3), RGB; None if OpenCV cannot.

    Args:
        rows: rows of the source that are needed, from the top; more may come, or fewer where the
            image ends. Rows that come are the same as in a full decode.
    """
    flags = _READ_FLAGS[scale] | cv2.IMREAD_IGNORE_ORIENTATION
    kept = _rows_to_claim(header, rows)
    coded = np.frombuffer(image, np.uint8) if kept is None else _shortened(image, header, kept)
    return cv2.imdecode(coded, flags)  # type: ignore[return-value]


def _rows_to_claim(header: JpegHeader, rows: int | None) -> int | None:
    """Whole coded units that hold `rows` and the row after them, which smooth chroma looks at."""
    if rows is None or not header.can_stop_early:
        return None
    kept = -(-(rows + 1) // header.unit_rows) * header.unit_rows
    return kept if kept < header.height * (1 - _WORTHWHILE_SAVING) else None


def _shortened(image: bytes, header: JpegHeader, rows: int) -> NDArray[np.uint8]:
    """A copy that claims to end after `rows`, so that a decoder reads the rest of the scan no more.

    The end-of-image marker is left out: libjpeg looks for a marker after the last row, and would
    complain on standard error of the bytes that it passes on the way to one. OpenCV's source for
    bytes in memory suspends at their end instead, without a word.
    """
    shortened = np.frombuffer(image, np.uint8)[: -len(_END)].copy()
    shortened[header.height_at : header.height_at + 2] = divmod(rows, 256)
    return shortened


def _find_frame(image: bytes) -> JpegHeader | None:
    header, has_markers = None, False
    for marker, at in _segments(image):
        if marker in _FRAME_MARKERS:
            header = _parse_frame(image, at, marker)
            if header is None:
                return None
        elif marker == _SCAN_MARKER:
            return header and _that_can_stop(header, image[at + 2], has_markers)
        has_markers |= _tells_of_markers(image, at, marker)
    return None


def _tells_of_markers(image: bytes, at: int, marker: int) -> bool:
    """Whether more markers than the last end of image follow the start of the scan."""
    if marker == _RESTART_INTERVAL_MARKER:
        return image[at + 2 : at + 4] != bytes(2)
    return marker == _SECOND_APPLICATION_MARKER and image[at + 2 : at + 6] == b"MPF\0"


def _segments(image: bytes) -> Iterator[tuple[int, int]]:
    """(marker, offset of its segment's length field) up to the first scan."""
    at = 2
    while at + 4 <= len(image) and image[at] == 0xFF:
        marker = image[at + 1]
        if marker == 0xFF:
            at += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD7:
            at += 2
        else:
            yield marker, at + 2
            at += 2 + struct.unpack_from(">H", image, at + 2)[0]


def _parse_frame(image: bytes, at: int, marker: int) -> JpegHeader | None:
    height, width, components = struct.unpack_from(">HHB", image, at + 3)
    if components not in (1, 3) or not 0 < height * width <= _MOST_PIXELS:
        return None
    sampling = [image[at + 9 + 3 * i] for i in range(components)]
    unit_rows = 8 * max(value & 15 for value in sampling)
    is_baseline = marker in _BASELINE_MARKERS
    return JpegHeader(height, width, components, unit_rows, at + 3, is_baseline)


def _that_can_stop(header: JpegHeader, scanned: int, has_markers: bool) -> JpegHeader:
    """Stopping early needs all components in one scan, and no marker in what is passed over."""
    can_stop = header.can_stop_early and scanned == header.components and not has_markers
    return replace(header, can_stop_early=can_stop)
