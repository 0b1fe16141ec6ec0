"""A hash of what an image shows, and an index that finds near hashes in constant time.

The hash is 256 bits: signs of the low frequencies of the luminance (the 16 x 16 corner of a cosine
transform of 32 x 32 pixels) against their median, as in pHash. Re-encoding and resizing flip few
bits; cropping flips more, so that an indexed image is hashed under several crops too.

The index cuts a hash into 16 bands of 16 bits and looks for hashes that share a band: two hashes
that differ in d of 256 bits share one with probability 1 - (1 - (1 - d/256)^16)^16.
"""

from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

_THUMBNAIL: Final = 32
_FREQUENCIES: Final = 16
HASH_BITS: Final = _FREQUENCIES * _FREQUENCIES
_BANDS: Final = 16

_CROPS: Final = (
    (0.0, 0.0, 1.0),
    (0.025, 0.025, 0.95),
    (0.05, 0.05, 0.9),
    (0.075, 0.075, 0.85),
    (0.0, 0.0, 0.9),
    (0.1, 0.0, 0.9),
    (0.0, 0.1, 0.9),
    (0.1, 0.1, 0.9),
)
"""Top, left and side of each crop, as shares of the image."""


def perceptual_hash(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Hash of an RGB image: 32 bytes, uint8 (32,)."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(grey, (_THUMBNAIL, _THUMBNAIL), interpolation=cv2.INTER_AREA)
    frequencies = cv2.dct(small.astype(np.float32))[:_FREQUENCIES, :_FREQUENCIES].ravel()
    return np.packbits(frequencies > np.median(frequencies[1:]))


def hashes_under_crops(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Hashes of the image and of slight crops of it: uint8 (8, 32)."""
    height, width = pixels.shape[:2]
    hashes = []
    for top, left, side in _CROPS:
        rows = slice(round(top * height), max(1, round((top + side) * height)))
        columns = slice(round(left * width), max(1, round((left + side) * width)))
        crop = pixels[rows, columns]
        hashes.append(perceptual_hash(crop if crop.size else pixels))
    return np.stack(hashes)


class HashIndex:
    """Finds the nearest of many hashes.

    Args:
        hashes: uint8 (N, 32).
    """

    def __init__(self, hashes: NDArray[np.uint8]) -> None:
        self._hashes = hashes
        bands = _bands(hashes)
        self._order = np.argsort(bands, axis=0, kind="stable").astype(np.int32)
        self._sorted = np.take_along_axis(bands, self._order, axis=0)

    def nearest(self, queries: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each query (M, 32), the index of the nearest hash found and how many bits differ.

        Index -1 and HASH_BITS where no hash shares a band.
        """
        best = np.full(len(queries), -1, np.int64)
        distances = np.full(len(queries), HASH_BITS, np.int64)
        for band, values in enumerate(_bands(queries).T):
            first = np.searchsorted(self._sorted[:, band], values, side="left")
            last = np.searchsorted(self._sorted[:, band], values, side="right")
            query, found = self._candidates(first, last, band)
            bits = np.bitwise_count(self._hashes[found] ^ queries[query]).sum(axis=1)
            nearest_last = np.lexsort((-bits.astype(np.int64), query))
            for q, i in _last_of_each(query, nearest_last):
                if bits[i] < distances[q]:
                    distances[q], best[q] = bits[i], found[i]
        return best, distances

    def _candidates(
        self, first: NDArray[np.int64], last: NDArray[np.int64], band: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        counts = last - first
        query = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
        return query, self._order[np.repeat(first, counts) + within, band].astype(np.int64)


def _bands(hashes: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """The hashes as 16 numbers of 16 bits, neighbouring frequencies spread over the bands."""
    bits = np.unpackbits(hashes, axis=1).reshape(len(hashes), HASH_BITS // _BANDS, _BANDS)
    return np.packbits(bits.transpose(0, 2, 1), axis=2).reshape(len(hashes), -1).view(np.uint16)


def _last_of_each(
    query: NDArray[np.int64], order: NDArray[np.int64]
) -> "zip[tuple[np.int64, np.int64]]":
    """(query, candidate) for the last candidate of each query in an order sorted by query."""
    ordered = query[order]
    is_last = np.append(ordered[1:] != ordered[:-1], True)[: len(ordered)]
    return zip(ordered[is_last], order[is_last], strict=True)
