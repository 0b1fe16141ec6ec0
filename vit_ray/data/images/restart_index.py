"""Crops of a baseline JPEG with restart markers, decoded from the segments that they touch.

Entropy decoding of a JPEG starts at its top, unless it has restart markers: each begins a segment
that is decoded by itself (ITU T.81, E.2.4). Where every segment is the same part of a row of coded
units (MCUs), a rectangle of segments is again a JPEG: its width and height in a copy of the header,
its markers numbered anew, its end marked. Any decoder reads it, and gives the same pixels as for
the whole file, but for those at inner edges that smooth chroma computes with a neighbour that is
not there; `crop_file` takes one sample of chroma more on each side for them.

A file is found fit by `index_segments`; the offsets that it returns are all that is to be kept.
"""

import re
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_START: Final = b"\xff\xd8"
_END: Final = b"\xff\xd9"
_BASELINE: Final = frozenset({0xC0, 0xC1})
_RESTART_INTERVAL: Final = 0xDD
_SCAN: Final = 0xDA
_NEEDED: Final = _BASELINE | {0xC4, 0xDB, 0xDD, 0xDA, 0xE0, 0xEE}
"""Frame, tables, restart interval, scan; and what tells the colour space (JFIF, Adobe). Profiles,
thumbnails and comments are left out of a crop."""
_MARKER: Final = re.compile(rb"\xff[^\x00\xff]")
_BLOCK: Final = 8


