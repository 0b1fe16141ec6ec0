"""A dev split of a training set, by class or not, as two manifests over its shards.

Rows were shuffled at conversion, so those of each class are taken from as few row groups as hold
enough of them: reading a small dev split reads a small part of the bytes.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.dataset import MANIFEST_FILE, Manifest, open_dataset
from vit_ray.data.keyed_random import key_of, keys_of
from vit_ray.data.parts import derive
from vit_ray.data.shards import first_labels
from vit_ray.storage import locate

_DEV_SPLIT = 11
Int64Array = NDArray[np.int64]


def dev_split(
    source: str, destination: str, fraction: float, seed: int, *, by_class: bool = True
) -> tuple[str, str]:
    """Write the manifests of a training set without its dev split, and of the dev split.

    An existing split is reused: the same arguments give the same split.

    Args:
        destination: folder of the two; with a separate folder for each source, fraction and seed.
        fraction: share of the images that are held out, rounded to whole images.
        by_class: every class has its share; otherwise images are taken regardless of class, as the
            authors of VTAB-1k do.

    Returns:
        Addresses of the rest and of the dev split.

    Raises:
        ValueError: a class would have no image in one of them; it is named. Not by class: one of
            them would have no image at all.
    """
    whole = open_dataset(source)
    name = f"{whole.fingerprint}-{fraction:g}-{seed}{'' if by_class else '-any-class'}"
    rest, dev = (locate(destination).child(name).child(part).uri for part in ("train", "dev"))
    if not all(locate(path).child(MANIFEST_FILE).exists() for path in (rest, dev)):
        is_dev = _dev_rows(whole, fraction, seed, by_class=by_class)
        origin = {"split_of": whole.fingerprint, "dev_fraction": fraction, "seed": seed}
        for path, gone in ((rest, is_dev), (dev, ~is_dev)):
            if not locate(path).child(MANIFEST_FILE).exists():
                part = whole.without(np.flatnonzero(gone))
                derive(part, path, origin | {"is_dev": path == dev})
    return rest, dev


def _dev_rows(whole: Manifest, fraction: float, seed: int, *, by_class: bool) -> NDArray[np.bool_]:
    """Which rows are held out, in the order of the data set."""
    labels = np.concatenate(list(first_labels(whole))).astype(np.int64)
    counts = np.bincount(labels[labels >= 0], minlength=whole.num_classes)
    quotas = class_quotas(counts, fraction, whole.classes) if by_class else None
    keys = keys_of(key_of(_DEV_SPLIT, seed), np.arange(whole.num_row_groups))
    order = np.argsort(np.repeat(keys, whole.rows), kind="stable")  # whole row groups in turn
    order = order[labels[order] >= 0]
    is_dev = np.zeros(len(labels), np.bool_)
    if quotas is None:
        total = round(len(order) * fraction)
        if not 0 < total < len(order):
            raise ValueError(
                f"sweep.dev_fraction={fraction:g} of {len(order)} images is {total}, but both the "
                "dev split and the rest need some; change it, or add images"
            )
        is_dev[order[:total]] = True
    else:  # the first of each class
        by_label = np.argsort(labels[order], kind="stable")
        places = np.empty_like(order)
        places[by_label] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        is_dev[order[places < quotas[labels[order]]]] = True
    return is_dev


def class_quotas(counts: Int64Array, fraction: float, classes: Sequence[str]) -> Int64Array:
    """Images of each class that are held out: in proportion, at least one, and never all.

    Args:
        counts: (K,), images of each class; a class without any stays without.

    Raises:
        ValueError: this is not possible for some class.
    """
    total = round(float(counts.sum()) * fraction)
    has_any = counts > 0
    if (counts == 1).any():
        name = classes[int(np.argmax(counts == 1))]
        raise ValueError(
            f"sweep.dev_fraction={fraction:g}: class {name!r} has a single image, so the dev split "
            "or the rest would have none of it; add images to it, or remove it from the set"
        )
    if total < has_any.sum():
        name = _rarest(counts, classes)
        raise ValueError(
            f"sweep.dev_fraction={fraction:g} of {counts.sum()} images is {total}, fewer than the "
            f"{has_any.sum()} classes: class {name!r} would be empty in the dev split; use at "
            f"least {has_any.sum() / counts.sum():.3g}"
        )
    if total > np.maximum(counts - 1, 0).sum():
        name, most = _rarest(counts, classes), np.maximum(counts - 1, 0).sum() / counts.sum()
        raise ValueError(
            f"sweep.dev_fraction={fraction:g} of {counts.sum()} images is {total}: class {name!r} "
            f"would have none left to train on; use at most {math.floor(most * 1000) / 1000:g}"
        )
    exact = counts * (total / counts.sum())
    quotas = np.clip(np.floor(exact), has_any, np.maximum(counts - 1, 0)).astype(np.int64)
    while quotas.sum() != total:
        gap = exact - quotas
        if quotas.sum() < total:
            quotas[np.argmax(np.where(quotas < counts - 1, gap, -np.inf))] += 1
        else:
            quotas[np.argmin(np.where(quotas > 1, gap, np.inf))] -= 1
    return quotas


def _rarest(counts: Int64Array, classes: Sequence[str]) -> str:
    """The class with the fewest images among those that have any."""
    return classes[int(np.argmin(np.where(counts > 0, counts, counts.max() + 1)))]
