"""The order of a run's samples, and which rank gets which of them in which block: arithmetic only.

The order is a pure function of row counts, seed, epoch and position. Positions count from 0 over
all epochs joined end to end, so position `p` lies in epoch `p // num_images`. In each epoch the row
groups are permuted, and the rows inside each row group. The rows of each shuffle window of some
global batches are then dealt to these batches in turn, so that rows of a row group land in
different batches, while a task that reads a whole window still reads each row group once. Nothing
is stored per row: an epoch of 1.2 million row groups is two arrays of that length, which a stream
server draws once for all reading tasks (`Order.drawn`).

Batch `q` of rank `r` among `n` ranks holds the `m` positions from `start + (q * n + r) * m`; in
training it is the rank's share of global batch `q`, which the engine cuts into micro-batches. So a
global batch is a range of consecutive positions, the same for every world size. A block holds
consecutive rows of one rank, and each rank's blocks come in the order of its rows.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.keyed_random import key_of, keys_of

Int64Array = NDArray[np.int64]
# Parts of the keys that order row groups, and rows inside a row group.
_GROUPS, _ROWS = 1, 2


@dataclass(frozen=True)
class ShuffleWindow:
    """Consecutive global batches, counted from the start of the run, that share their rows."""

    batch_size: int
    num_batches: int

    @property
    def num_rows(self) -> int:
        return self.batch_size * self.num_batches

    def undealt(self, positions: Int64Array, num_images: int) -> Int64Array:
        """Position, before the dealing, of the row at each position: int64, same shape.

        A window in which an epoch ends is dealt in two parts, so that no epoch gets rows of
        another. In each part, the first rows go to the first slot of each batch in turn, the next
        rows to the second slot, and so on. A batch that belongs to both parts has, in each part,
        only the slots of that part.
        """
        epoch_starts = positions // num_images * num_images
        window_starts = positions // self.num_rows * self.num_rows
        start = np.maximum(epoch_starts, window_starts)
        last = np.minimum(epoch_starts + num_images, window_starts + self.num_rows) - 1
        batch, slot = np.divmod(positions, self.batch_size)
        first_batch, first_slot = np.divmod(start, self.batch_size)
        last_batch, last_slot = np.divmod(last, self.batch_size)
        whole_batches = last_batch - first_batch - 1
        earlier_slots = (
            whole_batches * slot
            + np.maximum(slot - first_slot, 0)
            + np.minimum(slot, last_slot + 1)
        )
        same_slot = np.where(batch > first_batch, batch - first_batch - 1 + (slot >= first_slot), 0)
        dealt = start + earlier_slots + same_slot
        return np.where(whole_batches < 0, positions, dealt)


class Order:
    """The order in which a run with `seed` reads a data set.

    Args:
        manifest_rows: rows per row group, in the order of the manifest.
        is_shuffled: False keeps the order of the manifest, for evaluation.
        window: None reads the row groups one after the other.

    Raises:
        ValueError: there are no rows.
    """

    def __init__(
        self,
        manifest_rows: NDArray[np.integer],
        seed: int,
        is_shuffled: bool = True,
        window: ShuffleWindow | None = None,
    ) -> None:
        self.rows = manifest_rows
        self.num_images = int(manifest_rows.sum(dtype=np.int64))
        self.seed = seed
        self.is_shuffled = is_shuffled
        self.window = window
        if self.num_images == 0:
            raise ValueError("order: the selection holds 0 rows; choose a data set with images")
        # The result of `draw`; a reading task replaces this by a fetch from the stream server.
        self.drawn: Callable[[int], Int64Array] = self.draw
        self._groups_of = lru_cache(maxsize=2)(lambda epoch: self.drawn(epoch))
        self._rows_of = lru_cache(maxsize=4096)(self._permute_rows)

    def places(self, positions: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Epoch, row group and row inside the row group of each position.

        Rows that are dropped do not count; `Manifest.samples_at` gives the samples' numbers.
        """
        if self.window is not None:
            positions = self.window.undealt(positions, self.num_images)
        epochs, offsets = np.divmod(positions, self.num_images)
        groups, rows = np.empty_like(offsets), np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            order, starts = self._groups_of(epoch)
            turns = np.searchsorted(starts, offsets[in_epoch], side="right") - 1
            groups[in_epoch] = order[turns]
            rows[in_epoch] = offsets[in_epoch] - starts[turns]
        if self.is_shuffled and len(groups):
            by_group = np.lexsort((groups, epochs))
            is_new = (np.diff(groups[by_group]) != 0) | (np.diff(epochs[by_group]) != 0)
            for in_group in np.split(by_group, np.flatnonzero(is_new) + 1):
                permuted = self._rows_of(int(epochs[in_group[0]]), int(groups[in_group[0]]))
                rows[in_group] = permuted[rows[in_group]]
        return epochs, groups, rows

    def _permute_rows(self, epoch: int, group: int) -> Int64Array:
        rows = np.arange(self.rows[group], dtype=np.int64)
        keys = keys_of(key_of(self.seed, _ROWS, epoch, group), rows)
        return rows[np.argsort(keys, kind="stable")]

    def draw(self, epoch: int) -> Int64Array:
        """Row groups of an epoch in order, and the offset of each in the epoch: int64 (2, groups).

        Row groups without rows are left out: most are empty in a small part of a large data set.
        """
        groups = np.flatnonzero(self.rows)
        if self.is_shuffled:
            keys = keys_of(key_of(self.seed, _GROUPS, epoch), groups)
            groups = groups[np.argsort(keys, kind="stable")]
        sizes = self.rows[groups]
        return np.stack([groups, np.cumsum(sizes, dtype=np.int64) - sizes])


