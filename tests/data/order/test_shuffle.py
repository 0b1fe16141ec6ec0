import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_ray.data.order.shuffle import Order

GOLDEN = [6, 3, 5, 4, 6, 3, 4, 5, 1, 0]
row_counts = st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(sum)


@given(row_counts, st.integers(0, 5), st.integers(0, 3))
def test_each_sample_stands_exactly_once_in_every_epoch(
    rows: list[int], seed: int, epoch: int
) -> None:
    order = Order(np.array(rows), seed)
    samples = order.samples_at(epoch * order.num_images, (epoch + 1) * order.num_images)
    assert sorted(samples.tolist()) == list(range(sum(rows)))


@given(row_counts, st.integers(0, 5), st.data())
def test_a_range_is_the_slice_of_any_range_around_it(
    rows: list[int], seed: int, data: st.DataObject
) -> None:
    order = Order(np.array(rows), seed)
    stop = data.draw(st.integers(0, 4 * order.num_images))
    start = data.draw(st.integers(0, stop))
    whole = order.samples_at(0, 4 * order.num_images)
    np.testing.assert_array_equal(order.samples_at(start, stop), whole[start:stop])


@given(row_counts, st.integers(0, 5), st.data())
def test_a_piece_names_the_row_group_and_rows_of_the_sample_at_its_position(
    rows: list[int], seed: int, data: st.DataObject
) -> None:
    order = Order(np.array(rows), seed)
    position = data.draw(st.integers(0, 3 * order.num_images - 1))
    (piece,) = order.pieces(position, position + 1)
    (sample,) = order.samples_at(position, position + 1)
    assert piece.epoch == order.epoch_of(position)
    assert sample == sum(rows[: piece.group]) + piece.rows[0]


def test_rows_of_a_row_group_stand_together_so_that_it_is_read_once() -> None:
    order = Order(np.full(50, 8), seed=1)
    pieces = order.pieces(0, 400)
    assert [len(piece.rows) for piece in pieces] == [8] * 50
    assert len({piece.group for piece in pieces}) == 50


def test_epochs_and_seeds_differ() -> None:
    order = Order(np.full(50, 8), seed=1)
    first, second = order.samples_at(0, 400), order.samples_at(400, 800)
    other = Order(np.full(50, 8), seed=2).samples_at(0, 400)
    assert (first != second).mean() > 0.9
    assert (first != other).mean() > 0.9


@settings(max_examples=5)
@given(st.integers(0, 1000))
def test_the_first_place_is_spread_evenly_over_the_row_groups(seed: int) -> None:
    """Chi-square of the row group that stands first, over 4,000 epochs: 19 degrees of freedom."""
    order = Order(np.full(20, 4), seed)
    samples = [order.samples_at(epoch * 80, epoch * 80 + 1)[0] for epoch in range(4000)]
    counts = np.bincount(np.array(samples) // 4, minlength=20)
    assert ((counts - 200) ** 2 / 200).sum() < 60  # p < 4e-6


def test_an_order_never_changes_between_versions() -> None:
    """Runs resume by this order; these numbers may not change."""
    assert Order(np.array([3, 4, 2, 5]), seed=7).samples_at(10, 20).tolist() == GOLDEN


def test_the_manifest_order_is_kept_when_nothing_is_shuffled() -> None:
    order = Order(np.array([3, 4, 2]), seed=7, is_shuffled=False)
    assert order.samples_at(0, 9).tolist() == list(range(9))


def test_an_empty_selection_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 0 rows"):
        Order(np.array([0, 0]), seed=0)
