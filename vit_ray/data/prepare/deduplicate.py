"""Removes from a pre-training set what it shares with evaluation sets (ViT paper 4.1, after BiT).

A row is a duplicate if its bytes equal those of an evaluation image, or if its perceptual hash is
within `MAX_DISTANCE` bits of one and their pixels agree at 64 x 64; with and without uniform
borders on both sides, and mirrored if requested. A flat image has nothing to hash, and is a
duplicate only of an image with equal pixels. Or, with features of a model: if the cosine with an
evaluation image's is high enough. Linear in the data: each image is described once, and looked up.
The result is only a manifest and a list of what was left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest, open_dataset
from vit_ray.data.format.row_groups import ChangedImageError, RowGroupReader
from vit_ray.data.format.schema import CHECKSUMS_FILE, MANIFEST_FILE, STAGING_FOLDER
from vit_ray.data.format.sidecars import write_checksums
from vit_ray.data.images.borders import without_borders
from vit_ray.data.images.crops import Augmentation, BadImageError, training_crop
from vit_ray.data.images.jpeg import decode_jpeg, encode_jpeg
from vit_ray.data.images.perceptual_hash import (
    CROPS,
    HASH_BITS,
    HashIndex,
    hashes_under_crops,
    is_flat,
    perceptual_hash,
)
from vit_ray.data.images.same_picture import SIDE, shows_the_same
from vit_ray.data.prepare.progress import Shown, report_done
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.subset import derive, refuse_existing
from vit_ray.storage import locate

Pixels = NDArray[np.uint8]
DUPLICATES_FILE: Final = "duplicates.parquet"
_DECODED: Final = Augmentation("resize", size=2 * SIDE, flip=False)
"""Twice the compared size, to find borders to half a pixel of that."""
_MOST_COMPARED: Final = 8
"""Pictures, the closest first, that are compared with one of a row pixel by pixel."""
_ROWS_AT_A_TIME: Final = 512

_LIST_SCHEMA: Final = pa.schema(
    [
        ("key", pa.string()),
        ("evaluation_set", pa.string()),
        ("evaluation_key", pa.string()),
        ("distance", pa.int32()),
        ("is_exact", pa.bool_()),
        ("cosine", pa.float32()),
    ]
)

MAX_DISTANCE: Final = 30
"""Bits of 128 by which the hashes of images may differ for their pixels to be compared."""


@dataclass(frozen=True)
class Duplicate:
    """A row of the pre-training set that shows an evaluation image.

    `distance` is how many of 128 bits of the hashes differ, 0 if the bytes or pixels are equal;
    `cosine` is that of the features. One of them is None.
    """

    key: str
    evaluation_set: str
    evaluation_key: str
    distance: int | None
    is_exact: bool
    cosine: float | None = None


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
    """Raise a ValueError if the destination already holds a data set or a list of duplicates."""
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER, DUPLICATES_FILE, CHECKSUMS_FILE)


Found = tuple[int, int, Duplicate]
"""Row group, stored row, and what it shows."""


def deduplicate(
    source: str,
    evaluation_sets: list[str],
    destination: str,
    *,
    flips: bool = False,
    num_cpus: float = 1.0,
) -> DeduplicateReport:
    """Write the manifest of a data set without the images of evaluation sets.

    Args:
        flips: also leave out mirrored copies.

    Raises:
        ValueError: nothing would be left, or the destination holds a data set or a list of
            duplicates already.
    """
    refuse_taken(destination)
    whole = open_dataset(source)
    known = _index(evaluation_sets, num_cpus)
    shown = Shown(f"comparing {source}", whole.num_images, "duplicates")
    results = run_tasks(
        _duplicates_in, _files_of(whole), num_cpus, whole, known, flips, shown=shown
    )
    found = [row for rows, _ in results for row in rows]
    undecodable = sum(undecodable for _, undecodable in results), known.num_undecodable
    how = {"max_distance": MAX_DISTANCE, "flips": flips}
    origin = {"evaluation_sets": evaluation_sets, **how}
    return leave_out(whole, found, destination, origin, undecodable)


def deduplicate_by_features(
    source: str,
    evaluation_sets: list[str],
    destination: str,
    near: Iterable[tuple[int, str, int, str, float]],
    min_cosine: float,
) -> DeduplicateReport:
    """As `deduplicate`, for rows found by another method.

    Args:
        near: sample number and key of a row, which of the evaluation sets it is close to, key
            there, and cosine of the features.
        min_cosine: by which they were found.

    Raises:
        ValueError: as `deduplicate`.
    """
    refuse_taken(destination)
    whole = open_dataset(source)
    found: list[Found] = []
    for sample, key, of_set, evaluation_key, cosine in near:
        group = int(np.searchsorted(whole.first_samples, sample, side="right")) - 1
        stored = whole.stored_row(group, sample - int(whole.first_samples[group]))
        shown = Duplicate(key, evaluation_sets[of_set], evaluation_key, None, False, cosine)
        found.append((group, stored, shown))
    how = {"evaluation_sets": evaluation_sets, "min_cosine": min_cosine}
    return leave_out(whole, found, destination, how)


def leave_out(
    whole: Manifest,
    found: list[Found],
    destination: str,
    origin: dict[str, object],
    undecodable: tuple[int, int] = (0, 0),
) -> DeduplicateReport:
    """Write the list of duplicates, and the manifest without them.

    Args:
        undecodable: images that cannot be decoded, of the set and of the evaluation sets.

    Raises:
        ValueError: nothing would be left, or the destination is taken.
    """
    if len(found) == whole.num_images:
        raise ValueError(
            f"deduplicate: all images of {whole.path!r} are in {origin['evaluation_sets']}, so "
            "nothing is left; check whether the sets were swapped"
        )
    left_out: dict[int, list[int]] = {}
    for group, row, _ in found:
        left_out.setdefault(group, []).append(row)
    refuse_taken(destination)  # again: hours may have passed
    sink = pa.BufferOutputStream()
    duplicates = [duplicate for *_, duplicate in found]
    pq.write_table(pa.Table.from_pylist(list(map(vars, duplicates)), schema=_LIST_SCHEMA), sink)
    content = sink.getvalue().to_pybytes()
    write_checksums(locate(destination), {DUPLICATES_FILE: content})
    locate(destination).child(DUPLICATES_FILE).write(content)
    derive(whole, left_out, destination, {"deduplicated": whole.fingerprint, **origin})
    exact = sum(duplicate.is_exact for duplicate in duplicates)
    near = len(duplicates) - exact
    return DeduplicateReport(whole.num_images, exact, near, *undecodable, duplicates)


@dataclass(frozen=True)
class _Known:
    """Everything about the evaluation images.

    Attributes:
        index: hashes of the pictures, under each crop.
        thumbnails: of each picture, encoded.
        images: for each picture, which image it is of.
        digests: of encoded bytes, to an image.
        flat: digests of the thumbnails of flat images, to an image.
        names: evaluation set and key of each image.
    """

    index: HashIndex
    thumbnails: list[bytes]
    images: list[int]
    digests: dict[bytes, int]
    flat: dict[bytes, int]
    names: list[tuple[str, str]]
    num_undecodable: int

    def thumbnail(self, picture: int) -> Pixels:
        """Pixels of a picture: uint8 (64, 64, 3), RGB."""
        pixels = decode_jpeg(self.thumbnails[picture])
        assert pixels is not None
        return pixels


def _index(evaluation_sets: list[str], num_cpus: float) -> _Known:
    described: list[tuple[tuple[str, str], _Described]] = []
    for path in evaluation_sets:
        manifest = open_dataset(path)
        shown = Shown(f"reading {path}", manifest.num_images)
        files = _files_of(manifest)
        for _, images in sorted(run_tasks(_described_in, files, num_cpus, manifest, shown=shown)):
            described += [((path, key), image) for key, image in images]
    return known_from(described)


def _files_of(manifest: Manifest) -> list[int]:
    return [int(index) for index in np.unique(manifest.file_index)]


def known_from(images: list[tuple[tuple[str, str], _Described]]) -> _Known:
    """What must be known about evaluation images, each with its evaluation set and key."""
    described = [image for _, image in images]
    hashes = b"".join(hashes for image in described for _, hashes in image.pictures)
    # Of equal ones the first.
    backwards = list(enumerate(described))[::-1]
    return _Known(
        index=HashIndex(np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BITS // 8)),
        thumbnails=[coded for image in described for coded, _ in image.pictures],
        images=[i for i, image in enumerate(described) for _ in image.pictures],
        digests={image.digest: i for i, image in backwards},
        flat={image.flat: i for i, image in backwards if image.flat},
        names=[name for name, _ in images],
        num_undecodable=sum(not image.flat and not image.pictures for image in described),
    )


class _Described(NamedTuple):
    """An evaluation image: if it cannot be decoded it has neither pictures nor `flat`.

    Attributes:
        digest: of its bytes.
        pictures: encoded thumbnail, and hashes under each crop, of the whole image and, if it has
            borders, of the part inside them.
        flat: digest of the thumbnail of a flat image.
    """

    digest: bytes
    pictures: tuple[tuple[bytes, bytes], ...] = ()
    flat: bytes = b""


def _described_in(file_index: int, manifest: Manifest) -> tuple[int, list[tuple[str, _Described]]]:
    """The file's number, and the description of each of its images."""
    found = []
    for number, (_, _, key, image) in enumerate(_images(manifest, file_index), 1):
        found.append((key, describe(image)))
        report_done(number)
    return file_index, found


