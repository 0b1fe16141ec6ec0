"""JPEG files: their headers, and decoding at full or reduced scale."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

START: Final = b"\xff\xd8"
END: Final = b"\xff\xd9"
BLOCK: Final = 8
"""Side of a block of coefficients in pixels."""
# Starts of frame: baseline and extended sequential; with them, progressive (ITU T.81, table B.1).
_BASELINE: Final = frozenset({0xC0, 0xC1})
_FRAMES: Final = _BASELINE | {0xC2}
_SCAN: Final = 0xDA
_RESTART_INTERVAL: Final = 0xDD
_CODES: Final = 0xC4
# Bit in the number of a code table: tables for AC coefficients.
_AC: Final = 0x10
_ZEROS: Final = bytes(64)
# A marker after coded data that is not part of it: inside coded data 0xff is followed by 0 or a
# restart marker.
_NEXT_SEGMENT: Final = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")
# Markers that no length follows.
_WITHOUT_LENGTH: Final = frozenset({0x01, *range(0xD0, 0xD8)})
# Pillow refuses images of more pixels as decompression bombs (twice `Image.MAX_IMAGE_PIXELS`).
_MAX_PIXELS: Final = 178_956_970
_READ_FLAGS: Final = {
    1: cv2.IMREAD_COLOR_RGB,
    2: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_2,
    4: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_4,
    8: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_REDUCED_GRAYSCALE_8,
}


def size_of_jpeg(image: bytes | memoryview) -> tuple[int, int] | None:
    """Height and width of a plain JPEG: complete, and grey or YCbCr; None for anything else.

    A file without the end-of-image marker at its end may be truncated, and OpenCV would fill the
    rest with grey without an error.
    """
    size = None
    if image[:2] == START and image[-2:] == END:
        try:
            for marker, at, _ in header_segments(image):
                if marker in _FRAMES:
                    height, width, components = struct.unpack_from(">HHB", image, at + 3)
                    if components not in (1, 3) or not 0 < height * width <= _MAX_PIXELS:
                        return None
                    size = height, width
                elif marker == _SCAN:
                    return size
        except (struct.error, IndexError):  # the file ends inside a segment
            return None
    return None


def header_segments(image: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """(marker, offset of the length field, length with that field) up to the first scan's.

    Raises:
        IndexError, struct.error: the file ends inside its header, or the header is damaged.
    """
    at = 2
    while True:
        if image[at] != 0xFF:
            raise IndexError
        marker = image[at + 1]
        if marker == 0xFF:
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        else:
            (length,) = struct.unpack_from(">H", image, at + 2)
            if at + 2 + length > len(image):
                raise IndexError
            yield marker, at + 2, length
            if marker == _SCAN:
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


@dataclass(frozen=True)
class JpegFrame:
    """How a JPEG is divided into units, and the offsets of its parts in the file.

    Attributes:
        unit_height, unit_width: pixels of an MCU.
        interval: MCUs in a restart interval; 0 if there are none.
        front: length of the start of image, with the segment after it if that is JFIF's or Adobe's.
        tables_at: offset of the first segment that is neither a comment nor an application's.
        size_at: offset of height and width, two bytes each.
        scan_at: offset of the coded data of the first scan.
    """

    height: int
    width: int
    components: int
    unit_height: int
    unit_width: int
    is_baseline: bool
    interval: int
    front: int
    tables_at: int
    size_at: int
    scan_at: int

    @property
    def units_across(self) -> int:
        """MCUs in a row."""
        return -(-self.width // self.unit_width)


def read_frame(image: bytes) -> JpegFrame | None:
    """The frame of a file that is grey or of three components, 8 bits, Huffman coded, and either
    progressive or baseline in one scan; None for other kinds, and if the header is damaged.
    """
    if image[:2] != START or image[-2:] != END:
        return None
    frame_at, is_baseline, interval, front, tables_at = 0, False, 0, len(START), 0
    try:
        for marker, at, length in header_segments(image):
            if at == 4 and is_front(image[2 : 4 + length]):
                front = 4 + length
            if not tables_at and not _is_metadata(marker):
                tables_at = at - 2
            if marker in _FRAMES:
                frame_at, is_baseline = at, marker in _BASELINE
            elif marker == _RESTART_INTERVAL:
                (interval,) = struct.unpack_from(">H", image, at + 2)
        if not frame_at:  # lossless, hierarchical, arithmetic
            return None
        # The last segment is the header of the scan.
        precision, height, width, components = struct.unpack_from(">BHHB", image, frame_at + 2)
        is_in_scans = is_baseline and image[at + 2] != components
        if is_in_scans or components not in (1, 3) or precision != 8 or not height * width:
            return None
        samplings = [divmod(image[frame_at + 9 + 3 * i], 16) for i in range(components)]
    except (struct.error, IndexError):
        return None
    across, down = (max(factors) for factors in zip(*samplings, strict=True))
    # Decoders refuse other sampling factors.
    if not all(h and v and across % h == 0 and down % v == 0 for h, v in samplings):
        return None
    if components == 1:  # then an MCU is one block, whatever the sampling factors
        across = down = 1
    return JpegFrame(
        height, width, components, BLOCK * down, BLOCK * across, is_baseline, interval,
        front, tables_at, frame_at + 3, at + length,
    )  # fmt: skip


def metadata_of(image: bytes) -> list[bytes]:
    """The comments' and applications' segments before the first scan, with JFIF's and Adobe's."""
    return [
        image[at - 2 : at + length]
        for marker, at, length in header_segments(image)
        if _is_metadata(marker)
    ]


def is_front(segment: bytes) -> bool:
    """Whether a segment is JFIF's or Adobe's, which give the colour space."""
    fronts = (0xE0, b"JFIF\0"), (0xEE, b"Adobe")
    return any(segment[1] == marker and segment[4:].startswith(name) for marker, name in fronts)


def num_scans(image: bytes) -> int:
    """Scans of a JPEG file, which are passes of a decoder over the pixels; 0 for other files.

    Anything may follow the end of the picture, such as the video of a motion photo.
    """
    if image[:2] != START:
        return 0
    try:
        *_, (_, at, length) = header_segments(image)
    except (struct.error, IndexError):
        return 0
    count, at = 1, at + length
    while (marker := _NEXT_SEGMENT.search(image, at)) and marker[0] not in (START, END):
        count += marker[0][1] == _SCAN
        # Skip the segment by its length: its content may look like markers.
        at = marker.end() + int.from_bytes(image[marker.end() : marker.end() + 2])
    return count


def has_zeroed_data(image: bytes) -> bool:
    """Whether a part of a baseline file's coded data was overwritten by zeros, such as by a lost
    sector, which a decoder may not notice.

    If the code of zeros starts a coefficient of the first component, 64 zero bytes would be blocks
    in which all coefficients are -1, which no picture has. If the code of zeros ends a block, they
    may be an area of one colour, so the result is False.
    """
    frame = read_frame(image)
    if frame is None or not frame.is_baseline or image.find(_ZEROS, frame.scan_at) < 0:
        return False
    symbol_of_zeros = dict[int, int]()  # by table
    try:
        for marker, at, length in header_segments(image):
            table = at + 2
            while marker == _CODES and table < at + length:
                symbol_of_zeros[image[table]] = image[table + 17]
                table += 17 + sum(image[table + 1 : table + 17])
        # The last segment is the scan's header: number of components, first component, its tables.
        return symbol_of_zeros.get(_AC | image[at + 4] & 15, 0) & 15 != 0
    except IndexError:
        return False


def _is_metadata(marker: int) -> bool:
    return 0xE0 <= marker <= 0xEF or marker == 0xFE  # an application's, or a comment
