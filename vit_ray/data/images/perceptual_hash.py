"""A hash of what an image shows, and an index that finds near hashes in constant time.

The hash is 256 bits: signs of the low frequencies of the luminance (the 16 x 16 corner of a cosine
transform of 32 x 32 pixels) against their median, as in pHash. Re-encoding and resizing flip few
bits; cropping flips more, so that an indexed image is hashed under several crops too.

The index cuts a hash into 16 bands of 16 bits and looks for hashes that share a band, or all but
one bit of it: with p = d/256 of the bits different, a band is found with probability
q = (1-p)^16 + 16 p (1-p)^15, and the hash with 1 - (1-q)^16: 0.9996 at d = 32, 0.95 at d = 48.
"""

from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

_THUMBNAIL: Final = 32
_FREQUENCIES: Final = 16
HASH_BITS: Final = _FREQUENCIES * _FREQUENCIES
_BANDS: Final = 16
_PROBES: Final = np.array([0, *(1 << bit for bit in range(16))], np.uint16)
_INDEX_BITS: Final = 40
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1

_CROPS: Final = (
    (0.0, 0.0, 1.0),
    *(
        ((1 - side) * down, (1 - side) * across, side)
        for side in (0.95, 0.9, 0.85)
        for down in (0.0, 0.5, 1.0)
        for across in (0.0, 0.5, 1.0)
    ),
)
"""Top, left and side of each crop, as shares of the image: any crop of 85 % or more is near one."""


def perceptual_hash(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Hash of an RGB image: 32 bytes, uint8 (32,)."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(grey, (_THUMBNAIL, _THUMBNAIL), interpolation=cv2.INTER_AREA)
    frequencies = cv2.dct(small.astype(np.float32))[:_FREQUENCIES, :_FREQUENCIES].ravel()
    return np.packbits(frequencies > np.median(frequencies[1:]))


def hashes_under_crops(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Hashes of the image and of slight crops of it: uint8 (28, 32)."""
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

        Index -1 and HASH_BITS where no band comes within a bit.
        """
        best = np.full(len(queries), HASH_BITS << _INDEX_BITS, np.int64)
        for band, values in enumerate(_bands(queries).T):
            for probe in _PROBES:
                query, found = self._candidates(values ^ probe, band)
                bits = np.bitwise_count(self._hashes[found] ^ queries[query]).sum(axis=1)
                key = (bits.astype(np.int64) << _INDEX_BITS) | found
                np.minimum.at(best, query, key)
        distances = best >> _INDEX_BITS
        return np.where(distances < HASH_BITS, best & _INDEX_MASK, -1), distances

    def _candidates(
        self, values: NDArray[np.uint16], band: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(query, hash) for every hash whose band has the query's value."""
        first = np.searchsorted(self._sorted[:, band], values, side="left")
        counts = np.searchsorted(self._sorted[:, band], values, side="right") - first
        query = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
        return query, self._order[np.repeat(first, counts) + within, band].astype(np.int64)


def _bands(hashes: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """The hashes as 16 numbers of 16 bits, neighbouring frequencies spread over the bands."""
    bits = np.unpackbits(hashes, axis=1).reshape(len(hashes), HASH_BITS // _BANDS, _BANDS)
    packed = np.packbits(bits.transpose(0, 2, 1), axis=2)
    return packed.reshape(len(hashes), -1).view(np.uint16)
