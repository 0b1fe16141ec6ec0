"""Random numbers that are a pure function of integer keys (SplitMix64, Steele et al. 2014).

Nothing depends on numpy's generators, whose streams may change between versions: orders and crops
are the same on every worker and after every upgrade.
"""

from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB

# Luby and Rackoff 1988: four rounds make a pseudo-random permutation of random functions.
_FEISTEL_ROUNDS: Final = 4

UInt64Array = NDArray[np.uint64]
Bits = TypeVar("Bits", int, UInt64Array)


def mix(value: Bits) -> Bits:
    """SplitMix64's output function: 64 bits in, 64 well-mixed bits out; of an array, each."""
    mixed: Any = (value + _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK
    return mixed ^ (mixed >> 31)


def key_of(*parts: int) -> int:
    """One 64-bit key from several integers, sensitive to their order."""
    key = 0
    for part in parts:
        key = mix(key ^ (part & _MASK))
    return key


def keys_of(key: int, parts: NDArray[np.integer]) -> UInt64Array:
    """`key_of(*leading, part)` for each of `parts`, given `key = key_of(*leading)`."""
    return mix(np.uint64(key) ^ parts.astype(np.uint64))


class KeyedUniform:
    """The sequence of uniform numbers in [0, 1) of one key."""

    def __init__(self, *parts: int) -> None:
        self._key = key_of(*parts)
        self._drawn = 0

    def draw(self) -> float:
        self._drawn += 1
        return (mix(self._key ^ self._drawn) >> 11) * 2.0**-53

    def between(self, low: float, high: float) -> float:
        """The next number, scaled to [low, high)."""
        return low + (high - low) * self.draw()

    def below(self, bound: int) -> int:
        """The next number as an integer in [0, bound)."""
        return int(self.draw() * bound)


class KeyedUniforms:
    """Many `KeyedUniform` sequences at once, with the same numbers.

    Args:
        first: first part of all keys.
        parts: the further parts: an array with an entry per key, or one number for all keys.
    """

    def __init__(self, first: int, *parts: NDArray[np.integer] | int) -> None:
        keys = np.array([key_of(first)], np.uint64)
        for part in parts:
            keys = mix(keys ^ np.asarray(part).astype(np.uint64))
        self._keys = keys

    def draw(
        self, number: int, which: NDArray[np.intp] | slice = slice(None)
    ) -> NDArray[np.float64]:
        """Number `number`, counted from 1, of each sequence, or of the sequences `which`."""
        mixed = mix(self._keys[which] ^ np.uint64(number))
        return (mixed >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


class KeyedPermutation:
    """A pseudo-random permutation of [0, size), computed without storing it.

    A Feistel network over the next power of four, applied again until the value is below `size`.
    """

    def __init__(self, size: int, *key: int) -> None:
        self._size = size
        self._half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._keys = [key_of(*key, i) for i in range(_FEISTEL_ROUNDS)]

    def ranks(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The permuted value of each value: int64, same shape."""
        bits, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        ranks, is_outside = values.astype(np.uint64), np.ones(values.shape, bool)
        while is_outside.any():
            high, low = ranks[is_outside] >> bits, ranks[is_outside] & mask
            for key in self._keys:
                high, low = low, high ^ (keys_of(key, low) & mask)
            ranks[is_outside] = (high << bits) | low
            is_outside = ranks >= self._size
        return ranks.astype(np.int64)
