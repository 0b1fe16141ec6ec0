"""Who reads which positions, and in which blocks they travel: arithmetic only.

Micro-batch `q` of rank `r` among `n` ranks holds the `m` positions from `start + (q * n + r) * m`.
So the global batch of `accumulation_steps` micro-batches per rank is one run of consecutive
positions, the same for every world size. A block holds consecutive rows of one rank; blocks are
ordered so that block `j` belongs to rank `j mod n`, and the `n` blocks of a round are equally long.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """How many ranks read, and how many rows each takes at a time."""

    world_size: int
    batch_size_per_rank: int

    @property
    def rows_per_pass(self) -> int:
        """Rows that all ranks take together in one forward pass."""
        return self.world_size * self.batch_size_per_rank

    def offsets(self, rank: int, first: int, last: int) -> Int64Array:
        """Positions, relative to the start, of rows [first, last) of a rank: int64."""
        rows = np.arange(first, last, dtype=np.int64)
        passes, within = np.divmod(rows, self.batch_size_per_rank)
        return (passes * self.world_size + rank) * self.batch_size_per_rank + within


@dataclass(frozen=True)
class BlockTask:
    """Some blocks that one task makes, one after the other.

    Block `k` of rank `r` holds rows `first + k * block_rows` and following of that rank.
    """

    first: int
    block_rows: int
    rounds: int
    rank_start: int
    rank_stop: int

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(rank, first row, row after the last) of each block, in the order of delivery."""
        for turn in range(self.rounds):
            first = self.first + turn * self.block_rows
            for rank in range(self.rank_start, self.rank_stop):
                yield rank, first, first + self.block_rows


def full_block_rows(partition: Partition, block_rows: int) -> int:
    """Rows of a full block: whole micro-batches, about `block_rows`."""
    return max(1, block_rows // partition.batch_size_per_rank) * partition.batch_size_per_rank


def plan_segments(
    partition: Partition, rows_per_rank: int, *, task_rows: int, first_tasks: int, later_tasks: int
) -> list[tuple[int, int]]:
    """Row ranges, the same for every rank, that are planned one after the other.

    Planning costs time and memory per task, so a long run is not planned at once; the first segment
    is short, for an early first batch.
    """
    bounds = []
    first, tasks = 0, first_tasks
    while first < rows_per_rank:
        passes = max(1, tasks * task_rows // partition.rows_per_pass)
        last = min(rows_per_rank, first + passes * partition.batch_size_per_rank)
        bounds.append((first, last))
        first, tasks = last, later_tasks
    return bounds


def read_tasks(
    partition: Partition, first: int, last: int, *, block_rows: int, task_rows: int
) -> list[BlockTask]:
    """Cut rows [first, last) of all ranks into tasks.

    Blocks start at one micro-batch and double up to `block_rows`, so that the first batch does not
    wait for a large block; what is left at the end is one block a rank. Only tasks of full-sized
    blocks make more than one block.
    """
    full = full_block_rows(partition, block_rows)
    tasks: list[BlockTask] = []
    size = partition.batch_size_per_rank
    while first < last:
        size = min(size, full)
        if size == full and last - first >= full:
            rounds = (last - first) // full
            tasks += _full_tasks(partition.world_size, first, full, rounds, task_rows)
            first += rounds * full
            continue
        size = min(size, last - first)
        tasks += [BlockTask(first, size, 1, rank, rank + 1) for rank in range(partition.world_size)]
        first, size = first + size, size * 2
    return tasks


def _full_tasks(
    world_size: int, first: int, block_rows: int, rounds: int, task_rows: int
) -> Iterator[BlockTask]:
    blocks_per_task = max(1, task_rows // block_rows)
    if blocks_per_task < world_size:
        for turn in range(rounds):
            for rank in range(0, world_size, blocks_per_task):
                rank_stop = min(rank + blocks_per_task, world_size)
                yield BlockTask(first + turn * block_rows, block_rows, 1, rank, rank_stop)
        return
    rounds_per_task = blocks_per_task // world_size
    for turn in range(0, rounds, rounds_per_task):
        count = min(rounds_per_task, rounds - turn)
        yield BlockTask(first + turn * block_rows, block_rows, count, 0, world_size)
