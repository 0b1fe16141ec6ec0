"""Which rows of a data set a run reads: exact, nested fractions chosen by a keyed permutation.

A selection is four integers, whatever the size of the data set: a row belongs to it when the rank
that a keyed permutation gives to its sample number lies in a range.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.order.keyed_random import key_of, keys_of

Int64Array = NDArray[np.int64]

_FEISTEL_ROUNDS: Final = 4
"""Luby and Rackoff 1988: four rounds make a pseudo-random permutation of random functions."""

_ROWS_AT_A_TIME: Final = 1 << 19
_THREADS: Final = 16
_SPLIT: Final = 4


class KeyedPermutation:
    """A permutation of [0, size) that is computed at any point and stored nowhere.

    A Feistel network over the next power of four, walked until it lands below `size`.
    """

    def __init__(self, size: int, *key: int) -> None:
        self._size = size
        self._half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._keys = [key_of(*key, i) for i in range(_FEISTEL_ROUNDS)]

    def ranks(self, values: Int64Array) -> Int64Array:
        """Where the permutation sends each value: int64, same shape."""
        ranks = self._network(values.astype(np.uint64))
        outside = ranks >= self._size
        while outside.any():
            ranks[outside] = self._network(ranks[outside])
            outside = ranks >= self._size
        return ranks.astype(np.int64)

    def values(self, ranks: Int64Array) -> Int64Array:
        """The value that has each rank: the inverse of `ranks`."""
        values = self._network_back(ranks.astype(np.uint64))
        outside = values >= self._size
        while outside.any():
            values[outside] = self._network_back(values[outside])
            outside = values >= self._size
        return values.astype(np.int64)

    def _network_back(self, ranks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = ranks >> bits, ranks & mask
        for key in reversed(self._keys):
            left, right = right ^ (keys_of(key, left) & mask), left
        return (left << bits) | right

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (keys_of(key, right) & mask)
        return (left << bits) | right


@dataclass(frozen=True)
class RowSelection:
    """The rows whose rank under the permutation of `seed` is in [first, last)."""

    seed: int
    first: int
    last: int
    num_images: int

    @classmethod
    def all(cls, manifest: Manifest, seed: int = 0) -> "RowSelection":
        """Every row of a data set."""
        return cls(seed, 0, manifest.num_images, manifest.num_images)

    @property
    def count(self) -> int:
        """Number of selected rows."""
        return self.last - self.first

    def take(self, fraction: float) -> "RowSelection":
        """The first share of this selection; a smaller share is inside a larger one.

        Raises:
            ValueError: if the share holds no image, or is more than all.
        """
        count = round(self.count * fraction)
        if not 0 < count <= self.count:
            raise ValueError(
                f"fraction={fraction} of {self.count} images is {count}; "
                f"use a fraction from {1 / self.count:.3g} to 1."
            )
        return RowSelection(self.seed, self.first, self.first + count, self.num_images)

    def mask(self, samples: Int64Array) -> NDArray[np.bool_]:
        """Whether each sample number is selected."""
        ranks = KeyedPermutation(self.num_images, _SPLIT, self.seed).ranks(samples)
        return (ranks >= self.first) & (ranks < self.last)

    def rows_per_group(self, manifest: Manifest) -> Int64Array:
        """How many rows of each row group are selected: int64 (row groups,)."""
        if self.num_images != manifest.num_images:
            raise ValueError(
                f"rows: the selection was made for {self.num_images} images and the data set "
                f"{manifest.path!r} has {manifest.num_images}; make it again with split_rows."
            )
        return _count_selected(self, manifest).copy()

    def _count_between(
        self, manifest: Manifest, start: int, stop: int
    ) -> tuple[int, NDArray[np.intp]]:
        """The first row group that holds rows [start, stop), and counts from there on."""
        chosen = start + np.flatnonzero(self.mask(np.arange(start, stop, dtype=np.int64)))
        firsts = manifest.first_samples
        first = int(np.searchsorted(firsts, start, side="right")) - 1
        return first, np.bincount(np.searchsorted(firsts, chosen, side="right") - 1 - first)


@lru_cache(maxsize=8)
def _count_selected(selection: RowSelection, manifest: Manifest) -> Int64Array:
    """Kept, because a run asks at every start; 300 million rows take a minute of CPU time."""
    counts = np.zeros(manifest.num_row_groups, np.int64)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        parts = pool.map(
            lambda span: selection._count_between(manifest, *span), _chunks(selection.num_images)
        )
        for first, part in parts:
            counts[first : first + len(part)] += part
    return counts


def split_rows(
    manifest: Manifest, fraction: float, seed: int = 0
) -> tuple[RowSelection, RowSelection]:
    """Split a data set row by row, the same way every time.

    Args:
        fraction: share of the images that is held out, rounded to whole images.

    Returns:
        The kept rows and the held-out rows; for one seed, a smaller held-out part is inside a
        larger one.

    Raises:
        ValueError: if one of the two would be empty.
    """
    total = manifest.num_images
    held_out = round(total * fraction)
    if not 0 < held_out < total:
        raise ValueError(
            f"fraction={fraction} of {total} images holds out {held_out}; "
            f"use a fraction from {1 / total:.3g} to {1 - 1 / total:.3g}."
        )
    return RowSelection(seed, held_out, total, total), RowSelection(seed, 0, held_out, total)


def _chunks(total: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, _ROWS_AT_A_TIME):
        yield start, min(start + _ROWS_AT_A_TIME, total)
