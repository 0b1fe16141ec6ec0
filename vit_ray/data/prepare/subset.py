"""Nested parts of a data set by manifest alone: no image is copied.

Rows were shuffled at conversion, so any row groups are a random sample. They are taken in an order
that the seed fixes, so that a smaller part lies inside every larger one (9M / 30M / 90M / 303M).
"""

from dataclasses import replace
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
    wanted = _wanted(whole, count, fraction)
    order = np.argsort(keys_of(key_of(_SUBSET, seed), np.arange(whole.num_row_groups)))
    ends = np.cumsum(whole.rows[order], dtype=np.int64)
    last = int(np.searchsorted(ends, wanted))
    columns = _columns(whole, order[: last + 1], surplus=int(ends[last]) - wanted)
    origin = {"subset_of": whole.fingerprint, "seed": seed, "count": wanted}
    return derive(whole, columns, destination, origin)


def derive(
    whole: Manifest,
    columns: RowGroupColumns,
    destination: str,
    origin: dict[str, object],
) -> Manifest:
    """Write a manifest over the shards of another data set, and open it.

    Raises:
        ValueError: if the destination holds a data set already.
    """
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER)
    write_manifest(
        locate(destination),
        columns,
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
                f"({name}); choose another folder, or move the file away."
            )


def _wanted(whole: Manifest, count: int | None, fraction: float | None) -> int:
    if (count is None) == (fraction is None):
        raise ValueError(f"subset: count={count} and fraction={fraction}; give one of the two.")
    wanted = count if count is not None else round(whole.num_images * float(fraction or 0))
    if not 0 < wanted <= whole.num_images:
        raise ValueError(
            f"subset: {wanted} of {whole.num_images} images; use from 1 to {whole.num_images}."
        )
    return wanted


def _columns(whole: Manifest, groups: NDArray[np.int64], surplus: int) -> RowGroupColumns:
    """The chosen row groups in the data set's order, the last chosen without `surplus` rows."""
    partial = int(groups[-1])
    chosen = np.sort(groups)
    rows = whole.rows[chosen].copy()
    dropped = {
        place: whole.dropped[int(group)]
        for place, group in enumerate(chosen)
        if int(group) in whole.dropped
    }
    columns = RowGroupColumns.chosen(whole, chosen, rows, dropped)
    if surplus == 0:
        return columns
    place = int(np.searchsorted(chosen, partial))
    kept = int(rows[place]) - surplus
    beyond = [whole.stored_row(partial, row) for row in range(kept, int(rows[place]))]
    earlier = whole.dropped.get(partial, np.empty(0, np.int32))
    rows[place] = kept
    return replace(columns, dropped=dropped | {place: _sorted([*earlier, *beyond])})


def _sorted(rows: list[int]) -> NDArray[np.int32]:
    return np.array(sorted(int(row) for row in rows), np.int32)
