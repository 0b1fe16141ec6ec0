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

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vit_ray.data.jpeg import BLOCK, END, START, JpegFrame, is_front, metadata_of, read_frame
from vit_ray.data.order import divisors

UInt8Array = NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""Top, left, bottom, right in pixels, the last two exclusive."""
_FIRST_RESTART: Final = 0xD0
_MAX_SEGMENTS: Final = 1 << 16
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

    def fits(self, size: tuple[int, int], num_bytes: int) -> bool:
        """Whether a file of this (height, width) and length can have this index."""
        return bool(
            min(self.unit_height, self.unit_width) >= BLOCK
            and self.columns >= 1
            and -(-size[1] // self.unit_width) % self.columns == 0
            and len(self.offsets) == -(-size[0] // self.unit_height) * self.columns + 1
            and len(START) <= self.front <= self.tables_at <= self.size_at
            and self.size_at + 4 <= self.offsets[0]
            and self.offsets[-1] == num_bytes
            and (self.offsets[:-1] < self.offsets[1:]).all()
        )


@dataclass(frozen=True, eq=False)
class StoredImage:
    """A stored image: encoded file, (height, width), and the index of its restart markers."""

    content: bytes | memoryview
    size: tuple[int, int]
    index: RestartIndex | None = None


class IndexColumn:
    """The restart indices of a row group, as its column in the shard stores them.

    All numbers are converted to lists at once, because reading a single number from an array takes
    microseconds.

    Args:
        column: structs of the fields of `RestartIndex`, null for an image without an index.
    """

    def __init__(self, column: pa.StructArray) -> None:
        *fields, lists = (column.field(i) for i in range(column.type.num_fields))
        self._numbers = list(zip(*(field.to_pylist() for field in fields), strict=True))
        self._offsets, self._ends = lists.values.to_numpy(), lists.offsets.to_pylist()
        self._is_indexed = column.is_valid().to_pylist()

    def of(self, row: int, size: tuple[int, int], num_bytes: int) -> RestartIndex | None:
        """The index of an image; None if it has none.

        Raises:
            ValueError: the index cannot belong to a file of this (height, width) and length.
        """
        if not self._is_indexed[row]:
            return None
        offsets = self._offsets[self._ends[row] : self._ends[row + 1]]
        index = RestartIndex(*(*self._numbers[row], offsets))
        if not index.fits(size, num_bytes):
            raise ValueError("its restart index is not that of its bytes")
        return index


def crop_file(
    content: bytes | memoryview, index: RestartIndex, size: tuple[int, int], box: Box
) -> tuple[UInt8Array, int, int]:
    """The smallest JPEG file that contains a rectangle of the image.

    Args:
        size: height and width of the image in pixels.

    Returns:
        The file, and the row and the column of the image's pixels at which it begins.
    """
    top, left, bottom, right = box
    segment_width = -(-size[1] // (index.columns * index.unit_width)) * index.unit_width
    above, margin = index.unit_height // BLOCK, index.unit_width // BLOCK
    rows = (len(index.offsets) - 1) // index.columns  # each is one row of MCUs
    first_row, last_row = _touched(top - above, bottom + above, index.unit_height, rows)
    first, last = _touched(left - margin, right + margin, segment_width, index.columns)
    height = min(size[0], last_row * index.unit_height) - first_row * index.unit_height
    width = min(size[1], last * segment_width) - first * segment_width
    # Where the segments of each row begin, and where they end.
    starts, ends = (
        offsets.reshape(rows, index.columns)[first_row:last_row, first:last]
        for offsets in (index.offsets[:-1], index.offsets[1:])
    )
    image, scan_at = memoryview(content), int(index.offsets[0])
    # The segments of a row are contiguous in the file, and so are consecutive whole rows.
    if starts.shape[1] == index.columns:
        segments = [image[starts[0, 0] : ends[-1, -1]]]
    else:
        pairs = zip(starts[:, 0].tolist(), ends[:, -1].tolist(), strict=True)
        segments = [image[start:end] for start, end in pairs]
    header = (image[: index.front], image[index.tables_at : scan_at])
    coded = bytearray().join((*header, *segments))
    data = np.frombuffer(coded, np.uint8)
    markers = np.cumsum(ends - starts) + (index.front + scan_at - index.tables_at - 1)
    data[markers] = _RESTARTS[: len(markers)]
    coded[-1] = END[1]
    size_at = index.front + index.size_at - index.tables_at
    coded[size_at : size_at + 4] = height.to_bytes(2) + width.to_bytes(2)
    return data, first_row * index.unit_height, first * segment_width


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
        # A later segment gives its colour space.
        or (frame.front == len(START) and any(map(is_front, metadata_of(image))))
    ):
        return None
    columns = frame.units_across // frame.interval
    count = -(-frame.height // frame.unit_height) * columns
    data = np.frombuffer(image, np.uint8)
    # In coded data 0xff is followed by 0, unless it begins a marker or fills the space before one.
    first, second = data[frame.scan_at : -1], data[frame.scan_at + 1 :]
    markers = np.flatnonzero((first == 0xFF) & (second != 0) & (second != 0xFF)) + frame.scan_at
    if (
        len(markers) != count
        or count > _MAX_SEGMENTS
        or markers[-1] != len(image) - len(END)
        or not np.array_equal(data[markers[:-1] + 1], _RESTARTS[: count - 1])
    ):
        return None
    return RestartIndex(
        frame.front, frame.tables_at, frame.size_at, frame.unit_height, frame.unit_width, columns,
        np.append(frame.scan_at, markers + 2).astype(np.uint32),
    )  # fmt: skip


def interval_for(frame: JpegFrame, pixels: int) -> int:
    """MCUs in a segment: a divisor of the MCUs in a row, with about this many pixels.

    A segment has at least half of `pixels`, or is a whole row: short segments cost bytes.
    """
    count, pixels_of_unit = frame.units_across, frame.unit_height * frame.unit_width
    long = [k for k in divisors(count) if 2 * k * pixels_of_unit >= pixels] or [count]
    return min(long, key=lambda k: abs(np.log(k * pixels_of_unit / pixels)))
