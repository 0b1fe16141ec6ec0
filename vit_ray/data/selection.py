"""Which rows of a data set a run reads: exact, nested fractions chosen by a keyed permutation.

A selection is four integers, whatever the size of the data set: a row belongs to it when its rank
lies in a range. Rows were shuffled at conversion, so ranks go through whole row groups, in an order
that is keyed, and a small share reads a small part of the bytes.
"""

from dataclasses import dataclass, replace
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.dataset import Manifest
from vit_ray.data.keyed_random import key_of, keys_of
from vit_ray.data.shared_arrays import shared_array

Int64Array = NDArray[np.int64]

_SPLIT_GROUPS: Final = 8


@dataclass(frozen=True)
class RowSelection:
    """The rows whose rank under `seed` is in [first, last)."""

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

    @property
    def is_all(self) -> bool:
        """Whether no row is left out."""
        return self.count == self.num_images

    def take(self, fraction: float) -> "RowSelection":
        """The first share of this selection; a smaller share is inside a larger one.

        Raises:
            ValueError: if the share holds no image, or is more than all.
        """
        count = round(self.count * fraction)
        if not 0 < count <= self.count:
            raise ValueError(
                f"fraction={fraction} of {self.count} images is {count}; "
                f"use a fraction from {1 / self.count:.3g} to 1"
            )
        return replace(self, last=self.first + count)

    def mask(self, manifest: Manifest, samples: Int64Array) -> NDArray[np.bool_]:
        """Whether each sample number is selected."""
        groups = np.searchsorted(manifest.first_samples, samples, side="right") - 1
        ranks = _first_ranks(self.seed, manifest)[groups] + samples - manifest.first_samples[groups]
        return (ranks >= self.first) & (ranks < self.last)

    def rows_of_group(self, manifest: Manifest, group: int) -> Int64Array:
        """The rows of a row group that are selected, ascending."""
        samples = np.arange(*manifest.first_samples[group : group + 2], dtype=np.int64)
        return np.flatnonzero(self.mask(manifest, samples)).astype(np.int64)

    def rows_per_group(self, manifest: Manifest) -> Int64Array:
        """How many rows of each row group are selected: int64 (row groups,)."""
        if self.num_images != manifest.num_images:
            raise ValueError(
                f"rows: the selection was made for {self.num_images} images and the data set "
                f"{manifest.path!r} has {manifest.num_images}; make it again with split_rows"
            )
        if self.is_all:
            return manifest.rows.astype(np.int64)
        begins = _first_ranks(self.seed, manifest)
        ends = begins + manifest.rows
        counts = np.minimum(ends, self.last) - np.maximum(begins, self.first)
        return np.maximum(counts, 0)


def select(
    manifest: Manifest, *, seed: int, held_out_fraction: float, fraction: float
) -> tuple[RowSelection, RowSelection | None]:
    """Rows to train on, and those held out if there are any.

    Raises:
        ValueError: as `split_rows` and `RowSelection.take`.
    """
    rows: RowSelection = RowSelection.all(manifest, seed)
    rest: RowSelection | None = None
    if held_out_fraction > 0:
        rows, rest = split_rows(manifest, held_out_fraction, seed)
    return (rows.take(fraction) if fraction < 1 else rows), rest


_FIRST_RANKS: Final[WeakKeyDictionary[Manifest, dict[int, Int64Array]]] = WeakKeyDictionary()
"""By seed, as long as the data set is in use; a run may read any number of them."""


def _first_ranks(seed: int, manifest: Manifest) -> Int64Array:
    """Rank of the first row of each row group, the row groups in an order of their own."""
    of_manifest = _FIRST_RANKS.setdefault(manifest, {})
    if seed not in of_manifest:

        def draw() -> Int64Array:
            keys = keys_of(key_of(_SPLIT_GROUPS, seed), np.arange(manifest.num_row_groups))
            order = np.argsort(keys, kind="stable")
            ends = np.cumsum(manifest.rows[order], dtype=np.int64)
            firsts = np.empty_like(ends)
            firsts[order] = ends - manifest.rows[order]
            return firsts

        of_manifest[seed] = shared_array(
            (_SPLIT_GROUPS, seed), manifest.rows, (manifest.num_row_groups,), draw
        )
    return of_manifest[seed]


def split_rows(
    manifest: Manifest, fraction: float, seed: int = 0
) -> tuple[RowSelection, RowSelection]:
    """Split a data set, the same way every time.

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
    if total < 2:
        raise ValueError(
            f"fraction={fraction} of {total} images: none can be held out of fewer than 2; give a "
            "larger data set"
        )
    if not 0 < held_out < total:
        raise ValueError(
            f"fraction={fraction} of {total} images holds out {held_out}; "
            f"use a fraction from {1 / total:.3g} to {1 - 1 / total:.3g}"
        )
    whole = RowSelection.all(manifest, seed)
    return replace(whole, first=held_out), replace(whole, last=held_out)
