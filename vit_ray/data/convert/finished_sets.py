"""Verification and deduplication of converted data sets.

`verify` checks every byte of a data set against its manifest, and decodes a sample of the images.

`deduplicate` removes images of evaluation sets from a pre-training set (ViT paper 4.1, after BiT).
A row is a duplicate if its bytes equal those of an evaluation image, or if its perceptual hash is
within `MAX_DISTANCE` bits of one. A flat image has nothing to hash, and is compared by its bytes
only. The hash has 128 bits: the lowest frequencies of the luminance (a cosine transform of 32 x 32
pixels), compared with their median, as in pHash. Re-encoding and resizing flip few bits. The result
is only a manifest and a list of the duplicates.
"""

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.boxes import Augmentation
from vit_ray.data.crops import crop_of
from vit_ray.data.dataset import MANIFEST_FILE, STAGING_FOLDER, Manifest, open_dataset
from vit_ray.data.images import BadImageError, decode
from vit_ray.data.keyed_random import KeyedUniform
from vit_ray.data.parts import derive, refuse_existing
from vit_ray.data.restart_index import StoredImage, index_segments
from vit_ray.data.shards import RowGroupReader, problem_of_shard
from vit_ray.data.tasks import run_tasks
from vit_ray.storage import locate

_SAMPLE: Final = 6
DUPLICATES_FILE: Final = "duplicates.parquet"
_LIST_SCHEMA: Final = pa.schema(
    [
        ("key", pa.string()),
        ("evaluation_set", pa.string()),
        ("evaluation_key", pa.string()),
        ("distance", pa.int32()),
        ("is_exact", pa.bool_()),
    ]
)
# Maximum number of different bits (of 128) between hashes of the same picture. No two of 373
# pictures cut from two photographs are within 12, and 196 of 1.6 million pairs of scikit-learn's
# digits are within 10; files of one photograph that differ in size or compression are within 10.
MAX_DISTANCE: Final = 10
HASH_BITS: Final = 128
_HASHED_SIZE: Final = Augmentation("resize", size=64, flip=False)
_THUMBNAIL: Final = 32
_ORDER: Final = sorted((i + j, i, j) for i in range(_THUMBNAIL) for j in range(_THUMBNAIL))
# The lowest frequencies, without the constant.
_ROWS, _COLUMNS = np.array([(i, j) for _, i, j in _ORDER[1 : HASH_BITS + 1]]).T
# Standard deviation in grey levels below which the signs of frequencies are noise.
_MIN_DEVIATION: Final = 4.0


@dataclass
class VerifyReport:
    """What was checked in a file or a data set.

    Each of `problems` begins with the name of a file, and the key of an image if it is about one.
    """

    num_files: int = 0
    num_images: int = 0
    num_decoded: int = 0
    problems: list[str] = field(default_factory=list)


def verify(path: str, *, decode_fraction: float = 0.01) -> VerifyReport:
    """Check every file and every checksum of a data set, and decode a sample of the images.

    Args:
        decode_fraction: share of the images to decode, from 0 to 1.

    Raises:
        ValueError: the manifest itself cannot be read.
    """
    manifest = open_dataset(path)
    reports = _run_tasks(check_file, manifest, f"verifying {path}", decode_fraction)
    return VerifyReport(
        num_files=sum(report.num_files for report in reports),
        num_images=sum(report.num_images for report in reports),
        num_decoded=sum(report.num_decoded for report in reports),
        problems=[problem for report in reports for problem in report.problems],
    )


def check_file(file_index: int, manifest: Manifest, decode_fraction: float) -> VerifyReport:
    """Check one file of a data set."""
    entry, report = manifest.files[file_index], VerifyReport(num_files=1)
    location, reader = manifest.file_location(file_index), RowGroupReader(manifest)
    if problem := problem_of_shard(location, entry):
        report.problems.append(f"{entry.path}: it cannot be opened: {problem}")
        return report
    for group in np.flatnonzero(manifest.file_index == file_index).tolist():
        try:
            rows = reader.read(group)
        except ValueError as error:
            report.problems.append(f"{entry.path}: {error}")
            continue
        for row in manifest.stored_rows(group).tolist():
            is_decoded = KeyedUniform(_SAMPLE, group, row).draw() < decode_fraction
            report.num_images += 1
            try:
                image = rows.stored(row)
                report.num_decoded += is_decoded
                if is_decoded:
                    _check_image(image)
            except ValueError as error:
                report.problems.append(f"{entry.path} {rows.key(row)}: {error}")
    if not report.problems and (problem := problem_of_shard(location, entry, is_read=True)):
        report.problems.append(f"{entry.path}: {problem}")
    return report


def _check_image(image: StoredImage) -> None:
    """Raises ValueError if the image cannot be decoded, or its restart index does not belong to it.

    With the wrong index a crop would be cut from the wrong region.
    """
    decode(image.content)
    if image.index is not None:
        stored, index = vars(image.index), index_segments(bytes(image.content))
        if index is None or any(
            not np.array_equal(value, stored[name]) for name, value in vars(index).items()
        ):
            raise ValueError("its restart index is not that of its bytes")


