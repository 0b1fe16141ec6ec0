"""Removes from a pre-training set what it shares with evaluation sets (ViT paper 4.1, after BiT).

A row is a duplicate if its bytes equal those of an evaluation image, or if its perceptual hash is
within `MAX_DISTANCE` bits of one and their pixels agree at 64 x 64. A flat image has nothing to
hash, and is a duplicate only of an image with equal pixels. Linear in the data: each image
is hashed once, and looked up in an index of the evaluation hashes. Mirrored copies are not looked
for. The result is a manifest alone and a list of what was left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest, open_dataset
from vit_ray.data.format.row_groups import ChangedImageError, RowGroupReader
from vit_ray.data.format.schema import CHECKSUMS_FILE, MANIFEST_FILE, STAGING_FOLDER
from vit_ray.data.format.sidecars import write_checksums
from vit_ray.data.images.crops import Augmentation, BadImageError, training_crop
from vit_ray.data.images.perceptual_hash import (
    CROPS,
    HASH_BITS,
    HashIndex,
    hashes_under_crops,
    is_flat,
    perceptual_hash,
)
from vit_ray.data.images.same_picture import SIDE, shows_the_same
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.subset import derive, refuse_existing
from vit_ray.storage import locate

DUPLICATES_FILE: Final = "duplicates.parquet"
_THUMBNAIL: Final = Augmentation("resize", size=SIDE, flip=False)
_MOST_COMPARED: Final = 8
"""Evaluation images, the nearest first, that are compared with a row pixel by pixel."""
_ROWS_AT_A_TIME: Final = 512

_LIST_SCHEMA: Final = pa.schema(
    [
        ("key", pa.string()),
        ("evaluation_set", pa.string()),
        ("evaluation_key", pa.string()),
        ("distance", pa.int32()),
        ("is_exact", pa.bool_()),
    ]
)

MAX_DISTANCE: Final = 30
"""Bits of 128 by which the hashes of images may differ whose pixels are compared; measured with
benchmarks/data_deduplicate.py."""


@dataclass(frozen=True)
class Duplicate:
    """A row of the pre-training set that shows an evaluation image.

    `distance` is how many of 128 bits of the hashes differ; 0 if the bytes or pixels are equal.
    """

    key: str
    evaluation_set: str
    evaluation_key: str
    distance: int
    is_exact: bool


@dataclass(frozen=True)
class DeduplicateReport:
    """What was left out of `num_images`.

    Images that cannot be decoded, of the source and of the evaluation sets, are compared by their
    bytes alone.
    """

    num_images: int
    num_exact: int
    num_near: int
    num_undecodable: int
    num_undecodable_evaluation: int
    duplicates: list[Duplicate]


def refuse_taken(destination: str) -> None:
    """Raise a ValueError if the destination holds a data set or a list of duplicates already."""
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER, DUPLICATES_FILE, CHECKSUMS_FILE)


def deduplicate(
    source: str,
    evaluation_sets: list[str],
    destination: str,
    *,
    num_cpus: float = 1.0,
) -> DeduplicateReport:
    """Write the manifest of a data set without the images of evaluation sets.

    Raises:
        ValueError: if no evaluation set is given, nothing would be left, or the destination holds
            a data set or a list of duplicates already.
    """
    if not evaluation_sets:
        raise ValueError("deduplicate: evaluation_sets is empty; name at least one data set")
    refuse_taken(destination)
    whole = open_dataset(source)
    known = _index(evaluation_sets, num_cpus)
    found = run_tasks(_duplicates_in, _files_of(whole), num_cpus, whole, known)
    rows = [row for rows, _ in found for row in rows]
    if len(rows) == whole.num_images:
        raise ValueError(
            f"deduplicate: all of {source!r} is in {evaluation_sets}, so nothing is left; "
            f"check which set is which"
        )
    left_out: dict[int, list[int]] = {}
    for group, row, _ in rows:
        left_out.setdefault(group, []).append(row)
    duplicates = [duplicate for *_, duplicate in rows]
    refuse_taken(destination)  # again: hours may have passed
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(map(vars, duplicates)), schema=_LIST_SCHEMA), sink)
    content = sink.getvalue().to_pybytes()
    write_checksums(locate(destination), {DUPLICATES_FILE: content})
    locate(destination).child(DUPLICATES_FILE).write(content)
    origin = {"deduplicated": whole.fingerprint, "evaluation_sets": evaluation_sets}
    derive(whole, left_out, destination, {**origin, "max_distance": MAX_DISTANCE})
    num_exact = sum(duplicate.is_exact for duplicate in duplicates)
    return DeduplicateReport(
        num_images=whole.num_images,
        num_exact=num_exact,
        num_near=len(duplicates) - num_exact,
        num_undecodable=sum(undecodable for _, undecodable in found),
        num_undecodable_evaluation=known.num_undecodable,
        duplicates=duplicates,
    )


@dataclass(frozen=True)
class _Known:
    """Everything about the evaluation images.

    Attributes:
        index: hashes of the images that are not flat, under each crop.
        images: for each entry of `index`, by crops, which image it is.
        digests: of encoded bytes, to an image.
        flat: digests of the thumbnails of flat images, to an image.
        thumbnails: for each image that is not flat, encoded.
        names: evaluation set and key of each image.
    """

    index: HashIndex
    images: NDArray[np.int64]
    digests: dict[bytes, int]
    flat: dict[bytes, int]
    thumbnails: dict[int, bytes]
    names: list[tuple[str, str]]
    num_undecodable: int

    def thumbnail(self, image: int) -> NDArray[np.uint8]:
        """Pixels of an image that is not flat: uint8 (64, 64, 3), RGB."""
        coded = np.frombuffer(self.thumbnails[image], np.uint8)
        return cv2.imdecode(coded, cv2.IMREAD_COLOR_RGB)  # type: ignore[return-value]


def _index(evaluation_sets: list[str], num_cpus: float) -> _Known:
    described: list[tuple[tuple[str, str], _Described]] = []
    for path in evaluation_sets:
        manifest = open_dataset(path)
        for _, images in sorted(run_tasks(_described_in, _files_of(manifest), num_cpus, manifest)):
            described += [((path, key), image) for key, image in images]
    return known_from(described)


def _files_of(manifest: Manifest) -> list[int]:
    return [int(index) for index in np.unique(manifest.file_index)]


def known_from(images: list[tuple[tuple[str, str], _Described]]) -> _Known:
    """What is to be known about evaluation images, each with its evaluation set and key."""
    digests: dict[bytes, int] = {}
    flat: dict[bytes, int] = {}
    thumbnails: dict[int, bytes] = {}
    for i, (_, image) in enumerate(images):
        digests.setdefault(image.digest, i)
        if image.kind == _FLAT:
            flat.setdefault(image.content, i)
        elif image.kind == _HASHED:
            thumbnails[i] = image.content
    hashes = np.frombuffer(b"".join(image.hashes for _, image in images), np.uint8)
    return _Known(
        index=HashIndex(hashes.reshape(-1, HASH_BITS // 8)),
        images=np.fromiter(thumbnails, np.int64),
        digests=digests,
        flat=flat,
        thumbnails=thumbnails,
        names=[name for name, _ in images],
        num_undecodable=sum(image.kind == _UNDECODABLE for _, image in images),
    )


_HASHED: Final = 0
_FLAT: Final = 1
_UNDECODABLE: Final = 2


class _Described(NamedTuple):
    """An evaluation image: digest of its bytes; encoded thumbnail and hashes, if it is hashed.

    `content` of a flat image is the digest of its thumbnail.
    """

    digest: bytes
    kind: int
    content: bytes = b""
    hashes: bytes = b""


def _described_in(file_index: int, manifest: Manifest) -> tuple[int, list[tuple[str, _Described]]]:
    """The file's number, and what is kept of each of its images."""
    images = _images(manifest, file_index)
    return file_index, [(key, describe(image)) for _, _, key, image in images]


