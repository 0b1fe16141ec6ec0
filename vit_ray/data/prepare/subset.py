"""Nested subsets of a data set, written as manifests only: no image is copied.

Rows were shuffled at conversion, so any row groups are a random sample. They are taken in an order
that the seed fixes, so that a smaller subset is part of every larger one (9M / 30M / 90M / 303M).
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.dataset import (
    MANIFEST_FILE,
    STAGING_FOLDER,
    Manifest,
    RowGroupColumns,
    open_dataset,
    write_manifest,
)
from vit_ray.data.keyed_random import key_of, keys_of
from vit_ray.data.prepare.progress import Shown, report_done
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.shards import RowGroupReader
from vit_ray.storage import locate

_SUBSET: Final = 7


def subset(
    source: str,
    destination: str,
    *,
    count: int | None = None,
    fraction: float | None = None,
    keys: str | None = None,
    seed: int = 0,
) -> Manifest:
    """Write the manifest of a subset of a data set.

    Args:
        count, fraction: images to take at random; give one of the three.
        keys: a file with the keys of the images to take. Needs Ray.

    Raises:
        ValueError: not exactly one of them is given, the subset would be empty or larger than the
            set, a key is not in the data set, or the destination holds a data set already.
    """
    whole = open_dataset(source)
    given = {"count": count, "fraction": fraction, "keys": keys}
    if len([name for name, value in given.items() if value is not None]) != 1:
        text = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"subset: {text}; give one of the three")
    if keys is not None:
        return _listed(whole, destination, keys)
    wanted = count if count is not None else round(whole.num_images * (fraction or 0))
    if not 0 < wanted <= whole.num_images:
        raise ValueError(
            f"subset: {wanted} of {whole.num_images} images; use from 1 to {whole.num_images}"
        )
    order = np.argsort(keys_of(key_of(_SUBSET, seed), np.arange(whole.num_row_groups)))
    ends = np.cumsum(whole.rows[order], dtype=np.int64)
    last = int(np.searchsorted(ends, wanted))
    partial = int(order[last])
    kept = int(whole.rows[partial]) - (int(ends[last]) - wanted)
    left_out = {partial: whole.stored_rows(partial)[kept:].tolist()}
    origin = {"subset_of": whole.fingerprint, "seed": seed, "count": wanted}
    return derive(whole, left_out, destination, origin, groups=order[: last + 1])


def _listed(whole: Manifest, destination: str, keys: str) -> Manifest:
    """The images whose keys are listed."""
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER)
    content = locate(keys).read()
    listed = set(filter(None, content.decode("utf-8-sig").splitlines()))
    files = [int(index) for index in np.unique(whole.file_index)]
    shown = Shown(f"reading {whole.path}", whole.num_images)
    results = run_tasks(_unlisted_rows, files, whole, listed, shown=shown)
    left_out = {group: rows for found, _ in results for group, rows in found.items()}
    taken = {key for _, found in results for key in found}
    if missing := sorted(listed - taken):
        raise ValueError(
            f"subset.keys={keys!r}: {len(missing)} of {len(listed)} keys are not in "
            f"{whole.path!r}, such as {missing[:3]}; remove them from the list"
        )
    if not listed:
        raise ValueError(f"subset.keys={keys!r} lists no key; give one key per line")
    digest = hashlib.sha256(content).hexdigest()
    origin: dict[str, object] = {"subset_of": whole.fingerprint, "keys": digest}
    return derive(whole, left_out, destination, origin)


def _unlisted_rows(
    file_index: int, whole: Manifest, listed: set[str]
) -> tuple[dict[int, list[int]], list[str]]:
    """The stored rows of each row group that are not listed, and which of the keys were found."""
    reader = RowGroupReader(whole)
    left_out, taken, num_images = {}, [], 0
    for group in np.flatnonzero(whole.file_index == file_index).tolist():
        pairs = list(zip(whole.stored_rows(group).tolist(), reader.keys(group), strict=True))
        left_out[group] = [row for row, key in pairs if key not in listed]
        taken += [key for _, key in pairs if key in listed]
        num_images += len(pairs)
        report_done(num_images)
    return left_out, taken


def derive(
    whole: Manifest,
    left_out: Mapping[int, Iterable[int]],
    destination: str,
    origin: dict[str, object],
    groups: NDArray[np.int64] | None = None,
) -> Manifest:
    """Write a manifest over the shards of another data set, and open it.

    Args:
        left_out: for a row group, the stored rows that the new set lacks, in addition to those that
            the other set lacks.
        groups: row groups to take, in any order; None = all. Groups without rows are left out.

    Raises:
        ValueError: the destination holds a data set already.
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
        origin=whole.about | origin,
        largest_pixels=whole.largest_pixels,
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
