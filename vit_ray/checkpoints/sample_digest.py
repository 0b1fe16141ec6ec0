"""A digest of which sample stood at which place of which step, the same on any number of ranks.

It is a sum of hashes, so that the digests of ranks, and of steps, add up in any order.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_PARTS: Final = (0, 16, 32, 48)
_BITS: Final = 64


def samples_digest(first_place: int, samples: NDArray[np.int64]) -> int:
    """Of consecutive samples, 64 bits.

    Args:
        first_place: step x global batch size + place in the batch, of the first.
    """
    places = np.arange(first_place, first_place + len(samples), dtype=np.uint64)
    return int(_mix(_mix(places) ^ samples.astype(np.uint64)).sum(dtype=np.uint64))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele et al. 2014): any two inputs have unlike outputs."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def add_digests(*digests: int) -> int:
    """The digest of the samples of all of them."""
    return sum(digests) % (1 << _BITS)


def to_floats(digest: int) -> list[float]:
    """Parts of 16 bits, whose sums over up to 2^37 ranks are exact in float64."""
    return [float(digest >> shift & 0xFFFF) for shift in _PARTS]


def of_floats(sums: list[float]) -> int:
    """The digest from its parts, or from sums of the parts of several ranks."""
    return add_digests(*(int(part) << shift for part, shift in zip(sums, _PARTS, strict=True)))
