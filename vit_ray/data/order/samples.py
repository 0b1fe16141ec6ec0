"""The rows at given positions of a run: an order applied to a selection of a data set."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.order.selection import RowSelection
from vit_ray.data.order.shuffle import Order

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows of a run, one entry per position, in order."""

    epochs: Int64Array
    groups: Int64Array
    rows: Int64Array
    samples: Int64Array

    @classmethod
    def joined(cls, parts: list["Rows"]) -> "Rows":
        """Several one after the other."""
        names = ("epochs", "groups", "rows", "samples")
        none = [np.empty(0, np.int64)]
        return cls(*(np.concatenate([getattr(p, name) for p in parts] or none) for name in names))


def rows_per_group(manifest: Manifest, rows: RowSelection | None) -> NDArray[np.integer]:
    """How many rows of each row group take part."""
    return manifest.rows if rows is None else rows.rows_per_group(manifest)


class Plan:
    """Positions of a run to rows of the manifest.

    Args:
        rows: which rows take part; None for all.
        is_shuffled: False keeps the order of the manifest, for evaluation.
        counts: `rows_per_group` of the same, where it is known already.
    """

    def __init__(
        self,
        manifest: Manifest,
        seed: int,
        rows: RowSelection | None,
        is_shuffled: bool = True,
        counts: NDArray[np.integer] | None = None,
    ) -> None:
        self._manifest = manifest
        self._selection = rows
        self._order = Order(
            rows_per_group(manifest, rows) if counts is None else counts, seed, is_shuffled
        )
        self._selected_rows = lru_cache(maxsize=4096)(self._find_selected_rows)

    @property
    def num_images(self) -> int:
        """Images of one epoch."""
        return self._order.num_images

    def rows_at(self, start: int, stop: int) -> Rows:
        """What stands at positions [start, stop)."""
        pieces = self._order.pieces(start, stop)
        lengths = [len(piece.rows) for piece in pieces]
        epochs = np.repeat(np.array([p.epoch for p in pieces], np.int64), lengths)
        groups = np.repeat(np.array([p.group for p in pieces], np.int64), lengths)
        rows = np.concatenate([self._rows_of(p.group, p.rows) for p in pieces])
        return Rows(epochs, groups, rows, self._manifest.first_samples[groups] + rows)

    def rows_of_group(self, group: int) -> Int64Array:
        """Rows of a row group that take part, ascending."""
        if self._selection is None:
            return np.arange(self._manifest.rows[group], dtype=np.int64)
        return self._selected_rows(group)

    def _rows_of(self, group: int, rows: Int64Array) -> Int64Array:
        return rows if self._selection is None else self._selected_rows(group)[rows]

    def _find_selected_rows(self, group: int) -> Int64Array:
        assert self._selection is not None
        first, last = self._manifest.first_samples[group : group + 2]
        samples = np.arange(first, last, dtype=np.int64)
        return np.flatnonzero(self._selection.mask(samples)).astype(np.int64)
