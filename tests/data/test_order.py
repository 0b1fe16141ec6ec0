"""The order of a run, and how ranks and reading tasks share it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.small_sets import samples_at
from vit_ray.data.order import BlockShape, Order, Partition, ShuffleWindow, read_tasks

GOLDEN = [6, 3, 5, 4, 6, 3, 4, 5, 1, 0]
GOLDEN_DEALT = [8, 5, 6, 4, 6, 3, 4, 2, 5, 8]

orders = st.builds(
    lambda rows, seed, window: Order(np.array(rows), seed, window=window),
    st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(sum),
    st.integers(0, 5),
    st.none() | st.builds(ShuffleWindow, st.integers(1, 9), st.integers(1, 5)),
)
worlds = st.builds(Partition, st.integers(1, 12), st.integers(1, 10))
shapes = st.builds(
    BlockShape,
    block_rows=st.integers(1, 64),
    task_rows=st.integers(1, 300),
    window_passes=st.integers(1, 40),
    start_pass=st.integers(0, 100),
)


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


@given(orders, st.integers(0, 3), st.data())
def test_each_sample_stands_once_in_every_epoch_and_ranges_agree_with_the_whole(order, epoch, data):
    whole = samples_at(order, 0, 4 * order.num_images)
    of_epoch = whole[epoch * order.num_images : (epoch + 1) * order.num_images]
    assert sorted(of_epoch.tolist()) == list(range(order.num_images))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    np.testing.assert_array_equal(samples_at(order, start, stop), whole[start:stop])
    positions = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=9)), np.int64)
    epochs, groups, rows = order.places(positions)
    np.testing.assert_array_equal(epochs, positions // order.num_images)
    firsts = np.cumsum([0, *order.rows])
    np.testing.assert_array_equal(firsts[groups] + rows, whole[positions])


def test_rows_that_stood_together_are_dealt_to_the_batches_in_turn():
    """Two batches of 3 in an epoch of 11: two windows, the second cut where the epoch ends."""
    undealt = ShuffleWindow(3, 2).undealt(np.arange(14), 11)
    assert undealt.tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11, 12, 14]


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


def test_ranks_take_the_parts_of_a_pass_in_their_order():
    """Counted by hand: two ranks with micro-batches of three, two of which make a global batch."""
    partition = Partition(2, 3)
    assert partition.offsets(0, 0, 6).tolist() == [0, 1, 2, 6, 7, 8]
    assert partition.offsets(1, 0, 6).tolist() == [3, 4, 5, 9, 10, 11]
    assert partition.offsets(1, 4, 8).tolist() == [10, 11, 15, 16]


@settings(max_examples=200)
@given(worlds, st.integers(1, 200), shapes, st.data())
def test_each_rank_of_a_host_gets_its_rows_in_order(partition, passes, shape, data):
    rows_per_rank = passes * partition.batch_size_per_rank
    first_rank = data.draw(st.integers(0, partition.world_size - 1))
    ranks = range(first_rank, data.draw(st.integers(first_rank + 1, partition.world_size)))
    received: dict[int, list[int]] = {rank: [] for rank in ranks}
    for task in read_tasks(partition, 0, rows_per_rank, shape, ranks):
        blocks = list(task.blocks())
        assert [rank for rank, _, _ in blocks] == task.ranks
        for rank, first, last in blocks:
            assert first % partition.batch_size_per_rank == 0
            assert last % partition.batch_size_per_rank == 0
            received[rank] += range(first, last)
    assert received == {rank: list(range(rows_per_rank)) for rank in ranks}


def test_the_first_blocks_are_small_and_double():
    tasks = read_tasks(Partition(2, 16), 0, 4096, BlockShape(128, 1024), range(2))
    found = [task.block_rows for task in itertools.islice(tasks, 8)]
    assert found == [16, 16, 32, 32, 64, 64, 128, 128]


@pytest.mark.parametrize(("world_size", "most"), [(1, 1.1), (2, 1.1), (8, 1.2), (64, 1.5)])
@pytest.mark.parametrize("batch", [64, 128, 512, 1024])
@pytest.mark.parametrize("start_pass", [0, 5])
def test_tasks_read_the_row_groups_of_a_window_about_once(world_size, most, batch, start_pass):
    """Rows of row groups read for each row made, the row groups of 64 not even with the windows."""
    window = ShuffleWindow(batch, 2048 // batch)
    partition = Partition(world_size, batch // world_size)
    shape = BlockShape(128, window.num_rows, window.num_batches, start_pass)
    passes = 64 * window.num_batches
    read = 0
    last = passes * partition.batch_size_per_rank
    for task in read_tasks(partition, 0, last, shape, range(world_size)):
        blocks = [partition.offsets(*block) for block in task.blocks()]
        positions = start_pass * batch + np.concatenate(blocks)
        read += 64 * len(np.unique((window.undealt(positions, 10**9) + 23) // 64))
    assert read < most * passes * batch
