"""The order of a run's samples: a pure function of row counts, seed, epoch and position.

Positions count from 0 over all epochs joined end to end, so position `p` lies in epoch
`p // num_images`. In each epoch the row groups are permuted, and the rows inside each row group.
Nothing is stored per row: an epoch of 1.2 million row groups is two arrays of that length.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.order.keyed_random import key_of, keys_of

Int64Array = NDArray[np.int64]

_GROUPS = 1
_ROWS = 2


@dataclass(frozen=True)
class Piece:
    """Consecutive positions that fall in one row group of one epoch, in the order of the run."""

    epoch: int
    group: int
    rows: Int64Array
    samples: Int64Array


@dataclass(frozen=True)
class _EpochPlan:
    groups: Int64Array
    ends: Int64Array


class Order:
    """The order in which a run with `seed` reads a data set.

    Args:
        manifest_rows: rows per row group, in the order of the manifest.
        seed: another seed is another order.
        is_shuffled: False keeps the order of the manifest, for evaluation.

    Raises:
        ValueError: if there are no rows.
    """

    def __init__(
        self, manifest_rows: NDArray[np.integer], seed: int, is_shuffled: bool = True
    ) -> None:
        self.rows = np.ascontiguousarray(manifest_rows, dtype=np.int64)
        self.first_samples = np.concatenate([[0], np.cumsum(self.rows)])
        self.num_images = int(self.first_samples[-1])
        self.seed = seed
        self.is_shuffled = is_shuffled
        if self.num_images == 0:
            raise ValueError("order: the selection holds 0 rows; choose a data set with images.")
        self._plan = lru_cache(maxsize=2)(self._plan_epoch)

    def __reduce__(self) -> tuple[object, ...]:
        return (Order, (self.rows, self.seed, self.is_shuffled))

    def epoch_of(self, position: int) -> int:
        """The 0-based epoch in which a position lies."""
        return position // self.num_images

    def samples_at(self, start: int, stop: int) -> Int64Array:
        """Global row numbers at positions [start, stop), in order: int64 (stop - start,)."""
        pieces = self.pieces(start, stop)
        if not pieces:
            return np.empty(0, np.int64)
        return np.concatenate([piece.samples for piece in pieces])

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The row groups, and the rows in each, that positions [start, stop) read, in order."""
        pieces: list[Piece] = []
        while start < stop:
            epoch = self.epoch_of(start)
            epoch_start = epoch * self.num_images
            epoch_stop = min(stop, epoch_start + self.num_images)
            pieces += self._pieces_in_epoch(epoch, start - epoch_start, epoch_stop - epoch_start)
            start = epoch_stop
        return pieces

    def _pieces_in_epoch(self, epoch: int, start: int, stop: int) -> list[Piece]:
        plan = self._plan(epoch)
        first = int(np.searchsorted(plan.ends, start, side="right"))
        last = int(np.searchsorted(plan.ends, stop, side="left"))
        pieces = []
        for place in range(first, last + 1):
            group = int(plan.groups[place])
            begin = int(plan.ends[place]) - int(self.rows[group])
            rows = self._rows_of(epoch, group)[max(0, start - begin) : stop - begin]
            if len(rows):
                pieces.append(Piece(epoch, group, rows, rows + self.first_samples[group]))
        return pieces

    def _rows_of(self, epoch: int, group: int) -> Int64Array:
        rows = np.arange(self.rows[group], dtype=np.int64)
        if not self.is_shuffled:
            return rows
        keys = keys_of(key_of(self.seed, _ROWS, epoch, group), rows)
        return np.argsort(keys, kind="stable").astype(np.int64)

    def _plan_epoch(self, epoch: int) -> _EpochPlan:
        groups = np.arange(len(self.rows), dtype=np.int64)
        if self.is_shuffled:
            keys = keys_of(key_of(self.seed, _GROUPS, epoch), groups)
            groups = np.argsort(keys, kind="stable").astype(np.int64)
        return _EpochPlan(groups, np.cumsum(self.rows[groups]))
