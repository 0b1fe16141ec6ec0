"""Labels and keys of a data set without its images: some bytes a row, not a hundred thousand."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest, open_dataset
from vit_ray.data.format.row_groups import RowGroupReader

_THREADS: Final = 16
"""Files read at a time: the wait for an object store's answers is most of it."""


def first_labels(manifest: Manifest) -> Iterator[NDArray[np.int32]]:
    """First label of every image, in the order of the rows, a file at a time.

    Whoever stops asking ends the reading.

    Raises:
        ValueError: a shard is missing, truncated, or not what the manifest says.
    """
    yield from map(np.concatenate, _by_file(manifest, RowGroupReader.first_labels))


def all_first_labels(path: str) -> NDArray[np.int32]:
    """First label of every image of the data set at `path`; errors as there and of opening it."""
    return np.concatenate(list(first_labels(open_dataset(path))))


def keys(manifest: Manifest) -> Iterator[list[str]]:
    """Key of every image, in the order of the rows, a file at a time; errors as `first_labels`."""
    for groups in _by_file(manifest, RowGroupReader.keys):
        yield [key for group in groups for key in group]


def _by_file(manifest: Manifest, read: Callable[[RowGroupReader, int], Any]) -> Iterator[list[Any]]:
    """What `read` finds in each row group, a list for each file."""
    cuts = np.flatnonzero(np.diff(manifest.file_index)) + 1
    runs = np.split(np.arange(manifest.num_row_groups), cuts)

    def of_file(groups: NDArray[np.int64]) -> list[Any]:
        reader = RowGroupReader(manifest)
        return [read(reader, int(group)) for group in groups]

    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(of_file, runs)