@dataclass(frozen=True)
class Partition:
    """How many ranks read, and how many rows each takes at once."""

    world_size: int
    batch_size_per_rank: int

    @property
    def rows_per_pass(self) -> int:
        """Rows that all ranks take together at once: in training, a global batch."""
        return self.world_size * self.batch_size_per_rank

    def offsets(self, rank: int, first: int, last: int) -> Int64Array:
        """Positions, relative to the start, of rows [first, last) of a rank: int64."""
        rows = np.arange(first, last, dtype=np.int64)
        passes, within = np.divmod(rows, self.batch_size_per_rank)
        return (passes * self.world_size + rank) * self.batch_size_per_rank + within


@dataclass(frozen=True)
class BlockTask:
    """The blocks that one task makes: in each of `rounds`, one block for each of `of_ranks`.

    In round `k`, the block of a rank holds the rank's rows from `first + k * block_rows`.
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
        for number in range(self.rounds):
            first = self.first + number * self.block_rows
            for rank in self.of_ranks:
                yield rank, first, first + self.block_rows


@dataclass(frozen=True)
class BlockShape:
    """How rows are cut into blocks and tasks.

    Tasks take whole shuffle windows where they can, since a window's row groups are read by every
    task that has a part of it.

    Attributes:
        block_rows: approximate rows of a block, which is a number of whole batches of a rank.
        task_rows: approximate rows of a task; at least a rank's rows of a shuffle window.
        window_passes: batches of a rank in a shuffle window; 1 without a window.
        start_pass: batches of a rank before the first of these rows.
    """

    block_rows: int
    task_rows: int
    window_passes: int = 1
    start_pass: int = 0

    def full_passes(self, partition: Partition) -> int:
        """Passes of a full block: whole windows, or an even part of one."""
        max_passes = max(1, self.block_rows // partition.batch_size_per_rank)
        if self.window_passes <= max_passes:
            return max_passes // self.window_passes * self.window_passes
        return max(n for n in range(1, max_passes + 1) if self.window_passes % n == 0)


def read_tasks(
    partition: Partition, first: int, last: int, shape: BlockShape, ranks: range
) -> Iterator[BlockTask]:
    """Cut rows [first, last) of some consecutive ranks into tasks.

    Block sizes start at one batch of a rank and double up to full size, so that the first does not
    wait for a large block; the rows after the last full block are one block for each rank. Only
    tasks of full-size blocks make more than one block. Such a task makes whole shuffle windows for
    some consecutive ranks, whose rows of a window are consecutive in the order: it reads whole row
    groups, except at its two ends.
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
            rounds_of_window = (shape.start_pass + done) % shape.window_passes // full
            rounds = min(task_rounds - rounds_of_window, (passes - done) // full)
            size, num_ranks = full, ranks_per_task
        else:
            size, rounds, num_ranks = min(doubled, full, passes - done), 1, 1
            if past:
                size = min(size, even - past)
            elif size > even:
                size -= size % even
            doubled *= 2
        for start in range(ranks.start, ranks.stop, num_ranks):
            of_ranks = range(start, min(start + num_ranks, ranks.stop))
            yield BlockTask(done * micro, size * micro, rounds, of_ranks)
        done += size * rounds


def divisors(count: int) -> list[int]:
    """All divisors of a positive number, in ascending order."""
    low = {n for n in range(1, math.isqrt(count) + 1) if count % n == 0}
    return sorted(low | {count // n for n in low})