def describe(image: bytes) -> _Described:
    """The description of an encoded evaluation image."""
    digest, pictures = _digest(image), _pictures(image)
    if pictures and is_flat(pictures[0]):
        return _Described(digest, flat=_digest(pictures[0].tobytes()))
    coded = ((encode_jpeg(p, 95), hashes_under_crops(p).tobytes()) for p in pictures)
    return _Described(digest, tuple(coded))


def _duplicates_in(
    file_index: int, manifest: Manifest, known: _Known, flips: bool
) -> tuple[list[Found], int]:
    """The duplicates of a file, and how many of its images cannot be decoded."""
    rows: list[Found] = []
    undecodable = num_images = 0
    images = _images(manifest, file_index)
    while batch := list(islice(images, _ROWS_AT_A_TIME)):
        matches, unread = find(known, [image for *_, image in batch], MAX_DISTANCE, flips=flips)
        undecodable += unread
        for (group, row, key, _), match in zip(batch, matches, strict=True):
            if match is not None:
                rows.append((group, row, Duplicate(key, *known.names[match.image], *match[1:])))
        num_images += len(batch)
        report_done(num_images, len(rows))
    return rows, undecodable


class Match(NamedTuple):
    """The evaluation image that an image shows."""

    image: int
    distance: int
    is_exact: bool


