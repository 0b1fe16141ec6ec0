import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_ray.data.order import BlockShape, Partition, ShuffleWindow, read_tasks

worlds = st.builds(Partition, st.integers(1, 12), st.integers(1, 10))
shapes = st.builds(
    BlockShape,
    block_rows=st.integers(1, 64),
    task_rows=st.integers(1, 300),
    window_passes=st.integers(1, 40),
    start_pass=st.integers(0, 100),
)


@given(st.integers(1, 6), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), st.integers(1, 4))
def test_every_world_reads_the_same_global_batches(accumulation, world_size, num_steps):
    micro = 24 // world_size
    batch = 24 * accumulation
    partition = Partition(world_size, micro)
    for step in range(num_steps):
        first, last = step * accumulation * micro, (step + 1) * accumulation * micro
        read = [partition.offsets(rank, first, last) for rank in range(world_size)]
        expected = np.arange(step * batch, (step + 1) * batch)
        np.testing.assert_array_equal(np.sort(np.concatenate(read)), expected)


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


@given(worlds, st.integers(1, 200), shapes)
def test_a_task_of_several_blocks_has_only_full_ones(partition, passes, shape):
    rows_per_rank = passes * partition.batch_size_per_rank
    ranks = range(partition.world_size)
    tasks = read_tasks(partition, 0, rows_per_rank, shape, ranks)
    largest = shape.full_passes(partition) * partition.batch_size_per_rank
    for task in tasks:
        assert len(list(task.blocks())) == 1 or task.block_rows == largest


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
