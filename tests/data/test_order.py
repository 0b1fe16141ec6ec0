import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.small_sets import samples_at
from vit_ray.data.order import Order, ShuffleWindow

GOLDEN = [6, 3, 5, 4, 6, 3, 4, 5, 1, 0]
GOLDEN_DEALT = [8, 5, 6, 4, 6, 3, 4, 2, 5, 8]


orders = st.builds(
    lambda rows, seed, window: Order(np.array(rows), seed, window=window),
    st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(sum),
    st.integers(0, 5),
    st.none() | st.builds(ShuffleWindow, st.integers(1, 9), st.integers(1, 5)),
)


@given(orders, st.integers(0, 3))
def test_each_sample_stands_exactly_once_in_every_epoch(order, epoch):
    samples = samples_at(order, epoch * order.num_images, (epoch + 1) * order.num_images)
    assert sorted(samples.tolist()) == list(range(order.num_images))


@given(orders, st.data())
def test_ranges_and_places_agree_with_the_range_that_holds_them(order, data):
    whole = samples_at(order, 0, 4 * order.num_images)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    np.testing.assert_array_equal(samples_at(order, start, stop), whole[start:stop])
    positions = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=9)), np.int64)
    places = order.places(positions)
    np.testing.assert_array_equal(places.epochs, positions // order.num_images)
    firsts = np.cumsum([0, *order.rows])
    samples = [firsts[g] + r for g, r in zip(places.groups, places.rows, strict=True)]
    assert samples == whole[positions].tolist()


def test_without_a_window_rows_of_a_row_group_stand_together():
    groups = Order(np.full(50, 8), seed=1).places(np.arange(400)).groups
    assert np.count_nonzero(np.diff(groups)) == 49


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 200))
def test_dealing_moves_rows_within_a_window_and_an_epoch_only(batch_size, num_batches, num_images):
    window = ShuffleWindow(batch_size, num_batches)
    positions = np.arange(3 * num_images)
    undealt = window.undealt(positions, num_images)
    assert sorted(undealt.tolist()) == positions.tolist()
    for unit in (num_images, window.num_rows):
        np.testing.assert_array_equal(undealt // unit, positions // unit)


def test_rows_that_stood_together_are_dealt_to_the_batches_in_turn():
    """Two batches of 3 in an epoch of 11: two windows, the second cut where the epoch ends."""
    undealt = ShuffleWindow(3, 2).undealt(np.arange(14), 11)
    assert undealt.tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11, 12, 14]


def share_that_meets_again(order: Order, batch_size: int) -> float:
    """Of the pairs in a batch of the first epoch, how many share one of the second."""
    epochs = samples_at(order, 0, 2 * order.num_images).reshape(2, -1, batch_size)
    batch_of = np.empty(order.num_images, int)
    batch_of[epochs[1]] = np.arange(epochs.shape[1])[:, None]
    after = batch_of[epochs[0]]
    same = (after[:, :, None] == after[:, None, :]).sum() - after.size
    return float(same) / (after.size * (batch_size - 1))


@pytest.mark.parametrize("num_batches", [4, 16])
def test_images_meet_others_in_the_next_epoch(num_batches):
    """100 batches of one row group each: all meet again without a window, few with one."""
    rows = np.full(128, 64)
    assert share_that_meets_again(Order(rows, seed=3), 64) == 1.0
    order = Order(rows, seed=3, window=ShuffleWindow(64, num_batches))
    chance = 63 / (128 * 64 - 1)
    # A pair of one row group, 1 in num_batches of all pairs, meets again in 1 of num_batches.
    assert share_that_meets_again(order, 64) < 1.2 * (chance + 1 / num_batches**2)


@pytest.mark.parametrize(("rows", "times"), [(16, 2.1), (32, 3.4), (64, 5.8)])
def test_small_row_groups_let_images_of_large_batches_meet_others(rows, times):
    """Pairs of a batch of 4,096 of ImageNet that meet again in the next epoch, against chance."""
    order = Order(np.full(1_281_167 // rows, rows), seed=0)
    batch_of = np.empty((2, order.num_images // rows), np.int64)
    for epoch in range(2):
        groups, starts = order.draw(epoch)
        batch_of[epoch, groups] = starts // 4096  # whole row groups, but for one of each batch
    _, groups_of_pair = np.unique(batch_of, axis=1, return_counts=True)
    images = groups_of_pair * rows
    pairs = (images * (images - 1)).sum() / (order.num_images * 4095)
    chance = 4095 / (order.num_images - 1)
    assert pairs / chance == pytest.approx(times, abs=0.05)


def test_epochs_and_seeds_differ():
    order = Order(np.full(50, 8), seed=1)
    first, second = samples_at(order, 0, 400), samples_at(order, 400, 800)
    other = samples_at(Order(np.full(50, 8), seed=2), 0, 400)
    assert (first != second).mean() > 0.9
    assert (first != other).mean() > 0.9


@settings(max_examples=5)
@given(st.integers(0, 1000))
def test_the_first_place_is_spread_evenly_over_the_row_groups(seed):
    """Chi-square of the row group that stands first, over 4,000 epochs: 19 degrees of freedom."""
    order = Order(np.full(20, 4), seed)
    firsts = order.places(np.arange(4000) * 80).groups
    counts = np.bincount(firsts, minlength=20)
    assert ((counts - 200) ** 2 / 200).sum() < 60  # p < 4e-6


def test_an_order_never_changes_between_versions():
    """Runs resume by this order; these numbers may not change."""
    rows = np.array([3, 4, 2, 5])
    assert samples_at(Order(rows, seed=7), 10, 20).tolist() == GOLDEN
    dealt = Order(rows, seed=7, window=ShuffleWindow(2, 4))
    assert samples_at(dealt, 10, 20).tolist() == GOLDEN_DEALT
    unshuffled = Order(np.array([3, 4, 2]), seed=7, is_shuffled=False)
    assert samples_at(unshuffled, 0, 9).tolist() == list(range(9))
    with pytest.raises(ValueError, match="holds 0 rows"):
        Order(np.array([0, 0]), seed=0)
