"""Rows that are drawn by weight: which of them stand in an epoch, a pure function of its number.

The weights of all rows are laid end to end, and a comb with equal gaps takes the rows that its
teeth hit (systematic sampling, Madow 1949): each with a probability in proportion to its weight.
A gap is no smaller than the heaviest weight, so no row is hit twice: an epoch is shorter than the
data set, and the copies of a heavy row lie in different epochs, with different crops. From epoch to
epoch the comb moves by the golden ratio, so that each row has its share of any few epochs.
"""

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.format.labels import first_labels, texts
from vit_ray.data.format.manifest import Manifest, open_dataset
from vit_ray.data.order.keyed_random import key_of
from vit_ray.data.order.selection import RowSelection

Int64Array = NDArray[np.int64]
Weights = NDArray[np.uint32]

BY_LABELS: Final = "labels"
"""Weights that make classes equally frequent; no column of text can have this name."""
_HEAVIEST: Final = 1 << 31
"""Weight of the heaviest row: the sum over 4 billion rows fits in 64 bits."""
_COMB: Final = 19
_GOLDEN: Final = 0x9E3779B97F4A7C15
_BITS: Final = 64
_GROUPS_AT_A_TIME: Final = 1024


class WeightedRows:
    """The rows of each epoch.

    Args:
        weights: of each row; the heaviest stands in every epoch, one of 0 in none.
        first_samples: number of the first row of each row group, and the total at the end.
    """

    def __init__(self, weights: Weights, first_samples: Int64Array, seed: int) -> None:
        self._weights, self._first_samples = weights, first_samples
        self._key = key_of(seed, _COMB)
        has_rows = np.flatnonzero(np.diff(first_samples))
        sums = np.zeros(len(first_samples) - 1, np.int64)
        # Some row groups at a time: no array here is as long as the weights, which are shared.
        for some in np.array_split(has_rows, 1 + len(has_rows) // _GROUPS_AT_A_TIME):
            first, stop = first_samples[some[0]], first_samples[some[-1] + 1]
            of_some = weights[first:stop]
            sums[some] = np.add.reduceat(of_some, first_samples[some] - first, dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(sums)])
        self._total = int(self._starts[-1])
        self.num_rows = self._total // int(weights.max())
        """Rows of an epoch."""
        self._gap = self._total // self.num_rows

    def counts(self, epoch: int) -> Int64Array:
        """How many rows of each row group stand in an epoch."""
        return np.diff(self._teeth_before(self._starts, epoch))

    def rows_of(self, epoch: int, group: int) -> Int64Array:
        """The rows of a row group that stand in an epoch, ascending."""
        weights = self._weights[slice(*self._first_samples[group : group + 2])]
        ends = self._starts[group] + np.concatenate([[0], np.cumsum(weights, dtype=np.int64)])
        return np.flatnonzero(np.diff(self._teeth_before(ends, epoch))).astype(np.int64)

    def _teeth_before(self, places: Int64Array, epoch: int) -> Int64Array:
        freedom = self._total - (self.num_rows - 1) * self._gap
        first = ((self._key + epoch * _GOLDEN) % (1 << _BITS)) * freedom >> _BITS
        return np.clip(-((first - places) // self._gap), 0, self.num_rows)


@lru_cache(maxsize=4)
def row_weights(path: str, fingerprint: str, by: str, rows: RowSelection) -> Weights:
    """The weight of each row of a data set; once for all trials of a sweep.

    Args:
        fingerprint: of the data set, which may be another one at the same path.
        by: `labels`, so that classes are equally frequent by the first label of each image; or a
            column of text with a number for each image.
        rows: that take part; all others weigh nothing.

    Raises:
        ValueError: there is no such column, a value is no number from 0 on, or all weights are 0.
    """
    manifest = open_dataset(path)
    takes_part = rows.mask(manifest, np.arange(manifest.num_images))
    if by == BY_LABELS:
        labels = np.concatenate(list(first_labels(manifest)))
        takes_part &= labels >= 0
        counts = np.bincount(labels[takes_part], minlength=manifest.num_classes)
        weights = 1 / np.maximum(counts[labels], 1)
    else:
        weights = _numbers(manifest, by)
    weights[~takes_part] = 0
    if not weights.any():
        raise ValueError(f"data.sample_weights={by!r}: all images of {path!r} weigh 0")
    return np.round(weights * (_HEAVIEST / weights.max())).astype(np.uint32)


def _numbers(manifest: Manifest, column: str) -> NDArray[np.float64]:
    where = f"data.sample_weights={column!r}"
    if column not in manifest.text_columns:
        raise ValueError(
            f"{where}: {manifest.path!r} has no such column; use {BY_LABELS!r} or one of "
            f"{list(manifest.text_columns)} (convert.columns)"
        )
    found = []
    for values in texts(manifest, column):
        try:
            numbers = np.array(["nan" if v is None else v for v in values], np.float64)
        except ValueError as error:
            raise ValueError(f"{where}: a value is no number ({error})") from error
        if not (np.isfinite(numbers) & (numbers >= 0)).all():
            wrong = numbers[~(np.isfinite(numbers) & (numbers >= 0))][0]
            raise ValueError(
                f"{where}: a value is {'missing' if np.isnan(wrong) else wrong}; each image needs "
                "a finite number from 0 on"
            )
        found.append(numbers)
    return np.concatenate(found)
