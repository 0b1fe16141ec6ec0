"""The parquet files of a data set."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import starmap
from typing import Any, Final

import numpy as np


@dataclass(frozen=True)
class ImageFile:
    """A parquet file of others that has the images of a shard, in the same row groups.

    Attributes:
        path: its address.
        bytes: its size.
        version: as `Location.info` gives it when the data set is made.
        column: of the encoded images, as parquet names it.
    """

    path: str
    bytes: int
    version: str
    column: str


@dataclass(frozen=True)
class ShardFile:
    """One parquet file of a data set; `path` is relative to the manifest's `root`.

    `footer_crc32` is that of everything behind the last row group. `images` has the images, where
    they are not in the file itself, but in one of others that is read where it lies.
    """

    path: str
    rows: int
    bytes: int
    footer_crc32: int
    images: ImageFile | None = None


_NO_IMAGES: Final = ("", 0, "", "")


class ShardFiles(Sequence[ShardFile]):
    """Files as an array for each field: processes share arrays, and would each have own objects."""

    def __init__(self, files: Iterable[ShardFile]) -> None:
        rows = [
            (f.path, f.rows, f.bytes, f.footer_crc32)
            + (_NO_IMAGES if f.images is None else astuple(f.images))
            for f in files
        ]
        self._columns = [np.array(column) for column in zip(*rows, strict=True)]

    def __len__(self) -> int:
        return len(self._columns[0]) if self._columns else 0

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        if not self._columns:
            raise IndexError(at)
        return _shard_file(*(column[at].item() for column in self._columns))

    def __iter__(self) -> Iterator[ShardFile]:
        return starmap(_shard_file, zip(*(c.tolist() for c in self._columns), strict=True))


def _shard_file(path: str, rows: int, size: int, footer_crc32: int, *images: Any) -> ShardFile:
    found = None if images == _NO_IMAGES else ImageFile(*images)
    return ShardFile(path, rows, size, footer_crc32, found)
