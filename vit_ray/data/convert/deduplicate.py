"""Removes from a pre-training set what it shares with evaluation sets (ViT paper 4.1, after BiT).

A row is a duplicate if its bytes equal those of an evaluation image, or if its perceptual hash is
within `MAX_DISTANCE` bits of one. A flat image has nothing to hash, and is compared by its bytes.
Each image is described once, and compared with all evaluation images. The result is only a manifest
and a list of what was left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.convert.perceptual_hash import is_flat, nearest, perceptual_hash
from vit_ray.data.crops import Augmentation, BadImageError, crop_of
from vit_ray.data.dataset import MANIFEST_FILE, STAGING_FOLDER, Manifest, open_dataset
from vit_ray.data.progress import Shown, report_done
from vit_ray.data.run_tasks import run_tasks
from vit_ray.data.shards import ChangedImageError, RowGroupReader
from vit_ray.data.subset import derive, refuse_existing
from vit_ray.storage import locate

DUPLICATES_FILE: Final = "duplicates.parquet"
_DECODED: Final = Augmentation("resize", size=64, flip=False)

_LIST_SCHEMA: Final = pa.schema(
    [
        ("key", pa.string()),
        ("evaluation_set", pa.string()),
        ("evaluation_key", pa.string()),
        ("distance", pa.int32()),
        ("is_exact", pa.bool_()),
    ]
)

# Bits of 128 by which the hashes of images that show the same may differ. No two of 373 pictures
# cut from two photographs are within 12, and 196 of 1.6 million pairs of scikit-learn's digits are
# within 10; files of one photograph that differ in size or compression are within 10.
MAX_DISTANCE: Final = 10


@dataclass(frozen=True)
class Duplicate:
    """A row of the pre-training set that shows an evaluation image.

    `distance` is how many of 128 bits of the hashes differ, 0 if the bytes are equal.
    """

    key: str
    evaluation_set: str
    evaluation_key: str
    distance: int
    is_exact: bool


@dataclass(frozen=True)
class DeduplicateReport:
    """What was left out of `num_images`.

    Images that cannot be decoded, in the source and in the evaluation sets, are compared only by
    their bytes.
    """

    num_images: int
    num_exact: int
    num_near: int
    num_undecodable: int
    num_undecodable_evaluation: int
    duplicates: list[Duplicate]


def refuse_taken(destination: str) -> None:
    """Raise a ValueError if the destination already holds a data set, or a list that is not ours.

    A list without a manifest is that of a process that was killed before its end.
    """
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER)
    place = locate(destination).child(DUPLICATES_FILE)
    try:
        is_ours = not place.exists() or pq.read_schema(place.open()).equals(_LIST_SCHEMA)
    except pa.ArrowInvalid:
        is_ours = False
    if not is_ours:
        refuse_existing(destination, DUPLICATES_FILE)


def deduplicate(source: str, evaluation_sets: list[str], destination: str) -> DeduplicateReport:
    """Write the list of duplicates, and the manifest of a data set without them.

    Raises:
        ValueError: nothing would be left, or the destination holds a data set already.
    """
    refuse_taken(destination)
    whole = open_dataset(source)
    known = _index(evaluation_sets)
    shown = Shown(f"comparing {source}", whole.num_images, "duplicates")
    results = run_tasks(_duplicates_in, _files_of(whole), whole, known, shown=shown)
    found = [row for rows, _ in results for row in rows]
    if len(found) == whole.num_images:
        raise ValueError(
            f"deduplicate: all images of {whole.path!r} are in {evaluation_sets}, so "
            "nothing is left; check whether the sets were swapped"
        )
    refuse_taken(destination)  # again: hours may have passed
    sink = pa.BufferOutputStream()
    samples, duplicates = [sample for sample, _ in found], [duplicate for _, duplicate in found]
    pq.write_table(pa.Table.from_pylist(list(map(vars, duplicates)), schema=_LIST_SCHEMA), sink)
    locate(destination).child(DUPLICATES_FILE).write(sink.getvalue().to_pybytes())
    part = whole.without(np.array(samples, np.int64))
    origin = {"evaluation_sets": evaluation_sets, "max_distance": MAX_DISTANCE}
    derive(part, destination, {"deduplicated": whole.fingerprint, **origin})
    exact = sum(duplicate.is_exact for duplicate in duplicates)
    undecodable = sum(count for _, count in results), known.num_undecodable
    near = len(duplicates) - exact
    return DeduplicateReport(whole.num_images, exact, near, *undecodable, duplicates)


@dataclass(frozen=True)
class _Known:
    """Everything about the evaluation images.

    Attributes:
        hashes: uint64 (2, N), of those that have one.
        hashed: the image that each hash is of.
        digests: of encoded bytes, to an image.
        names: evaluation set and key of each image.
    """

    hashes: NDArray[np.uint64]
    hashed: list[int]
    digests: dict[bytes, int]
    names: list[tuple[str, str]]
    num_undecodable: int


def _index(evaluation_sets: list[str]) -> _Known:
    described: list[tuple[tuple[str, str], _Described]] = []
    for path in evaluation_sets:
        manifest = open_dataset(path)
        shown = Shown(f"reading {path}", manifest.num_images)
        files = _files_of(manifest)
        for _, images in sorted(run_tasks(_described_in, files, manifest, shown=shown)):
            described += [((path, key), image) for key, image in images]
    return known_from(described)


def _files_of(manifest: Manifest) -> list[int]:
    return [int(index) for index in np.unique(manifest.file_index)]


def known_from(images: list[tuple[tuple[str, str], _Described]]) -> _Known:
    """What must be known about evaluation images, each with its evaluation set and key."""
    described = [image for _, image in images]
    hashes = b"".join(image.hash for image in described if image.hash)
    return _Known(
        hashes=np.frombuffer(hashes, np.uint64).reshape(-1, 2).T.copy(),
        hashed=[i for i, image in enumerate(described) if image.hash],
        digests={image.digest: i for i, image in list(enumerate(described))[::-1]},  # the first
        names=[name for name, _ in images],
        num_undecodable=sum(image.hash is None for image in described),
    )


class _Described(NamedTuple):
    """What of an image is compared.

    Attributes:
        digest: of its bytes.
        hash: of what it shows; empty for a flat image, None for one that cannot be decoded.
    """

    digest: bytes
    hash: bytes | None


def _described_in(file_index: int, manifest: Manifest) -> tuple[int, list[tuple[str, _Described]]]:
    """The file's number, and the description of each of its images."""
    found = []
    for number, (_, key, image) in enumerate(_images(manifest, file_index), 1):
        found.append((key, describe(image)))
        report_done(number)
    return file_index, found


