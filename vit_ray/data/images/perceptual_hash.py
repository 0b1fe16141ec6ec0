"""A hash of what an image shows, and an index that finds close hashes in constant time.

The hash is 128 bits: signs of the lowest frequencies of the luminance (a cosine transform of 32 x
32 pixels) against their median, as in pHash. Re-encoding and resizing flip few bits; cropping flips
more, so an indexed image is also hashed under several crops. A close hash suggests that two images
show the same; `same_picture` decides by their pixels.

The index cuts a hash into 8 bands of 16 bits, in two ways, and looks for hashes that share a band,
or all but one bit of it: with p = d/128 of the bits different, a band is found with probability q =
(1-p)^16 + 16 p (1-p)^15, and the hash with 1 - (1-q)^16: 0.9996 at d = 16, 0.95 at d = 24, 0.74 at
d = 30 for one crop of an image, and each of its 49 crops is another chance.
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

_BAND_ORDERS: Final = [np.random.default_rng(i).permutation(HASH_BITS) for i in range(2)]
_PROBES: Final = np.array([0, *(1 << bit for bit in range(16))], np.uint16)
_MOST_IN_A_BAND: Final = 1024
"""Most hashes per band that are compared: it limits the cost if many images are alike.
"""
_QUERIES_AT_A_TIME: Final = 256

Crop = tuple[float, float, float, float]
"""Top, left, height and width, as shares of the image."""
CROPS: Final[tuple[Crop, ...]] = (
    (0.0, 0.0, 1.0, 1.0),
    *(
        ((1 - side) * down / steps, (1 - side) * across / steps, side, side)
        for side, steps in ((0.95, 2), (0.9, 2), (0.85, 3), (0.8, 4))
        for down in range(steps + 1)
        for across in range(steps + 1)
    ),
    *((at, 0.0, side, 1.0) for side in (0.9, 0.85, 0.8) for at in (0.0, 1 - side)),
    *((0.0, at, 1.0, side) for side in (0.9, 0.85, 0.8) for at in (0.0, 1 - side)),
)
"""Any crop of 80 % or more is close to one of them, and so is what a bar along one side leaves."""


def perceptual_hash(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Hash of an RGB image: 16 bytes, uint8 (16,)."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(grey, (_THUMBNAIL, _THUMBNAIL), interpolation=cv2.INTER_AREA)
    frequencies = cv2.dct(small.astype(np.float32))[_ROWS, _COLUMNS]
    return np.packbits(frequencies > np.median(frequencies))


def hashes_under_crops(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Hashes of the image under each of `CROPS`: uint8 (49, 16)."""
    height, width = pixels.shape[:2]
    hashes = []
    for top, left, down, across in CROPS:
        rows = slice(round(top * height), max(1, round((top + down) * height)))
        columns = slice(round(left * width), max(1, round((left + across) * width)))
        crop = pixels[rows, columns]
        hashes.append(perceptual_hash(crop if crop.size else pixels))
    return np.stack(hashes)


def is_flat(pixels: NDArray[np.uint8]) -> bool:
    """Whether an RGB image has nothing to hash: a single colour, or nearly."""
    return bool(pixels.reshape(-1, 3).std(axis=0).max() < _FLAT_BELOW)


class NearHashes(NamedTuple):
    """Pairs of a query and a hash, and how many bits differ; by query, the closest first."""

    query: NDArray[np.int64]
    found: NDArray[np.int64]
    distance: NDArray[np.int64]

    def of(self, query: int) -> list[tuple[int, int]]:
        """Hashes close to one query and their distances, the closest first."""
        first, last = np.searchsorted(self.query, [query, query + 1])
        found, distance = self.found[first:last].tolist(), self.distance[first:last].tolist()
        return list(zip(found, distance, strict=True))


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

    def near(self, queries: NDArray[np.uint8], max_distance: int) -> NearHashes:
        """Pairs of the queries (M, 16) and hashes that differ in at most `max_distance` bits."""
        pairs = set[tuple[int, int]]()
        for first in range(0, len(queries), _QUERIES_AT_A_TIME):
            some = queries[first : first + _QUERIES_AT_A_TIME]
            for band, values in enumerate(_bands(some).T):
                for probe in _PROBES:
                    query, found = self._candidates(values ^ probe, band)
                    bits = np.bitwise_count(self._hashes[found] ^ some[query]).sum(axis=1)
                    near = bits <= max_distance
                    pairs.update(
                        zip((query[near] + first).tolist(), found[near].tolist(), strict=True)
                    )
        query, found = np.array(sorted(pairs), np.int64).reshape(-1, 2).T
        distance = np.bitwise_count(self._hashes[found] ^ queries[query]).sum(axis=1)
        order = np.lexsort((found, distance, query))
        return NearHashes(query[order], found[order], distance[order].astype(np.int64))

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
    """The hashes as numbers of 16 bits, (N, 16): two ways to deal the bits to 8 bands."""
    bits = np.unpackbits(hashes, axis=1)
    dealt = [np.packbits(bits[:, order], axis=1) for order in _BAND_ORDERS]
    return np.ascontiguousarray(np.concatenate(dealt, axis=1)).view(np.uint16)
