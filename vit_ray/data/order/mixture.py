"""The order of a run that reads several data sets in fixed proportions.

Of the first n positions, each set has its share to within a sample or so, for every n: a set's
samples are counted, not drawn. Which positions of a stretch it has is keyed; each set goes through
epochs of its own, in its own order. In a shuffle window, each set's rows are dealt slot by slot, so
that some consecutive slots of all batches, which one task or host reads, have consecutive rows of
each set. What stands at a position is known without what stands before it.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.order.keyed_random import key_of, keys_of
from vit_ray.data.order.sample_weights import Weights
from vit_ray.data.order.shuffle import Order, Places, ShuffleWindow

Int64Array = NDArray[np.int64]

_SET, _SLOTS = 16, 17
_STRETCH = 16
"""Slots of a batch among which the sets' turns are shuffled: few, as tasks that share a stretch
read its row groups twice."""
_NO_BATCH = 64
"""Positions that a set has its share of where there are no batches."""


def counts_of(weights: tuple[int, ...], num_samples: int) -> list[int]:
    """How many of a run's first samples come from each set.

    Each set in turn takes its share of what those before it leave, rounded. That is monotone in
    `num_samples`: one more sample is one more of exactly one set.
    """
    counts, left, of_weight = [], num_samples, sum(weights)
    for weight in weights:
        count = (2 * left * weight + of_weight) // (2 * of_weight)
        counts.append(count)
        left, of_weight = left - count, of_weight - weight
    return counts


class MixedOrder:
    """The order in which a run with `seed` reads several data sets.

    Args:
        rows_per_set: of each set, the rows of each of its row groups that take part.
        weights: the sets' proportions.
        window: in which rows are dealt out to global batches; each of these has the proportions,
            and each `_STRETCH` slots of it.
        weights_per_set: of each set, the weights of its rows; None for each once in an epoch.

    Raises:
        ValueError: if a set has no rows.
    """

    def __init__(
        self,
        rows_per_set: list[NDArray[np.integer]],
        weights: tuple[int, ...],
        seed: int,
        window: ShuffleWindow | None = None,
        weights_per_set: Sequence[Weights] | None = None,
    ) -> None:
        of_sets: Sequence[Weights | None] = weights_per_set or [None] * len(rows_per_set)
        self._orders = [
            Order(rows, key_of(seed, _SET, index), weights=of_set)
            for index, (rows, of_set) in enumerate(zip(rows_per_set, of_sets, strict=True))
        ]
        self._first_groups = np.cumsum([0, *(len(rows) for rows in rows_per_set)])
        self._weights = weights
        self._seed = seed
        self._window = window or ShuffleWindow(_NO_BATCH, 1)
        self._batch = self._window.batch_size
        self._stretches = -(-self._batch // _STRETCH)  # of a batch; the last may be shorter
        self._turns_of = lru_cache(maxsize=256)(self._draw_turns)

    @property
    def num_images(self) -> int:
        """Images of all sets."""
        return sum(order.num_images for order in self._orders)

    @property
    def shortest_epoch(self) -> int:
        """Images of the smallest set."""
        return min(order.num_images for order in self._orders)

    def places(self, positions: Int64Array) -> Places:
        """What stands at some positions; row groups are numbered through all sets."""
        # Which set each position has a sample of, and how many that set has given before.
        batches, slots = np.divmod(positions, self._batch)
        parts, slots = np.divmod(slots, _STRETCH)
        stretches, which = np.unique(batches * self._stretches + parts, return_inverse=True)
        none = np.zeros(0, np.int64)
        drawn = [(none, none), *map(self._turns_of, stretches.tolist())]
        at = np.cumsum([len(sets) for sets, _ in drawn])[which] + slots
        sets, turns = (np.concatenate(of_all)[at] for of_all in zip(*drawn, strict=True))
        turns = self._dealt(sets, turns, batches)
        places = Places(*(np.empty_like(positions) for _ in range(3)))
        for index, order in enumerate(self._orders):
            mine = sets == index
            of_set = order.places(turns[mine])
            places.epochs[mine] = of_set.epochs
            places.groups[mine] = of_set.groups + self._first_groups[index]
            places.rows[mine] = of_set.rows
        return places

    def span_of(self, epoch: int, group: int, row: int) -> range:
        """Positions among which a row stands in an epoch of its set, as `Order.span_of`."""
        index = int(np.searchsorted(self._first_groups, group, side="right")) - 1
        of_set = self._orders[index].span_of(epoch, group - int(self._first_groups[index]), row)
        if not of_set:
            return of_set
        # The position at which the set gives this sample: counts only grow with it.
        low, high = 0, 1
        while counts_of(self._weights, high)[index] <= of_set.start:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            has_given = counts_of(self._weights, middle)[index] > of_set.start
            low, high = (low, middle) if has_given else (middle, high)
        start = low // self._window.num_rows * self._window.num_rows
        return range(start, start + self._window.num_rows)

    def _draw_turns(self, stretch: int) -> tuple[Int64Array, Int64Array]:
        batch, part = divmod(stretch, self._stretches)
        slot = part * _STRETCH
        size = min(_STRETCH, self._batch - slot)
        start = batch * self._batch + slot
        before = counts_of(self._weights, start)
        after = counts_of(self._weights, start + size)
        spans = list(zip(before, after, strict=True))
        sets = np.repeat(np.arange(len(spans)), [last - first for first, last in spans])
        turns = np.concatenate([np.arange(*span, dtype=np.int64) for span in spans])
        keys = keys_of(key_of(self._seed, _SLOTS, stretch), np.arange(size, dtype=np.int64))
        slots = np.argsort(keys, kind="stable")
        return sets[slots], turns[slots]

    def _dealt(self, sets: Int64Array, turns: Int64Array, batches: Int64Array) -> Int64Array:
        """Turns with each set's rows of a window dealt to its batches, as `ShuffleWindow.undealt`.

        A set's first rows go to its first place of each batch in turn, the next to the second; a
        batch that has fewer places of the set than others is passed over.
        """
        window = self._window
        dealt = np.empty_like(turns)
        windows, of_window = np.divmod(batches, window.num_batches)
        for number in np.unique(windows).tolist():
            starts = number * window.num_rows + window.batch_size * np.arange(
                window.num_batches + 1
            )
            firsts = np.array([counts_of(self._weights, start) for start in starts.tolist()])
            sizes = np.diff(firsts, axis=0)
            for index, its_sizes in enumerate(sizes.T):
                mine = (windows == number) & (sets == index)
                batch = of_window[mine, None]
                place = turns[mine, None] - firsts[batch, index]
                before = np.minimum(its_sizes, place)
                before += (np.arange(window.num_batches) < batch) & (place < its_sizes)
                dealt[mine] = firsts[0, index] + before.sum(axis=1)
        return dealt