def describe(image: bytes) -> _Described:
    """What is kept of an encoded evaluation image."""
    digest, small = _digest(image), _thumbnail(image)
    if small is None:
        return _Described(digest, _UNDECODABLE)
    if is_flat(small):
        return _Described(digest, _FLAT, _digest(small.tobytes()))
    quality = [cv2.IMWRITE_JPEG_QUALITY, 95]
    coded = cv2.imencode(".jpg", cv2.cvtColor(small, cv2.COLOR_RGB2BGR), quality)[1]
    return _Described(digest, _HASHED, coded.tobytes(), hashes_under_crops(small).tobytes())


def _duplicates_in(
    file_index: int, manifest: Manifest, known: _Known
) -> tuple[list[tuple[int, int, Duplicate]], int]:
    """Row group, stored row and what it shows, of each duplicate; how many cannot be decoded."""
    rows: list[tuple[int, int, Duplicate]] = []
    undecodable = 0
    images = _images(manifest, file_index)
    while batch := list(islice(images, _ROWS_AT_A_TIME)):
        matches, unread = find(known, [image for *_, image in batch], MAX_DISTANCE)
        undecodable += unread
        for (group, row, key, _), match in zip(batch, matches, strict=True):
            if match is not None:
                rows.append((group, row, Duplicate(key, *known.names[match.image], *match[1:])))
    return rows, undecodable


