"""Several data sets as one: their row groups one after the other, under the same classes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest, ShardFile


@dataclass(frozen=True, eq=False)
class JoinedManifest(Manifest):
    """Data sets that are read as one; `root` is empty, and files have their whole addresses.

    Attributes:
        paths: where each was opened from.
        bounds: the first row group of each, and the number of all at the end.
        weights: whole numbers in proportion to the samples that each gives.
    """

    paths: tuple[str, ...] = ()
    bounds: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()

    @property
    def num_sets(self) -> int:
        """Data sets that are read together."""
        return len(self.paths)

    @cached_property
    def parts(self) -> list[Manifest]:
        """Each data set by itself, with its own row group and sample numbers."""
        return [_part(self, index) for index in range(self.num_sets)]

    def __getstate__(self) -> dict[str, Any]:
        """Without `parts`, which would be sent along as copies."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def part_of(self, group: int) -> int:
        """Which data set a row group belongs to."""
        return int(np.searchsorted(self.bounds, group, side="right")) - 1


def join(manifests: Sequence[Manifest], weights: Sequence[float]) -> JoinedManifest:
    """One manifest of several, which must have the same classes in the same order.

    Raises:
        ValueError: their classes differ, with the first class that does.
    """
    first = manifests[0]
    for other in manifests[1:]:
        _check_classes(first, other)
    digest = hashlib.sha256()
    for manifest, weight in zip(manifests, _whole(weights), strict=True):
        digest.update(f"{manifest.fingerprint} {weight}\n".encode())
    return JoinedManifest(
        path=", ".join(m.path for m in manifests),
        root="",
        num_images=sum(m.num_images for m in manifests),
        classes=first.classes,
        max_labels=max(m.max_labels for m in manifests),
        fingerprint=digest.hexdigest()[:16],
        files=[_addressed(m, file) for m in manifests for file in m.files],
        file_index=_stacked([m.file_index for m in manifests], [len(m.files) for m in manifests]),
        row_group=np.concatenate([m.row_group for m in manifests]),
        rows=np.concatenate([m.rows for m in manifests]),
        bytes=np.concatenate([m.bytes for m in manifests]),
        dropped=_dropped(manifests),
        crc32=np.concatenate([m.crc32 for m in manifests]),
        paths=tuple(m.path for m in manifests),
        bounds=tuple(_bounds(manifests)),
        weights=tuple(_whole(weights)),
    )


def _check_classes(one: Manifest, other: Manifest) -> None:
    if one.classes == other.classes:
        return
    pairs = enumerate(zip(one.classes, other.classes, strict=False))
    differing = [f"class {i} is {a!r} and {b!r}" for i, (a, b) in pairs if a != b]
    raise ValueError(
        f"data.train: {one.path} has {one.num_classes} classes and {other.path} has "
        f"{other.num_classes}, and they are not the same ({', '.join(differing[:1]) or 'so far'}); "
        "convert both with one list of classes (convert.classes)"
    )


def _whole(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportions that a person has written."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    return [weight // gcd(*whole) for weight in whole]


def _bounds(manifests: Sequence[Manifest]) -> list[int]:
    return np.concatenate([[0], np.cumsum([m.num_row_groups for m in manifests])]).tolist()


def _addressed(manifest: Manifest, file: ShardFile) -> ShardFile:
    return replace(file, path=f"{manifest.root.rstrip('/')}/{file.path}")


def _stacked(indices: list[NDArray[np.int32]], counts: list[int]) -> NDArray[np.int32]:
    """Indices into lists of these lengths as indices into the lists joined."""
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return np.concatenate([i + s for i, s in zip(indices, starts, strict=True)]).astype(np.int32)


def _dropped(manifests: Sequence[Manifest]) -> dict[int, NDArray[np.int32]]:
    return {
        bound + group: rows
        for bound, manifest in zip(_bounds(manifests), manifests, strict=False)
        for group, rows in manifest.dropped.items()
    }


def _part(joined: JoinedManifest, index: int) -> Manifest:
    start, stop = joined.bounds[index : index + 2]
    groups = slice(start, stop)
    return Manifest(
        path=joined.paths[index],
        root=joined.root,
        num_images=int(joined.rows[groups].sum(dtype=np.int64)),
        classes=joined.classes,
        max_labels=joined.max_labels,
        fingerprint=joined.fingerprint,
        files=joined.files,
        file_index=joined.file_index[groups],
        row_group=joined.row_group[groups],
        rows=joined.rows[groups],
        bytes=joined.bytes[groups],
        dropped={g - start: rows for g, rows in joined.dropped.items() if start <= g < stop},
        crc32=joined.crc32[groups],
    )
