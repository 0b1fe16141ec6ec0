"""A data set to look at, for notebooks: samples by number, slices, and a grid of the first ones."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, overload

import numpy as np
from PIL import Image

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.format.manifest import open_dataset as open_manifest
from vit_ray.data.format.row_groups import EncodedRows, RowGroupReader

_SHOWN: Final = 12
_SIDE_PX: Final = 96
_KEPT_GROUPS: Final = 8
"""Row groups in memory: neighbours are read once."""


class Sample(NamedTuple):
    """One image of a data set."""

    image: Image.Image
    """As it is stored, whatever its mode and size."""
    labels: tuple[int, ...]
    """Indices into the classes; several or none where the set has such images."""
    key: str


class Dataset(Sequence[Sample]):
    """Samples of a converted data set by number, in the order in which they are stored.

    Attributes:
        manifest: counts, classes, shards and fingerprint.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._read = lru_cache(_KEPT_GROUPS)(RowGroupReader(manifest).read)

    @property
    def classes(self) -> list[str]:
        """Class names in label order."""
        return self.manifest.classes

    def __len__(self) -> int:
        return self.manifest.num_images

    @overload
    def __getitem__(self, at: int) -> Sample: ...
    @overload
    def __getitem__(self, at: slice) -> list[Sample]: ...
    def __getitem__(self, at: int | slice) -> Sample | list[Sample]:
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        number = range(len(self))[at]  # from the end where it is negative, and IndexError beyond
        rows, row = self._row(number)
        image = Image.open(io.BytesIO(rows.image(row)))
        return Sample(image, tuple(map(int, rows.labels_of(row))), rows.key(row))

    def encoded(self) -> Iterator[tuple[str, bytes]]:
        """Key and encoded image of each sample, in order."""
        for number in range(len(self)):
            rows, row = self._row(number)
            yield rows.key(row), rows.image(row)

    def _row(self, number: int) -> tuple[EncodedRows, int]:
        """The row group of a sample, and its row there."""
        first = self.manifest.first_samples
        group = int(np.searchsorted(first, number, side="right")) - 1
        return self._read(group), self.manifest.stored_row(group, number - int(first[group]))

    def names(self, sample: Sample) -> str:
        """The class names of a sample, for people."""
        return ", ".join(self.classes[label] for label in sample.labels) or "no label"

    def __repr__(self) -> str:
        return (
            f"Dataset({self.manifest.path!r}: {len(self):,} images of {len(self.classes):,} "
            f"classes, fingerprint {self.manifest.fingerprint[:12]})"
        )

    def _repr_html_(self) -> str:
        """A grid of the first images with their classes, as notebooks show it."""
        cells = []
        for sample in self[:_SHOWN]:
            content = io.BytesIO()
            sample.image.thumbnail((_SIDE_PX, _SIDE_PX))
            sample.image.convert("RGB").save(content, "PNG")
            pixels = base64.b64encode(content.getvalue()).decode()
            name, key = html.escape(self.names(sample)), html.escape(sample.key)
            cells.append(
                f'<figure style="margin:4px;width:{_SIDE_PX}px" title="{key}">'
                f'<img alt="{name}" src="data:image/png;base64,{pixels}">'
                f"<figcaption>{name}</figcaption></figure>"
            )
        grid = f'<div style="display:flex;flex-wrap:wrap">{"".join(cells)}</div>'
        return f"<p>{html.escape(repr(self))}</p>{grid}"


def open_dataset(path: str) -> Dataset:
    """Open a converted data set to look at its samples.

    Args:
        path: folder or `s3://` prefix.

    Raises:
        ValueError: there is no whole data set.
    """
    return Dataset(open_manifest(path))
