"""Images that stand several times in a global batch, each time cut otherwise.

Repeated augmentation (Hoffer et al., arXiv:1901.09335; Berman et al., arXiv:1902.05509), with which
DeiT is trained. Steps and epochs count crops, as there: an epoch of N images trains on N crops, of
N / times images.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


_MOST_IN_TURN: Final = 64


@dataclass(frozen=True)
class Repeats:
    """How often an image stands in each global batch."""

    batch_size: int
    times: int

    @property
    def draws(self) -> int:
        """Different images of a batch; of some the last copy is left out where it does not fit."""
        return -(-self.batch_size // self.times)

    def drawn(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """For positions in crops, the positions in images, and which copy each is: from 0 on.

        First come all images once, then all again, and so on. So that neighbours, which may be
        mixed, differ from round to round, round k takes each (2 k + 1)-th image of a block in turn;
        blocks are short, so that a reader's images still lie side by side in the order.
        """
        batches, slots = np.divmod(positions, self.batch_size)
        copies, places = np.divmod(slots, self.draws)
        size = min(_MOST_IN_TURN, 1 << self.draws.bit_length() - 1)
        blocks, within = np.divmod(places, size)
        in_turn = blocks * size + within * (2 * copies + 1) % size  # a permutation: size is even
        is_whole = (blocks + 1) * size <= self.draws
        return batches * self.draws + np.where(is_whole, in_turn, places), copies

    def crops_of(self, images: range) -> range:
        """Positions of the batches that have the images at some positions."""
        if not images:
            return range(0)
        first, last = images.start // self.draws, (images.stop - 1) // self.draws
        return range(first * self.batch_size, (last + 1) * self.batch_size)
