"""Several data sets as one: their row groups one after the other, under the same classes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import Any

import numpy as np

from vit_ray.data.format.manifest import Manifest, one_after_another
from vit_ray.data.format.shard_files import ShardFiles


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
        return len(self.paths)

    @property
    def terms(self) -> list[dict[str, Any]]:
        """As in `Manifest`, of each data set."""
        return list(self.origin["terms"])

    @cached_property
    def parts(self) -> list[Manifest]:
        """Each data set by itself, with its own row group and sample numbers."""
        shared = ("root", "classes", "max_labels", "fingerprint", "files")
        parts = []
        for path, start, stop in zip(self.paths, self.bounds, self.bounds[1:], strict=False):
            groups = slice(start, stop)
            dropped = {g - start: rows for g, rows in self.dropped.items() if start <= g < stop}
            columns = self.chosen(groups, self.rows[groups], dropped)
            values = {name: getattr(self, name) for name in shared}
            num_images = int(columns.rows.sum(dtype=np.int64))
            parts.append(Manifest(**vars(columns), **values, path=path, num_images=num_images))
        return parts

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
        if other.classes != first.classes:
            pairs = enumerate(zip(first.classes, other.classes, strict=False))
            differing = (f"class {i} is {a!r} and {b!r}" for i, (a, b) in pairs if a != b)
            raise ValueError(
                f"data.train: {first.path} has {first.num_classes} classes and {other.path} has "
                f"{other.num_classes}, and they are not the same ({next(differing, 'so far')}); "
                "convert both with one list of classes (convert.classes)"
            )
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    smallest = tuple(weight // gcd(*whole) for weight in whole)
    digest = hashlib.sha256()
    for manifest, weight in zip(manifests, smallest, strict=True):
        digest.update(f"{manifest.fingerprint} {weight}\n".encode())
    return JoinedManifest(
        **vars(one_after_another(manifests, [len(m.files) for m in manifests])),
        path=", ".join(m.path for m in manifests),
        root="",
        num_images=sum(m.num_images for m in manifests),
        classes=first.classes,
        max_labels=max(m.max_labels for m in manifests),
        fingerprint=digest.hexdigest()[:16],
        files=ShardFiles(
            replace(file, path=f"{m.root.rstrip('/')}/{file.path}")
            for m in manifests
            for file in m.files
        ),
        paths=tuple(m.path for m in manifests),
        bounds=tuple(np.cumsum([0, *(m.num_row_groups for m in manifests)]).tolist()),
        weights=smallest,
        largest_pixels=max(m.largest_pixels for m in manifests),
        origin={"terms": [terms for m in manifests for terms in m.terms]},
    )
