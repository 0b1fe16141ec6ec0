"""The rows at given positions of a run: an order applied to a selection of a data set."""

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.order.selection import RowSelection
from vit_ray.data.order.shuffle import Order, ShuffleWindow

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows of a run, one entry per position, in order; `samples` are numbers in the data set."""

    epochs: Int64Array
    groups: Int64Array
    rows: Int64Array
    samples: Int64Array


def rows_per_group(manifest: Manifest, rows: RowSelection | None) -> NDArray[np.integer]:
    """How many rows of each row group take part."""
    return manifest.rows if rows is None else rows.rows_per_group(manifest)


class Plan:
    """Positions of a run to rows of the manifest.

    Args:
        rows: which rows take part; None for all.
        is_shuffled: False keeps the order of the manifest, for evaluation.
        counts: `rows_per_group` of the same, where it is known already.
        window: in which rows are dealt out to batches; None for none.
    """

    def __init__(
        self,
        manifest: Manifest,
        seed: int,
        rows: RowSelection | None,
        is_shuffled: bool = True,
        counts: NDArray[np.integer] | None = None,
        window: ShuffleWindow | None = None,
    ) -> None:
        self._manifest, self._selection = manifest, rows
        if counts is None:
            counts = rows_per_group(manifest, rows)
        self._order = Order(counts, seed, is_shuffled, window)
        if rows is not None:
            self._selected_rows = lru_cache(maxsize=4096)(partial(rows.rows_of_group, manifest))

    @property
    def num_images(self) -> int:
        """Images of one epoch."""
        return self._order.num_images

    def rows_at(self, positions: Int64Array) -> Rows:
        """What stands at some positions."""
        places = self._order.places(positions)
        rows = places.rows
        if self._selection is not None:
            rows = np.array(
                [self._selected_rows(int(g))[r] for g, r in zip(places.groups, rows, strict=True)],
                np.int64,
            )
        samples = self._manifest.first_samples[places.groups] + rows
        return Rows(places.epochs, places.groups, rows, samples)

    def span_of(self, sample: int, epoch: int) -> range:
        """Positions among which a sample stands in an epoch, none or a few thousand.

        `rows_at` says which of them it is.
        """
        group = int(np.searchsorted(self._manifest.first_samples, sample, side="right")) - 1
        row = sample - int(self._manifest.first_samples[group])
        if self._selection is not None:
            found = np.flatnonzero(self._selected_rows(group) == row)
            if not len(found):
                return range(0)
            row = int(found[0])
        return self._order.span_of(epoch, group, row)

    def rows_of_group(self, group: int) -> Int64Array:
        """Rows of a row group that take part, ascending."""
        if self._selection is None:
            return np.arange(self._manifest.rows[group], dtype=np.int64)
        return self._selected_rows(group)
