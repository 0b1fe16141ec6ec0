"""A batch of pixels as the one row of a block, and back.

Ray Data joins small blocks and splits large ones, by whole rows, with limits that depend on
estimates. A block of one row is passed on unchanged.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from ray.data.block import Block, BlockAccessor

from vit_ray.data.stream.batches import Batch


def as_one_row(batch: Batch) -> Block:
    """Columns (b, ...) as a block with columns (1, b, ...)."""
    return BlockAccessor.batch_to_block({k: column[np.newaxis] for k, column in batch.items()})


def cut(blocks: Iterable[Block], batch_size: int) -> Iterator[Batch]:
    """Batches of `batch_size` from blocks of one row, as views; do not write to them.

    Raises:
        RuntimeError: a block is not a whole number of batches: the data are not in the planned
            order.
    """
    for block in blocks:
        columns = BlockAccessor.for_block(block).to_batch_format("numpy")
        sizes = [column.shape[:2] for column in columns.values()]
        rows, count = sizes[0]
        if rows != 1 or set(sizes) != {(1, count)} or count % batch_size:
            raise RuntimeError(
                f"a block has {sizes}, not one row of a multiple of {batch_size} images"
            )
        for first in range(0, count, batch_size):
            yield {k: column[0, first : first + batch_size] for k, column in columns.items()}