@dataclass(frozen=True)
class CodedUnits:
    """How a baseline JPEG is divided: MCUs of `unit_height` x `unit_width` pixels, in segments.

    Attributes:
        header: the bytes up to the first segment, without what no decoder of pixels needs.
        size_at: where in `header` the height and width are, two bytes each.
        interval: MCUs in a segment; it divides those of a row.
        scan_at: where in the file the first segment starts.
    """

    header: bytes
    size_at: int
    height: int
    width: int
    unit_height: int
    unit_width: int
    interval: int
    scan_at: int

    @property
    def rows(self) -> int:
        """Rows of MCUs, and so of segments."""
        return -(-self.height // self.unit_height)

    @property
    def columns(self) -> int:
        """Segments in a row."""
        return -(-self.width // self.unit_width) // self.interval

    @property
    def segment_width(self) -> int:
        """Pixels from one segment of a row to the next."""
        return self.interval * self.unit_width


@dataclass(frozen=True)
class CropFile:
    """A JPEG file of a part of another, and the pixels of the other that it begins with."""

    image: bytes
    top: int
    left: int


def read_units(image: bytes) -> CodedUnits | None:
    """How a JPEG is divided; None for one whose segments cannot be taken alone.

    It must be baseline, grey or of three components in one scan, Huffman coded, with a restart
    interval that divides its rows.
    """
    if image[:2] != _START or image[-2:] != _END:
        return None
    try:
        return _read_units(image)
    except (struct.error, IndexError):  # the file ends inside a header
        return None


def index_segments(image: bytes) -> NDArray[np.uint32] | None:
    """Offsets of the segments, row by row, and of the end marker; None if there are no segments.

    The markers are checked to stand where they belong, numbered in turn, and nothing to follow.
    """
    units = read_units(image)
    if units is None:
        return None
    found = [match.start() for match in _MARKER.finditer(image, units.scan_at)]
    codes = [image[at + 1] for at in found]
    num_segments = units.rows * units.columns
    expected = [0xD0 + i % 8 for i in range(num_segments - 1)] + [_END[1]]
    if codes != expected or found[-1] != len(image) - 2:
        return None
    return np.array([units.scan_at, *(at + 2 for at in found)], np.uint32)


def crop_file(
    image: bytes, offsets: NDArray[np.uint32], box: tuple[int, int, int, int]
) -> CropFile | None:
    """The smallest JPEG file from whose pixels a rectangle of the image can be cut.

    Args:
        offsets: from `index_segments`.
        box: top, left, bottom, right in pixels, the last two exclusive.

    Returns:
        None if the offsets are not those of this image.
    """
    units = read_units(image)
    if units is None or not _fits(units, image, offsets):
        return None
    top, left, bottom, right = box
    above, beside = units.unit_height // _BLOCK, units.unit_width // _BLOCK
    first_row, last_row = _touched(top - above, bottom + above, units.unit_height, units.rows)
    first, last = _touched(left - beside, right + beside, units.segment_width, units.columns)
    segments = [
        image[offsets[at] : offsets[at + 1] - 2]
        for row in range(first_row, last_row)
        for at in range(row * units.columns + first, row * units.columns + last)
    ]
    height = min(units.height, last_row * units.unit_height) - first_row * units.unit_height
    width = min(units.width, last * units.segment_width) - first * units.segment_width
    coded = _joined(_resized(units, height, width), segments)
    return CropFile(coded, first_row * units.unit_height, first * units.segment_width)


def _touched(first: int, last: int, size: int, count: int) -> tuple[int, int]:
    """Which of `count` pieces of `size` pixels hold [first, last)."""
    return max(0, first // size), min(count, -(-last // size))


def _fits(units: CodedUnits, image: bytes, offsets: NDArray[np.uint32]) -> bool:
    is_complete = len(offsets) == units.rows * units.columns + 1
    return is_complete and offsets[0] == units.scan_at and offsets[-1] == len(image)


def _resized(units: CodedUnits, height: int, width: int) -> bytes:
    at = units.size_at
    return units.header[:at] + struct.pack(">HH", height, width) + units.header[at + 4 :]


def _joined(header: bytes, segments: list[bytes]) -> bytes:
    parts = [header]
    for i, segment in enumerate(segments):
        parts += (segment, bytes((0xFF, 0xD0 + i % 8)))
    parts[-1] = _END
    return b"".join(parts)


def _read_units(image: bytes) -> CodedUnits | None:
    header, at, interval = bytearray(_START), 2, 0
    frame: tuple[int, int, int, int, int] | None = None
    while True:
        start, marker, length = _segment(image, at)
        content = image[start : start + length]
        if len(content) != length or (0xC2 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)):
            return None
        if marker in _BASELINE:
            frame = _read_frame(content, len(header) + 2)
            if frame is None:
                return None
        elif marker == _RESTART_INTERVAL:
            (interval,) = struct.unpack_from(">H", content, 2)
        if marker in _NEEDED:
            header += bytes((0xFF, marker)) + content
        at = start + length
        if marker == _SCAN:
            return _divided(bytes(header), frame, interval, content[2], at)


def _segment(image: bytes, at: int) -> tuple[int, int, int]:
    """Where a marker segment's length field is, its marker, and its length with that field."""
    if image[at] != 0xFF:
        raise IndexError
    while image[at + 1] == 0xFF:
        at += 1
    (length,) = struct.unpack_from(">H", image, at + 2)
    return at + 2, image[at + 1], length


def _read_frame(content: bytes, at: int) -> tuple[int, int, int, int, int] | None:
    """Height, width, sampling of an MCU in blocks (rows, columns), where the height is."""
    height, width, components = struct.unpack_from(">HHB", content, 3)
    samplings = [content[9 + 3 * i] for i in range(components)]
    if components not in (1, 3) or not height * width or content[2] != 8:
        return None
    down, across = (max(s & 15 for s in samplings), max(s >> 4 for s in samplings))
    if components == 1:  # a scan of one component has one block in an MCU, whatever it says
        down = across = 1
    return height, width, down, across, at + 3


def _divided(
    header: bytes,
    frame: tuple[int, int, int, int, int] | None,
    interval: int,
    scanned: int,
    scan_at: int,
) -> CodedUnits | None:
    if frame is None or not interval:
        return None
    height, width, down, across, size_at = frame
    in_a_row = -(-width // (_BLOCK * across))
    components = header[size_at + 4]
    if scanned != components or in_a_row % interval:
        return None
    return CodedUnits(
        header, size_at, height, width, _BLOCK * down, _BLOCK * across, interval, scan_at
    )
