"""Crops of a baseline JPEG with restart markers, decoded only from the segments that they touch.

Entropy decoding of a JPEG starts at its top. Restart markers divide it into segments that can be
decoded separately (ITU T.81, E.2.4). If all segments cover the same number of coded units (MCUs)
and none crosses the end of a row, a rectangle of segments can be made a JPEG file: a copy of the
header with the new width and height, the segments with their markers renumbered, and an end marker.
Any decoder decodes it to the same pixels as the whole file, except at inner edges, where smooth
chroma needs a neighbour that is missing; `crop_file` therefore takes one more sample of chroma on
each side. Parts that decode to a width of 4 pixels or fewer are upsampled differently, and may
differ in chroma.

`index_segments` checks a file once, when a data set is made; a crop reads only the bytes that
it needs.
"""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vit_ray.data.jpeg import BLOCK, END, START, JpegFrame, is_front, metadata_of, read_frame

UInt8Array = NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""Top, left, bottom, right in pixels, the last two exclusive."""
_FIRST_RESTART: Final = 0xD0
_MAX_SEGMENTS: Final = 1 << 16
_MARKER: Final = re.compile(rb"\xff[^\x00\xff]")
# Second bytes of the markers that end the segments, in sequence.
_RESTARTS: Final = (_FIRST_RESTART + np.arange(_MAX_SEGMENTS) % 8).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class RestartIndex:
    """Byte offsets in a JPEG of the parts that a crop's file is made from.

    Attributes:
        front: length of the start of image with the JFIF or Adobe segment (colour space) after it.
        tables_at: offset of the tables and the frame header; the first segment follows them.
        size_at: offset of height and width, two bytes each.
        unit_height, unit_width: pixels of an MCU.
        columns: segments in a row of MCUs.
        offsets: of the segments, row by row, and the length of the file.
    """

    front: int
    tables_at: int
    size_at: int
    unit_height: int
    unit_width: int
    columns: int
    offsets: NDArray[np.uint32]

    @property
    def rows(self) -> int:
        """Rows of segments; each is one row of MCUs."""
        return (len(self.offsets) - 1) // self.columns


@dataclass(frozen=True, eq=False)
class StoredImage:
    """A stored image: encoded file, (height, width), and the index of its restart markers."""

    content: bytes | memoryview
    size: tuple[int, int]
    index: RestartIndex | None = None


class IndexColumn:
    """The restart indices of a row group, as its column in the shard stores them.

    All are checked at once and converted to lists, because reading a single number from a numpy
    array takes microseconds.

    Args:
        column: structs of the fields of `RestartIndex`, null for an image without an index.
        sizes: (n, 2), height and width of each image.
        num_bytes: (n,), length of each file.
    """

    def __init__(
        self, column: pa.StructArray, sizes: NDArray[np.integer], num_bytes: NDArray[np.integer]
    ) -> None:
        *fields, lists = (column.field(i) for i in range(column.type.num_fields))
        numbers = np.stack([f.fill_null(0).to_numpy() for f in fields], axis=1).astype(np.int64)
        ends = lists.offsets.to_numpy().astype(np.int64)
        self._offsets = lists.values.to_numpy()[ends[0] : ends[-1]]
        ends -= ends[0]
        self._is_indexed = column.is_valid().to_pylist()
        self._is_valid = _are_valid(numbers, ends, self._offsets, sizes, num_bytes).tolist()
        self._numbers, self._ends = numbers.tolist(), ends.tolist()

    def of(self, row: int) -> RestartIndex | None:
        """The index of an image; None if it has none.

        Raises:
            ValueError: the index cannot belong to a file of this size and length.
        """
        if not self._is_indexed[row]:
            return None
        if not self._is_valid[row]:
            raise ValueError("its restart index is not that of its bytes")
        offsets = self._offsets[self._ends[row] : self._ends[row + 1]]
        front, tables_at, size_at, unit_height, unit_width, columns = self._numbers[row]
        return RestartIndex(front, tables_at, size_at, unit_height, unit_width, columns, offsets)


def _are_valid(
    numbers: NDArray[np.int64],
    ends: NDArray[np.int64],
    offsets: NDArray[np.uint32],
    sizes: NDArray[np.integer],
    num_bytes: NDArray[np.integer],
) -> NDArray[np.bool_]:
    """Which indices can belong to files of these sizes and lengths.

    Args:
        numbers: (n, 6), the first fields of `RestartIndex` for each image.
        ends: (n + 1,), where the offsets of each image begin in `offsets`, and the last end.
        sizes, num_bytes: as in `IndexColumn`.
    """
    front, tables_at, size_at, unit_height, unit_width, columns = numbers.T
    counts = np.diff(ends)
    first, last = np.zeros((2, len(counts)), np.int64)
    has_any = counts > 0
    first[has_any], last[has_any] = offsets[ends[:-1][has_any]], offsets[ends[1:][has_any] - 1]
    units = -(-sizes // np.maximum(np.stack([unit_height, unit_width], axis=1), 1))
    is_valid = (np.minimum(unit_height, unit_width) >= BLOCK) & (columns >= 1)
    is_valid &= units[:, 1] % np.maximum(columns, 1) == 0
    is_valid &= counts == units[:, 0] * columns + 1
    is_valid &= (front >= 2) & (front <= tables_at) & (tables_at <= size_at)
    is_valid &= (size_at <= first - 4) & (last == num_bytes)
    image_of = np.repeat(np.arange(len(counts)), counts)
    falls = (offsets[1:] <= offsets[:-1]) & (image_of[1:] == image_of[:-1])
    is_valid[image_of[1:][falls]] = False
    return is_valid


@dataclass(frozen=True, eq=False)
class CropFile:
    """A JPEG file of a part of an image, and the pixel of the image at which the part begins."""

    image: UInt8Array
    top: int
    left: int


def crop_file(
    content: bytes | memoryview, index: RestartIndex, size: tuple[int, int], box: Box
) -> CropFile:
    """The smallest JPEG file that contains a rectangle of the image.

    Args:
        size: height and width of the image in pixels.
    """
    top, left, bottom, right = box
    segment_width = -(-size[1] // (index.columns * index.unit_width)) * index.unit_width
    above, margin = index.unit_height // BLOCK, index.unit_width // BLOCK
    first_row, last_row = _touched(top - above, bottom + above, index.unit_height, index.rows)
    first, last = _touched(left - margin, right + margin, segment_width, index.columns)
    height = min(size[0], last_row * index.unit_height) - first_row * index.unit_height
    width = min(size[1], last * segment_width) - first * segment_width
    # Where the segments of each row begin, and where they end.
    starts, ends = (
        offsets.reshape(index.rows, index.columns)[first_row:last_row, first:last]
        for offsets in (index.offsets[:-1], index.offsets[1:])
    )
    image, scan_at = memoryview(content), int(index.offsets[0])
    # The segments of a row are contiguous in the file, and so are consecutive whole rows.
    if starts.shape[1] == index.columns:
        segments = [image[starts[0, 0] : ends[-1, -1]]]
    else:
        rows = zip(starts[:, 0].tolist(), ends[:, -1].tolist(), strict=True)
        segments = [image[start:end] for start, end in rows]
    header = (image[: index.front], image[index.tables_at : scan_at])
    coded = bytearray().join((*header, *segments))
    data = np.frombuffer(coded, np.uint8)
    markers = np.cumsum(ends - starts) + (index.front + scan_at - index.tables_at - 1)
    data[markers] = _RESTARTS[: len(markers)]
    coded[-1] = END[1]
    size_at = index.front + index.size_at - index.tables_at
    coded[size_at : size_at + 4] = height.to_bytes(2) + width.to_bytes(2)
    return CropFile(data, first_row * index.unit_height, first * segment_width)


def _touched(first: int, last: int, size: int, count: int) -> tuple[int, int]:
    """Which of `count` pieces of `size` pixels hold [first, last)."""
    return max(0, first // size), min(count, -(-last // size))


def index_segments(image: bytes) -> RestartIndex | None:
    """The index of a file; None if its segments cannot be used separately.

    The file must be baseline, of one scan, with a restart interval that divides its rows of MCUs,
    all restart markers in sequence, and nothing after the image.
    """
    frame = read_frame(image)
    if (
        frame is None
        or not frame.is_baseline
        or not frame.interval
        or frame.units_across % frame.interval
    ):
        return None
    if frame.front == len(START) and any(map(is_front, metadata_of(image))):
        return None  # a later segment gives its colour space
    columns = frame.units_across // frame.interval
    markers = [match.start() for match in _MARKER.finditer(image, frame.scan_at)]
    codes = [image[at + 1] for at in markers]
    rows = -(-frame.height // frame.unit_height)
    inner = [_FIRST_RESTART + i % 8 for i in range(rows * columns - 1)]
    if codes != [*inner, END[1]] or markers[-1] != len(image) - 2 or len(codes) > _MAX_SEGMENTS:
        return None
    return RestartIndex(
        frame.front, frame.tables_at, frame.size_at, frame.unit_height, frame.unit_width, columns,
        np.array([frame.scan_at, *(at + 2 for at in markers)], np.uint32),
    )  # fmt: skip


def interval_for(frame: JpegFrame, pixels: int) -> int:
    """MCUs in a segment: a divisor of the MCUs in a row, with about this many pixels.

    A segment has at least half of `pixels`, or is a whole row: short segments cost bytes.
    """
    count, pixels_of_unit = frame.units_across, frame.unit_height * frame.unit_width
    divisors = [k for k in range(1, count + 1) if count % k == 0]
    long = [k for k in divisors if 2 * k * pixels_of_unit >= pixels] or [count]
    return min(long, key=lambda k: abs(np.log(k * pixels_of_unit / pixels)))
