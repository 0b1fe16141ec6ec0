"""A hash of what an image shows, and an index that finds close hashes in constant time.

The hash is 128 bits: signs of the lowest frequencies of the luminance (a cosine transform of 32 x
32 pixels) against their median, as in pHash. Re-encoding and resizing flip few bits.

The index cuts a hash into 8 bands of 16 bits, and looks for hashes that share a band, or all but
one bit of it. Of hashes that differ in at most 15 bits, one band differs in at most one bit.
"""

from typing import Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

_THUMBNAIL: Final = 32
HASH_BITS: Final = 128
_ORDER: Final = sorted((i + j, i, j) for i in range(_THUMBNAIL) for j in range(_THUMBNAIL))
_ROWS, _COLUMNS = np.array([(i, j) for _, i, j in _ORDER[1 : HASH_BITS + 1]]).T
"""The lowest frequencies without the constant."""

_FLAT_BELOW: Final = 4.0
"""Standard deviation in grey levels below which the signs of frequencies are noise."""

_BAND_ORDER: Final = np.random.default_rng(0).permutation(HASH_BITS)
"""Neighbouring frequencies are alike, and would make bands that many hashes share."""
_PROBES: Final = np.array([0, *(1 << bit for bit in range(16))], np.uint16)
_MOST_IN_A_BAND: Final = 1024
"""Most hashes per band that are compared: it limits the cost if many images are alike."""


def perceptual_hash(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Hash of an RGB image: 16 bytes, uint8 (16,)."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(grey, (_THUMBNAIL, _THUMBNAIL), interpolation=cv2.INTER_AREA)
    frequencies = cv2.dct(small.astype(np.float32))[_ROWS, _COLUMNS]
    return np.packbits(frequencies > np.median(frequencies))


def is_flat(pixels: NDArray[np.uint8]) -> bool:
    """Whether an RGB image has nothing to hash: a single colour, or nearly."""
    return bool(pixels.reshape(-1, 3).std(axis=0).max() < _FLAT_BELOW)


class Nearest(NamedTuple):
    """The closest of the hashes, and how many bits differ."""

    entry: int
    distance: int


class HashIndex:
    """Finds the closest of many hashes.

    Args:
        hashes: uint8 (N, 16).
    """

    def __init__(self, hashes: NDArray[np.uint8]) -> None:
        self._hashes = hashes
        bands = _bands(hashes)
        self._order = np.argsort(bands, axis=0, kind="stable").astype(np.int32)
        self._sorted = np.take_along_axis(bands, self._order, axis=0)

    def nearest(self, queries: NDArray[np.uint8], most: int) -> list[Nearest | None]:
        """For each query (M, 16), the closest hash that differs in at most `most` bits (15)."""
        size = max(1, len(self._hashes))
        best = np.full(len(queries), (most + 1) * size, np.int64)  # distance, then entry
        for band, values in enumerate(_bands(queries).T):
            for probe in _PROBES:
                query, entry = self._candidates(values ^ probe, band)
                bits = np.bitwise_count(self._hashes[entry] ^ queries[query]).sum(axis=1)
                np.minimum.at(best, query, bits.astype(np.int64) * size + entry)
        pairs = zip((best % size).tolist(), (best // size).tolist(), strict=True)
        return [Nearest(*pair) if pair[1] <= most else None for pair in pairs]

    def _candidates(
        self, values: NDArray[np.uint16], band: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(query, hash) for every hash whose band has the query's value."""
        first = np.searchsorted(self._sorted[:, band], values, side="left")
        counts = np.searchsorted(self._sorted[:, band], values, side="right") - first
        counts = np.minimum(counts, _MOST_IN_A_BAND)
        query = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
        return query, self._order[np.repeat(first, counts) + within, band].astype(np.int64)


def _bands(hashes: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """The hashes as numbers of 16 bits: (N, 8)."""
    dealt = np.packbits(np.unpackbits(hashes, axis=1)[:, _BAND_ORDER], axis=1)
    return np.ascontiguousarray(dealt).view(np.uint16)