class Match(NamedTuple):
    """The evaluation image that an image shows."""

    image: int
    distance: int
    is_exact: bool


def find(known: _Known, images: list[bytes], max_distance: int) -> tuple[list[Match | None], int]:
    """What each encoded image shows of what is known, and how many cannot be decoded."""
    matches: list[Match | None] = [None] * len(images)
    hashed: list[tuple[int, NDArray[np.uint8]]] = []
    unread = 0
    for i, image in enumerate(images):
        small = _thumbnail(image)
        unread += small is None
        if (equal := known.digests.get(_digest(image))) is not None:
            matches[i] = Match(equal, 0, True)
        elif small is not None and not is_flat(small):
            hashed.append((i, small))
        elif small is not None and (equal := known.flat.get(_digest(small.tobytes()))) is not None:
            matches[i] = Match(equal, 0, False)
    if hashed:
        near = known.index.near(np.stack([perceptual_hash(t) for _, t in hashed]), max_distance)
        for query, (i, small) in enumerate(hashed):
            matches[i] = _confirmed(known, small, near.of(query))
    return matches, unread


def _confirmed(
    known: _Known, thumbnail: NDArray[np.uint8], proposed: Iterable[tuple[int, int]]
) -> Match | None:
    """The first of the proposed images whose pixels agree.

    Args:
        proposed: entries of the index with their distances, the nearest first.
    """
    nearest: dict[int, tuple[int, int]] = {}
    for entry, distance in proposed:
        place, crop = divmod(entry, len(CROPS))
        nearest.setdefault(int(known.images[place]), (crop, distance))
    for image, (crop, distance) in islice(nearest.items(), _MOST_COMPARED):
        if shows_the_same(thumbnail, known.thumbnail(image), CROPS[crop]):
            return Match(image, distance, False)
    return None


def _thumbnail(image: bytes) -> NDArray[np.uint8] | None:
    try:
        return training_crop(image, _THUMBNAIL, (0, 0, 0))
    except BadImageError:
        return None


def _images(manifest: Manifest, file_index: int) -> Iterator[tuple[int, int, str, bytes]]:
    """(row group, stored row, key, bytes) of every row of a file that counts."""
    reader = RowGroupReader(manifest)
    for group in np.flatnonzero(manifest.file_index == file_index):
        encoded = reader.read(int(group))
        for row in range(int(manifest.rows[group])):
            stored = manifest.stored_row(int(group), row)
            key = encoded.key(stored)
            try:
                yield int(group), stored, key, encoded.image(stored)
            except ChangedImageError as error:
                shard = manifest.shard_location(int(group)).path
                raise ValueError(f"{key!r} in {shard!r}: {error}; run jobs/verify.py") from error


def _digest(image: bytes) -> bytes:
    return hashlib.blake2b(image, digest_size=16).digest()
