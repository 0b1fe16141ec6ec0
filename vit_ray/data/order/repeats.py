"""Images that stand several times in a global batch, each time cut otherwise.

Repeated augmentation (Hoffer et al., arXiv:1901.09335; Berman et al., arXiv:1902.05509), with which
DeiT is trained. Steps and epochs count crops, as there: an epoch of N images trains on N crops, of
N / times images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


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

        First come all images once, then all again, and so on. Each round begins one image later
        than the one before, so that neighbours, which may be mixed, differ from the last round's.
        """
        batches, slots = np.divmod(positions, self.batch_size)
        copies, places = np.divmod(slots, self.draws)
        return batches * self.draws + (places + copies) % self.draws, copies

    def crops_of(self, images: range) -> range:
        """Positions of the batches that have the images at some positions."""
        if not images:
            return range(0)
        first, last = images.start // self.draws, (images.stop - 1) // self.draws
        return range(first * self.batch_size, (last + 1) * self.batch_size)
