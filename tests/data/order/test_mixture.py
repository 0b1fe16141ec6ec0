"""Several data sets in one order: exact proportions, no row lost, the same wherever it is begun."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_ray.data.order.mixture import MixedOrder, counts_of
from vit_ray.data.order.shuffle import Places, ShuffleWindow

GOLDEN = [(1, 3), (1, 0), (1, 3), (0, 0), (0, 2), (1, 0), (0, 3), (0, 3)]
GOLDEN_WINDOW = [(1, 3), (1, 0), (1, 1), (0, 1), (1, 0), (0, 3), (0, 0), (1, 2)]

weights = st.lists(st.integers(1, 1000), min_size=1, max_size=5).map(tuple)
windows = st.none() | st.builds(ShuffleWindow, st.integers(1, 9) | st.just(37), st.integers(1, 5))


@st.composite
def orders(draw: st.DrawFn) -> MixedOrder:
    chosen = draw(weights)
    rows = [
        np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(sum)))
        for _ in chosen
    ]
    return MixedOrder(rows, chosen, draw(st.integers(0, 5)), draw(windows))


def as_rows(places: Places) -> list[tuple[int, int, int]]:
    columns = (places.epochs, places.groups, places.rows)
    return [tuple(row) for row in np.stack(columns, axis=1).tolist()]


@given(weights, st.integers(0, 10**12))
def test_each_set_has_its_share_of_the_first_samples(chosen: tuple[int, ...], n: int) -> None:
    counts = counts_of(chosen, n)
    assert sum(counts) == n
    for count, weight in zip(counts, chosen, strict=True):
        assert abs(count * sum(chosen) - n * weight) <= len(chosen) / 2 * sum(chosen)
    assert counts_of(chosen, n * sum(chosen)) == [n * weight for weight in chosen]


@given(weights, st.integers(0, 10**6))
def test_one_more_sample_is_one_more_of_one_set(chosen: tuple[int, ...], n: int) -> None:
    before, after = counts_of(chosen, n), counts_of(chosen, n + 1)
    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0] * (len(chosen) - 1) + [
        1
    ]


@given(orders(), st.lists(st.integers(0, 399), max_size=9))
def test_places_anywhere_are_those_of_the_whole(order: MixedOrder, positions: list[int]) -> None:
    whole = as_rows(order.places(np.arange(400)))
    some = as_rows(order.places(np.array(positions, np.int64)))
    assert some == [whole[position] for position in positions]


@given(orders())
def test_each_row_of_a_set_stands_once_in_each_of_its_epochs(order: MixedOrder) -> None:
    """Of as many whole windows as are looked at: all of an epoch, or none of it twice."""
    length = 10 * order._window.num_rows
    found = as_rows(order.places(np.arange(length)))
    assert len(set(found)) == length
    counts = counts_of(order._weights, length)
    for index, one in enumerate(order._orders):
        first, last = order._first_groups[index : index + 2]
        mine = {row for row in found if first <= row[1] < last}
        assert len(mine) == counts[index]
        epochs = counts[index] // one.num_images
        whole = {
            (epoch, first + group, row)
            for epoch in range(epochs)
            for group, rows in enumerate(one.rows)
            for row in range(rows)
        }
        assert whole <= mine


@pytest.mark.parametrize("num_batches", [1, 2, 16])
def test_each_global_batch_has_the_proportions(num_batches: int) -> None:
    rows = [np.full(100, 8), np.full(50, 8), np.full(20, 8)]
    order = MixedOrder(rows, (70, 25, 5), 3, ShuffleWindow(64, num_batches))
    for batch in range(50):
        groups = order.places(np.arange(64 * batch, 64 * (batch + 1))).groups
        counts = np.bincount(np.searchsorted([100, 150], groups, side="right"), minlength=3)
        assert np.abs(counts - 64 * np.array([0.7, 0.25, 0.05])).max() < 2


def test_images_of_a_row_group_meet_others_in_each_epoch() -> None:
    """A window deals the rows of its row groups to all of its batches."""
    order = MixedOrder([np.full(64, 16)] * 2, (1, 1), 3, ShuffleWindow(32, 8))
    groups = order.places(np.arange(32)).groups
    assert len(np.unique(groups)) > 10
    plain = MixedOrder([np.full(64, 16)] * 2, (1, 1), 3)
    assert len(np.unique(plain.places(np.arange(64)).groups)) == 4


@pytest.mark.parametrize("num_batches", [1, 4])
def test_some_slots_of_all_batches_have_consecutive_rows_of_each_set(num_batches: int) -> None:
    """128 slots of a batch have 120 and 8 rows, or so: row groups of 16 are cut at either end."""
    rows = [np.full(300, 16), np.full(100, 16)]
    order = MixedOrder(rows, (15, 1), 3, ShuffleWindow(1024, num_batches))
    counts = []
    for first in range(0, 1024, 128):
        slots = np.arange(num_batches)[:, None] * 1024 + np.arange(first, first + 128)
        counts.append(len(np.unique(order.places(slots.ravel()).groups)))
    whole = 8 * num_batches
    assert max(counts) <= whole + 2 * 2
    # Of a window's row groups each batch has rows, of as many as there are.
    groups = order.places(np.arange(1024)).groups
    assert len(np.unique(groups)) >= 64 * min(num_batches, 4) * 0.9


def test_sets_that_are_alike_are_not_read_in_step() -> None:
    order = MixedOrder([np.full(64, 1)] * 2, (1, 1), 3)
    groups = order.places(np.arange(64)).groups
    first, second = (groups[groups // 64 == index] % 64 for index in (0, 1))
    assert sorted(first) != sorted(second)


@pytest.mark.parametrize(
    ("window", "expected"), [(None, GOLDEN), (ShuffleWindow(4, 2), GOLDEN_WINDOW)]
)
def test_a_mixed_order_never_changes_between_versions(
    window: ShuffleWindow | None, expected: list[tuple[int, int]]
) -> None:
    """Runs resume by it; these numbers may not change."""
    order = MixedOrder([np.array([4]), np.array([4])], (1, 2), 7, window)
    assert [row[1:] for row in as_rows(order.places(np.arange(8)))] == expected
