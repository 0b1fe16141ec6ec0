"""Nested parts of a data set by manifest alone: no image is copied.

Rows were shuffled at conversion, so any row groups are a random sample. They are taken in an order
that the seed fixes, so that a smaller part lies inside every larger one (9M / 30M / 90M / 303M).
"""

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest, RowGroupColumns, open_dataset, write_manifest
from vit_ray.data.format.schema import MANIFEST_FILE, STAGING_FOLDER
from vit_ray.data.order.keyed_random import key_of, keys_of
from vit_ray.storage import locate

_SUBSET: Final = 7


def subset(
    source: str,
    destination: str,
    *,
    count: int | None = None,
    fraction: float | None = None,
    seed: int = 0,
) -> Manifest:
    """Write the manifest of a part of a data set.

    Args:
        count, fraction: images to take; give one of them.

    Raises:
        ValueError: if neither or both are given, the part would be empty or more than all, or the
            destination holds a data set already.
    """
    whole = open_dataset(source)
    if (count is None) == (fraction is None):
        raise ValueError(f"subset: count={count} and fraction={fraction}; give one of the two")
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"subset.fraction={fraction}; use a number above 0, up to 1")
    wanted = count if count is not None else round(whole.num_images * (fraction or 0))
    if not 0 < wanted <= whole.num_images:
        raise ValueError(
            f"subset: {wanted} of {whole.num_images} images; use from 1 to {whole.num_images}"
        )
    order = np.argsort(keys_of(key_of(_SUBSET, seed), np.arange(whole.num_row_groups)))
    ends = np.cumsum(whole.rows[order], dtype=np.int64)
    last = int(np.searchsorted(ends, wanted))
    partial = int(order[last])
    rows = int(whole.rows[partial])
    beyond = range(rows - (int(ends[last]) - wanted), rows)
    left_out = {partial: [whole.stored_row(partial, row) for row in beyond]}
    origin = {"subset_of": whole.fingerprint, "seed": seed, "count": wanted}
    return derive(whole, left_out, destination, origin, groups=order[: last + 1])


def derive(
    whole: Manifest,
    left_out: Mapping[int, Iterable[int]],
    destination: str,
    origin: dict[str, object],
    groups: NDArray[np.int64] | None = None,
) -> Manifest:
    """Write a manifest over the shards of another data set, and open it.

    Args:
        left_out: for a row group, which of its stored rows the new set lacks, besides those that
            the other one lacks.
        groups: row groups to take, in any order; None = all. Those without rows are left out.

    Raises:
        ValueError: if the destination holds a data set already.
    """
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER)
    chosen = np.arange(whole.num_row_groups) if groups is None else np.sort(groups)
    gone = {g: sorted({*left_out.get(g, ()), *whole.dropped.get(g, ())})
            for g in {*left_out, *whole.dropped}}  # fmt: skip
    rows = whole.rows.copy()
    for group, stored in gone.items():
        rows[group] -= len(stored) - len(whole.dropped.get(group, ()))
    chosen = chosen[rows[chosen] > 0]
    dropped = {
        place: np.array(gone[group], np.int32)
        for place, group in enumerate(chosen.tolist())
        if gone.get(group)
    }
    write_manifest(
        locate(destination),
        RowGroupColumns.chosen(whole, chosen, rows[chosen], dropped),
        files=whole.files,
        classes=whole.classes,
        max_labels=whole.max_labels,
        text_columns=whole.text_columns,
        root=locate(whole.root).uri,
        origin=origin,
    )
    return open_dataset(destination)


def refuse_existing(destination: str, *names: str) -> None:
    """Raise a ValueError if the destination holds a file of one of the names."""
    locate(destination).refuse_file_in_its_place("destination")
    for name in names:
        if locate(destination).child(name).exists():
            raise ValueError(
                f"destination={destination!r} already holds a data set, or a part of one "
                f"({name}); choose another folder, or move the file away"
            )
