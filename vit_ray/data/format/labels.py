"""Labels of a data set without its images: some bytes a row instead of a hundred thousand."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.format.row_groups import RowGroupReader

_THREADS: Final = 16
"""Files read at a time: the wait for an object store's answers is most of it."""


def first_labels(manifest: Manifest) -> Iterator[NDArray[np.int32]]:
    """First label of every image, in the order of the rows, a file at a time.

    Whoever stops asking ends the reading.

    Raises:
        ValueError: a shard is missing, truncated, or not what the manifest says.
    """
    cuts = np.flatnonzero(np.diff(manifest.file_index)) + 1
    runs = np.split(np.arange(manifest.num_row_groups), cuts)

    def of_file(groups: NDArray[np.int64]) -> NDArray[np.int32]:
        reader = RowGroupReader(manifest)
        return np.concatenate([reader.first_labels(int(group)) for group in groups])

    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(of_file, runs)
