"""An image as a data set has it, and what is kept of a JPEG file with restart markers."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

_BLOCK: Final = 8
"""Least side of an MCU in pixels."""


@dataclass(frozen=True, eq=False)
class RestartIndex:
    """Where the parts of a JPEG lie that a crop of it is made of.

    Attributes:
        front: bytes at its start that tell the colour space: start of image, JFIF or Adobe marker.
        tables_at: where the tables and the frame header begin, which the first segment follows.
        size_at: where height and width are, two bytes each.
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
    def segments(self) -> NDArray[np.uint32]:
        """(rows, columns + 1): where each segment begins, and the last of a row ends."""
        step = self.offsets.itemsize
        shape = (self.rows, self.columns + 1)
        return as_strided(self.offsets, shape, (self.columns * step, step), writeable=False)

    @property
    def rows(self) -> int:
        """Rows of MCUs, and so of segments."""
        return (len(self.offsets) - 1) // self.columns

    def is_possible(self, size: tuple[int, int], num_bytes: int) -> bool:
        """Whether a file of this height, width and length may have it, so that crops can be cut."""
        if min(self.unit_height, self.unit_width) < _BLOCK or self.columns < 1:
            return False
        rows, units = -(-size[0] // self.unit_height), -(-size[1] // self.unit_width)
        if units % self.columns or len(self.offsets) != rows * self.columns + 1:
            return False
        if not 2 <= self.front <= self.tables_at <= self.size_at <= int(self.offsets[0]) - 4:
            return False
        is_rising = bool((self.offsets[1:] > self.offsets[:-1]).all())
        return is_rising and int(self.offsets[-1]) == num_bytes


@dataclass(frozen=True, eq=False)
class StoredImage:
    """An image as a data set has it: file, height and width, index of its restart markers."""

    content: bytes | memoryview
    size: tuple[int, int]
    index: RestartIndex | None = None
