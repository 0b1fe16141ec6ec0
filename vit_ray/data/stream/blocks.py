"""A batch of pixels as the one row of a block, and back.

Ray Data joins small blocks and slices large ones, by whole rows, and what it takes for small
depends on estimates. A block of one row it emits as it is.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from ray.data.block import Block, BlockAccessor

from vit_ray.data.stream.batches import Batch


def as_one_row(batch: Batch) -> Block:
    """Columns (b, ...) as a block with columns (1, b, ...)."""
    return BlockAccessor.batch_to_block({k: column[np.newaxis] for k, column in batch.items()})


def cut(blocks: Iterable[Block], batch_size: int) -> Iterator[Batch]:
    """Batches of `batch_size` from blocks of one row, as views; not to be written to.

    Raises:
        RuntimeError: if a block is no whole number of batches: what has come is not the order.
    """
    for block in blocks:
        columns = BlockAccessor.for_block(block).to_batch_format("numpy")
        sizes = [column.shape[:2] for column in columns.values()]
        rows, count = sizes[0]
        if rows != 1 or set(sizes) != {(1, count)} or count % batch_size:
            raise RuntimeError(
                f"a block of {sizes} has come, not one row of a multiple of {batch_size} images"
            )
        for first in range(0, count, batch_size):
            yield {k: column[0, first : first + batch_size] for k, column in columns.items()}