def find(
    known: _Known, images: list[bytes], max_distance: int, *, flips: bool = False
) -> tuple[list[Match | None], int]:
    """The known image that each encoded image shows, and how many cannot be decoded.

    Args:
        flips: look for each mirrored, too.
    """
    matches: list[Match | None] = [None] * len(images)
    queries: list[tuple[int, Pixels]] = []
    unread = 0
    for i, image in enumerate(images):
        pictures = _pictures(image)
        unread += not pictures
        if (equal := known.digests.get(_digest(image))) is not None:
            matches[i] = Match(equal, 0, True)
        elif pictures and is_flat(pictures[0]):
            equal = known.flat.get(_digest(pictures[0].tobytes()))
            matches[i] = None if equal is None else Match(equal, 0, False)
        else:
            queries += [(i, picture) for picture in pictures]
            if flips:
                mirrored = (np.ascontiguousarray(picture[:, ::-1]) for picture in pictures)
                queries += [(i, picture) for picture in mirrored]
    if queries:
        near = known.index.near(np.stack([perceptual_hash(p) for _, p in queries]), max_distance)
        for query, (i, picture) in enumerate(queries):
            matches[i] = matches[i] or _confirmed(known, picture, near.of(query))
    return matches, unread


def _confirmed(known: _Known, picture: Pixels, proposed: Iterable[tuple[int, int]]) -> Match | None:
    """The first of the proposed pictures whose pixels agree.

    Args:
        proposed: entries of the index with their distances, the closest first.
    """
    nearest: dict[int, tuple[int, int]] = {}
    for entry, distance in proposed:
        place, crop = divmod(entry, len(CROPS))
        nearest.setdefault(place, (crop, distance))
    for place, (crop, distance) in islice(nearest.items(), _MOST_COMPARED):
        if shows_the_same(picture, known.thumbnail(place), CROPS[crop]):
            return Match(known.images[place], distance, False)
    return None


def _pictures(image: bytes) -> list[Pixels]:
    """The whole image, and the part inside uniform borders if it has any, at 64 x 64.

    Nothing for an image that cannot be decoded.
    """
    try:
        whole = training_crop(image, _DECODED, (0, 0, 0))
    except BadImageError:
        return []
    enclosed = without_borders(whole)
    parts = [whole] if enclosed.shape == whole.shape else [whole, enclosed]
    size = (SIDE, SIDE)
    small: list[Any] = [cv2.resize(part, size, interpolation=cv2.INTER_AREA) for part in parts]
    return [pixels for place, pixels in enumerate(small) if not place or not is_flat(pixels)]


def _images(manifest: Manifest, file_index: int) -> Iterator[tuple[int, int, str, bytes]]:
    """(row group, stored row, key, bytes) of every row of a file that counts."""
    reader = RowGroupReader(manifest)
    for group in np.flatnonzero(manifest.file_index == file_index).tolist():
        encoded = reader.read(group)
        for stored in manifest.stored_rows(group).tolist():
            key = encoded.key(stored)
            try:
                yield group, stored, key, encoded.image(stored)
            except ChangedImageError as error:
                shard = manifest.shard_location(group).path
                raise ValueError(f"{key!r} in {shard!r}: {error}; run `vit-ray verify`") from error


def _digest(image: bytes) -> bytes:
    return hashlib.blake2b(image, digest_size=16).digest()