def describe(image: bytes) -> _Described:
    """What of an encoded image is compared."""
    digest = hashlib.blake2b(image, digest_size=16).digest()
    try:
        pixels = crop_of(image, _DECODED, (0, 0, 0))
    except BadImageError:
        return _Described(digest, None)
    return _Described(digest, b"" if is_flat(pixels) else perceptual_hash(pixels).tobytes())


def _duplicates_in(
    file_index: int, manifest: Manifest, known: _Known
) -> tuple[list[tuple[int, Duplicate]], int]:
    """Number of a sample and what it shows, of the duplicates of a file; and how many of its images
    cannot be decoded.
    """
    rows: list[tuple[int, Duplicate]] = []
    undecodable = 0
    for number, (sample, key, image) in enumerate(_images(manifest, file_index), 1):
        described = describe(image)
        undecodable += described.hash is None
        if match := find(known, described):
            rows.append((sample, Duplicate(key, *known.names[match.image], *match[1:])))
        report_done(number, len(rows))
    return rows, undecodable


class Match(NamedTuple):
    """The evaluation image that an image shows."""

    image: int
    distance: int
    is_exact: bool


def find(known: _Known, described: _Described) -> Match | None:
    """The known image that an image shows."""
    if (equal := known.digests.get(described.digest)) is not None:
        return Match(equal, 0, True)
    if described.hash and known.hashed:
        entry, distance = nearest(known.hashes, described.hash)
        if distance <= MAX_DISTANCE:
            return Match(known.hashed[entry], distance, False)
    return None


def _images(manifest: Manifest, file_index: int) -> Iterator[tuple[int, str, bytes]]:
    """(sample, key, bytes) of every image of a file."""
    reader = RowGroupReader(manifest)
    for group in np.flatnonzero(manifest.file_index == file_index).tolist():
        encoded = reader.read(group)
        places = zip(manifest.samples_of(group), manifest.stored_rows(group), strict=True)
        for sample, stored in places:
            key = encoded.key(int(stored))
            try:
                yield int(sample), key, encoded.image(int(stored))
            except ChangedImageError as error:
                shard = manifest.shard_location(group).path
                raise ValueError(f"{key!r} in {shard!r}: {error}; run `vit-ray verify`") from error
