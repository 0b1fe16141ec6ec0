"""Removes from a pre-training set what it shares with evaluation sets (ViT paper 4.1, after BiT).

A row is a duplicate if its bytes equal those of an evaluation image, or if its perceptual hash is
within `max_distance` bits of one. Linear in the data: each image is hashed once, and looked up in
an index of the evaluation hashes. The result is a manifest alone and a list of what was left out.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest, RowGroupColumns, open_dataset
from vit_ray.data.format.row_groups import ChangedImageError, RowGroupReader
from vit_ray.data.images.crops import Augmentation, BadImageError, decode, training_crop
from vit_ray.data.images.perceptual_hash import HashIndex, hashes_under_crops, perceptual_hash
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.subset import derive
from vit_ray.storage import locate

DUPLICATES_FILE: Final = "duplicates.parquet"
_HASHED: Final = Augmentation("resize", size=64, flip=False)


@dataclass(frozen=True)
class Duplicate:
    """A row of the pre-training set that shows an evaluation image; 0 bits of distance if exact."""

    key: str
    evaluation_set: str
    evaluation_key: str
    distance: int
    is_exact: bool


@dataclass(frozen=True)
class DeduplicateReport:
    """What was left out of `num_images`."""

    num_images: int
    num_exact: int
    num_near: int
    duplicates: list[Duplicate]


def deduplicate(
    source: str,
    evaluation_sets: list[str],
    destination: str,
    *,
    max_distance: int = 60,
    num_cpus: float = 1.0,
) -> DeduplicateReport:
    """Write the manifest of a data set without the images of evaluation sets.

    Args:
        max_distance: bits of 256 by which two hashes may differ; measured with
            benchmarks/data_deduplicate.py.

    Raises:
        ValueError: if no evaluation set is given, nothing would be left, or the destination holds
            a data set already.
    """
    if not evaluation_sets:
        raise ValueError("deduplicate: evaluation_sets is empty; name at least one data set.")
    whole = open_dataset(source)
    known = ray.put(_index(evaluation_sets, num_cpus))
    files = [int(i) for i in np.unique(whole.file_index)]
    found = run_tasks(_DuplicateFinder(ray.put(whole), known, max_distance), files, num_cpus)
    rows = [row for result in found for row in json.loads(result)]
    columns = _without(whole, rows)
    if not len(columns.rows):
        raise ValueError(
            f"deduplicate: all of {source!r} is in {evaluation_sets}, so nothing is left; "
            f"check which set is which."
        )
    duplicates = [Duplicate(**row["duplicate"]) for row in rows]
    _write_list(destination, duplicates)
    origin = {"deduplicated": whole.fingerprint, "evaluation_sets": evaluation_sets}
    derive(whole, columns, destination, {**origin, "max_distance": max_distance})
    num_exact = sum(duplicate.is_exact for duplicate in duplicates)
    return DeduplicateReport(whole.num_images, num_exact, len(duplicates) - num_exact, duplicates)


@dataclass(frozen=True)
class _Known:
    """Everything about the evaluation images; `owners` maps a hash to its image."""

    index: HashIndex
    owners: NDArray[np.int64]
    digests: dict[bytes, int]
    names: list[tuple[str, str]]


def _index(evaluation_sets: list[str], num_cpus: float) -> _Known:
    hashes: list[NDArray[np.uint8]] = []
    digests: dict[bytes, int] = {}
    names: list[tuple[str, str]] = []
    for path in evaluation_sets:
        manifest = open_dataset(path)
        files = [int(i) for i in np.unique(manifest.file_index)]
        hasher = _EvaluationHasher(ray.put(manifest))
        for part in sorted(run_tasks(hasher, files, num_cpus), key=lambda part: part["file"]):
            parted = np.frombuffer(part["hashes"], np.uint8).reshape(len(part["keys"]), -1, 32)
            for i, key in enumerate(part["keys"]):
                digests[part["digests"][16 * i : 16 * (i + 1)]] = len(names)
                names.append((path, str(key)))
                hashes.append(parted[i])
    owners = np.repeat(np.arange(len(names)), [len(h) for h in hashes])
    return _Known(HashIndex(np.concatenate(hashes)), owners, digests, names)


@dataclass(frozen=True)
class _EvaluationHasher:
    manifest: Any

    def __call__(self, file_index: int) -> dict[str, Any]:
        keys, digests, hashes = [], [], []
        for _, _, key, image in _images(ray.get(self.manifest), file_index):
            try:
                hashes.append(hashes_under_crops(decode(image)).tobytes())
            except BadImageError:
                continue
            keys.append(key)
            digests.append(_digest(image))
        return {
            "file": file_index,
            "keys": keys,
            "digests": b"".join(digests),
            "hashes": b"".join(hashes),
        }


@dataclass(frozen=True)
class _DuplicateFinder:
    manifest: Any
    known: Any
    max_distance: int

    def __call__(self, file_index: int) -> str:
        known: _Known = ray.get(self.known)
        found: list[dict[str, Any]] = []
        pending: list[tuple[int, int, str, NDArray[np.uint8]]] = []
        for group, row, key, image in _images(ray.get(self.manifest), file_index):
            exact = known.digests.get(_digest(image))
            if exact is not None:
                found.append(_found(group, row, key, known.names[exact], 0, is_exact=True))
                continue
            try:
                small = training_crop(image, _HASHED, (0, 0, 0))
            except BadImageError:
                continue
            pending.append((group, row, key, perceptual_hash(small)))
        return json.dumps(found + self._near(known, pending))

    def _near(
        self, known: _Known, rows: list[tuple[int, int, str, NDArray[np.uint8]]]
    ) -> list[dict[str, Any]]:
        if not rows:
            return []
        best, distances = known.index.nearest(np.stack([row[3] for row in rows]))
        return [
            _found(group, row, key, known.names[known.owners[owner]], int(bits), is_exact=False)
            for (group, row, key, _), owner, bits in zip(rows, best, distances, strict=True)
            if owner >= 0 and bits <= self.max_distance
        ]


def _found(
    group: int, row: int, key: str, name: tuple[str, str], distance: int, *, is_exact: bool
) -> dict[str, Any]:
    duplicate = {
        "key": key,
        "evaluation_set": name[0],
        "evaluation_key": name[1],
        "distance": distance,
        "is_exact": is_exact,
    }
    return {"group": group, "row": row, "duplicate": duplicate}


def _images(manifest: Manifest, file_index: int) -> Any:
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
                raise ValueError(f"{key!r} in {shard!r}: {error}; run jobs/verify.py.") from error


def _digest(image: bytes) -> bytes:
    return hashlib.blake2b(image, digest_size=16).digest()


def _without(whole: Manifest, rows: list[dict[str, Any]]) -> RowGroupColumns:
    """The row groups of a data set, less some stored rows, less row groups left empty."""
    dropped = {group: {int(r) for r in held} for group, held in whole.dropped.items()}
    counts = whole.rows.copy()
    for row in rows:
        dropped.setdefault(row["group"], set()).add(row["row"])
        counts[row["group"]] -= 1
    kept = np.flatnonzero(counts)
    lists = {
        place: np.array(sorted(dropped[int(group)]), np.int32)
        for place, group in enumerate(kept)
        if int(group) in dropped
    }
    return RowGroupColumns(
        whole.file_index[kept], whole.row_group[kept], counts[kept], whole.bytes[kept], lists
    )


def _write_list(destination: str, duplicates: list[Duplicate]) -> None:
    table = pa.Table.from_pylist([vars(d) for d in duplicates], schema=_LIST_SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    locate(destination).child(DUPLICATES_FILE).write(sink.getvalue().to_pybytes())


_LIST_SCHEMA: Final = pa.schema(
    [
        ("key", pa.string()),
        ("evaluation_set", pa.string()),
        ("evaluation_key", pa.string()),
        ("distance", pa.int32()),
        ("is_exact", pa.bool_()),
    ]
)