def refuse_taken(destination: str) -> None:
    """Raise a ValueError if the destination already holds a data set, or a foreign list.

    A list of duplicates without a manifest is from a killed process, and may be replaced.
    """
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER)
    file = locate(destination).child(DUPLICATES_FILE)
    try:
        is_free = not file.exists() or pq.read_schema(file.open()).equals(_LIST_SCHEMA)
    except pa.ArrowInvalid:
        is_free = False
    if not is_free:
        refuse_existing(destination, DUPLICATES_FILE)


def deduplicate(source: str, evaluation_sets: list[str], destination: str) -> pa.Table:
    """Write the list of duplicates, which is returned, and the manifest of a set without them.

    Returns:
        For each duplicate its key, and the set and the key of the evaluation image that it equals
        or resembles; `distance` is the number of different bits of their hashes (of 128), 0 if
        their bytes are equal (`is_exact`).

    Raises:
        ValueError: nothing would be left, or the destination holds a data set already.
    """
    training_set, images = open_dataset(source), list[tuple[str, str, Described]]()
    for path in evaluation_sets:
        for described in _run_tasks(_described_in, open_dataset(path), f"reading {path}"):
            images += [(path, key, image) for _, key, image in described]
    results = _run_tasks(_duplicates_in, training_set, f"comparing {source}", Known(images))
    rows = dict(itertools.chain(*results))
    if len(rows) == training_set.num_images:
        raise ValueError(
            f"deduplicate: all images of {training_set.path!r} are in {evaluation_sets}, so "
            "nothing is left; check whether the sets were swapped"
        )
    refuse_taken(destination)
    duplicates = pa.Table.from_pylist([*rows.values()], schema=_LIST_SCHEMA)
    with locate(destination).child(DUPLICATES_FILE).output() as file:
        pq.write_table(duplicates, file)
    part = training_set.without(np.array([*rows], np.int64))
    origin = {"evaluation_sets": evaluation_sets, "max_distance": MAX_DISTANCE}
    derive(part, destination, {"deduplicated": training_set.fingerprint, **origin})
    return duplicates


# The digest of an image's bytes, and its perceptual hash; the hash is empty if the image is flat or
# cannot be decoded.
Described = tuple[bytes, bytes]


class Known:
    """Evaluation images, each with its set and key."""

    def __init__(self, images: list[tuple[str, str, Described]]) -> None:
        # Reversed, so that of images with equal bytes the first is reported.
        self._digests = {digest: (path, key) for path, key, (digest, _) in reversed(images)}
        self._names = [(path, key) for path, key, (_, code) in images if code]
        hashes = b"".join(code for *_, (_, code) in images)
        self._hashes = np.frombuffer(hashes, np.uint64).reshape(-1, 2).T.copy()

    def find(self, image: Described) -> tuple[str, str, int, bool] | None:
        """The equal or nearest evaluation image: set, key, distance, and whether it is equal."""
        digest, code = image
        if digest in self._digests:
            return *self._digests[digest], 0, True
        if code and self._names:
            # A linear search: 0.07 ms for 50,000 hashes (2026-11-29, one core).
            query = np.frombuffer(code, np.uint64)[:, None]
            distances = np.bitwise_count(self._hashes ^ query).sum(0, np.uint8)
            nearest = int(distances.argmin())
            if distances[nearest] <= MAX_DISTANCE:
                return *self._names[nearest], int(distances[nearest]), False
        return None


def describe(image: bytes) -> Described:
    """The digest and the perceptual hash of an encoded image."""
    digest = hashlib.blake2b(image, digest_size=16).digest()
    try:
        pixels = crop_of(image, _HASHED_SIZE, (0, 0, 0))
    except BadImageError:
        return digest, b""
    if pixels.reshape(-1, 3).std(axis=0).max() < _MIN_DEVIATION:
        return digest, b""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(grey, (_THUMBNAIL, _THUMBNAIL), interpolation=cv2.INTER_AREA)
    frequencies = cv2.dct(small.astype(np.float32))[_ROWS, _COLUMNS]
    return digest, np.packbits(frequencies > np.median(frequencies)).tobytes()


def _run_tasks(work: Callable[..., Any], manifest: Manifest, title: str, *shared: Any) -> list[Any]:
    """`work(file_index, manifest, *shared)` for each file of a data set."""
    files = [int(index) for index in np.unique(manifest.file_index)]
    return run_tasks(work, files, manifest, *shared, title=title)


def _duplicates_in(
    file_index: int, manifest: Manifest, known: Known
) -> list[tuple[int, dict[str, Any]]]:
    """The duplicates in a file: sample numbers, and rows of `_LIST_SCHEMA`."""
    return [
        (sample, dict(zip(_LIST_SCHEMA.names, (key, *match), strict=True)))
        for sample, key, image in _described_in(file_index, manifest)
        if (match := known.find(image))
    ]


def _described_in(file_index: int, manifest: Manifest) -> list[tuple[int, str, Described]]:
    """(sample, key, digest and hash) of every image of a file."""
    reader, images = RowGroupReader(manifest), list[tuple[int, str, Described]]()
    for group in np.flatnonzero(manifest.file_index == file_index).tolist():
        rows, samples = reader.read(group), manifest.samples_of(group).tolist()
        for sample, row in zip(samples, manifest.stored_rows(group).tolist(), strict=True):
            key = rows.key(row)
            try:
                images.append((sample, key, describe(rows.image(row))))
            except ValueError as error:
                where = f"{key!r} in {manifest.shard_location(group).path!r}"
                raise ValueError(f"{where}: {error}; run `vit-ray verify`") from error
    return images
