"""Who reads which positions, and in which blocks they travel: arithmetic only.

Micro-batch `q` of rank `r` among `n` ranks holds the `m` positions from `start + (q * n + r) * m`.
So the global batch of `accumulation_steps` micro-batches per rank is one run of consecutive
positions, the same for every world size. A block holds consecutive rows of one rank, and each
rank's blocks come in the order of its rows.
"""

import math
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

    Block `k` of each rank holds rows `first + k * block_rows` and following of that rank.
    """

    first: int
    block_rows: int
    rounds: int
    of_ranks: range

    @property
    def ranks(self) -> list[int]:
        """The rank of each block, in the order of delivery."""
        return [*self.of_ranks] * self.rounds

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(rank, first row, row after the last) of each block, in the order of delivery."""
        for place in range(self.rounds * len(self.of_ranks)):
            turn, index = divmod(place, len(self.of_ranks))
            first = self.first + turn * self.block_rows
            yield self.of_ranks[index], first, first + self.block_rows


@dataclass(frozen=True)
class BlockShape:
    """How rows are cut into blocks and tasks.

    Tasks take whole shuffle windows where they can, since a window's row groups are read by every
    task that has a part of it.

    Attributes:
        block_rows: rows of a block, about; whole micro-batches are taken.
        task_rows: rows of a task, about; one with a window has all of its rank's part.
        window_passes: passes of all ranks that make a shuffle window; 1 where there is none.
        start_pass: passes of the run before the first one here.
    """

    block_rows: int
    task_rows: int
    window_passes: int = 1
    start_pass: int = 0

    def full_passes(self, partition: Partition) -> int:
        """Passes of a full block: whole windows, or an even part of one."""
        most = max(1, self.block_rows // partition.batch_size_per_rank)
        if self.window_passes <= most:
            return most // self.window_passes * self.window_passes
        return max(n for n in range(1, most + 1) if self.window_passes % n == 0)


def read_tasks(
    partition: Partition, first: int, last: int, shape: BlockShape, ranks: range
) -> Iterator[BlockTask]:
    """Cut rows [first, last) of some consecutive ranks into tasks.

    Blocks start at one micro-batch and double up to a full one, so that the first batch does not
    wait for a large block; what is left at the end is one block a rank. Only tasks of full-sized
    blocks make more than one block. A task of those has whole windows of its ranks, whose rows of a
    window lie side by side in the order: so it reads whole row groups, but for those at its ends.
    """
    micro, full = partition.batch_size_per_rank, shape.full_passes(partition)
    even = min(full, shape.window_passes)
    window_rounds = max(1, shape.window_passes // full)
    task_rounds = max(1, shape.task_rows // (full * micro))
    ranks_per_task = max(1, task_rounds // window_rounds)
    task_rounds = max(1, ranks_per_task // len(ranks)) * window_rounds
    done, passes, doubled = first // micro, last // micro, 1
    while done < passes:
        past = (shape.start_pass + done) % even
        if doubled >= full and not past and passes - done >= full:
            into_window = (shape.start_pass + done) % shape.window_passes // full
            size = full
            rounds = min(task_rounds - into_window, (passes - done) // full)
            shared = ranks_per_task
        else:
            size, rounds, shared = min(doubled, full, passes - done), 1, 1
            if past:
                size = min(size, even - past)
            elif size > even:
                size -= size % even
            doubled *= 2
        for start in range(ranks.start, ranks.stop, shared):
            of_ranks = range(start, min(start + shared, ranks.stop))
            yield BlockTask(done * micro, size * micro, rounds, of_ranks)
        done += size * rounds


def divisors(count: int) -> list[int]:
    """All divisors of a positive number, in ascending order."""
    low = {one for one in range(1, math.isqrt(count) + 1) if count % one == 0}
    return sorted(low | {count // one for one in low})
