"""Parts of a data set: the images of a run, nested subsets and dev splits; no image is copied.

Rows were shuffled at conversion, so any row groups are a random sample. They are taken in an order
that depends on the seed alone, so that a smaller subset is contained in every larger one (9M / 30M
/ 90M / 303M). A dev split by class takes the rows of each class from the first row groups that have
enough of them, so that a small split needs few row groups. Only manifests are written.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.dataset import (
    MANIFEST_FILE,
    STAGING_FOLDER,
    Manifest,
    open_dataset,
    write_manifest,
)
from vit_ray.data.keyed_random import key_of, keys_of
from vit_ray.data.shards import first_labels
from vit_ray.data.shards import keys as all_keys
from vit_ray.storage import locate

# Parts of keys, so that a run's parts, subsets and dev splits differ with the same seed.
_SPLIT, _SUBSET, _DEV_SPLIT = 8, 7, 11

Int64Array = NDArray[np.int64]


def select(
    manifest: Manifest, *, seed: int, held_out_fraction: float, fraction: float
) -> tuple[Manifest, Manifest | None]:
    """The part to train on, and the part that is held out, if any.

    Args:
        held_out_fraction: of all images, rounded to whole images; 0 for none.
        fraction: of the remaining images, to train on.

    Raises:
        ValueError: a part would have no image.
    """
    key, total, held_out = key_of(_SPLIT, seed), manifest.num_images, 0
    if held_out_fraction > 0:
        held_out = round(total * held_out_fraction)
        if not 0 < held_out < total:
            raise ValueError(
                f"data.held_out_fraction={held_out_fraction} of {total} images is {held_out}; both "
                "parts need some: change it, or give a larger data set"
            )
    num_images = round((total - held_out) * fraction)
    if not 0 < num_images <= total - held_out:
        raise ValueError(
            f"data.fraction={fraction} of {total - held_out} images is {num_images}; use a "
            f"fraction from {1 / (total - held_out):.3g} to 1"
        )
    held_out_part = manifest.ranked(0, held_out, key) if held_out else None
    if num_images == total:
        return manifest, held_out_part
    return manifest.ranked(held_out, held_out + num_images, key), held_out_part


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
        keys: a file with the keys of the images to take, one per line.

    Raises:
        ValueError: not exactly one of the three is given, the subset would be empty or larger than
            the data set, a key is not in the data set, or the destination holds a data set already.
    """
    whole = open_dataset(source)
    options = {"count": count, "fraction": fraction, "keys": keys}
    if sum(value is not None for value in options.values()) != 1:
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        raise ValueError(f"subset: {text}; give one of the three")
    if keys is not None:
        return _subset_by_keys(whole, destination, keys)
    size = count if count is not None else round(whole.num_images * (fraction or 0))
    if not 0 < size <= whole.num_images:
        raise ValueError(
            f"subset: {size} of {whole.num_images} images; use from 1 to {whole.num_images}"
        )
    origin = {"subset_of": whole.fingerprint, "seed": seed, "count": size}
    return derive(whole.ranked(0, size, key_of(_SUBSET, seed)), destination, origin)


def _subset_by_keys(whole: Manifest, destination: str, keys: str) -> Manifest:
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER)
    content = locate(keys).read()
    listed = set(filter(None, content.decode("utf-8-sig").splitlines()))
    if not listed:
        raise ValueError(f"subset.keys={keys!r} lists no key; give one key per line")
    missing, is_listed = set(listed), []
    for keys_of_file in all_keys(whole):
        missing.difference_update(keys_of_file)
        is_listed.append(np.array([key in listed for key in keys_of_file]))
    if missing:
        raise ValueError(
            f"subset.keys={keys!r}: {len(missing)} of {len(listed)} keys are not in "
            f"{whole.path!r}, such as {sorted(missing)[:3]}; remove them from the list"
        )
    digest = hashlib.sha256(content).hexdigest()
    part = whole.without(np.flatnonzero(~np.concatenate(is_listed)))
    return derive(part, destination, {"subset_of": whole.fingerprint, "keys": digest})


def derive(part: Manifest, destination: str, origin: dict[str, object]) -> Manifest:
    """Write the manifest of a part of a data set, over the same shards, and open it.

    Args:
        origin: how the part was chosen; `part.about` is added.

    Raises:
        ValueError: the destination holds a data set already.
    """
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER)
    root, origin = locate(part.root).uri, part.about | origin
    write_manifest(locate(destination), replace(part, root=root, origin=origin))
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


def dev_split(
    source: str, destination: str, fraction: float, seed: int, *, by_class: bool = True
) -> tuple[str, str]:
    """Write the manifests of a training set without its dev split, and of the dev split.

    An existing split is reused: the same arguments give the same split.

    Args:
        destination: folder of all splits; each source, fraction and seed has a subfolder.
        fraction: of the images, for the dev split, rounded to whole images.
        by_class: every class is split by this fraction; otherwise images are taken regardless of
            class, as the authors of VTAB-1k do.

    Returns:
        Addresses of the training part and of the dev split.

    Raises:
        ValueError: one of the two would be without images of a class (if split by class), or empty.
    """
    whole = open_dataset(source)
    name = f"{whole.fingerprint}-{fraction:g}-{seed}{'' if by_class else '-any-class'}"
    train, dev = (locate(destination).child(name).child(part).uri for part in ("train", "dev"))
    missing = [path for path in (train, dev) if not locate(path).child(MANIFEST_FILE).exists()]
    if missing:
        is_dev = _dev_rows(whole, fraction, seed, by_class=by_class)
        origin = {"split_of": whole.fingerprint, "dev_fraction": fraction, "seed": seed}
        for path in missing:
            part = whole.without(np.flatnonzero(is_dev == (path == train)))
            derive(part, path, origin | {"is_dev": path == dev})
    return train, dev


def _dev_rows(whole: Manifest, fraction: float, seed: int, *, by_class: bool) -> NDArray[np.bool_]:
    labels = np.concatenate(list(first_labels(whole))).astype(np.int64)
    counts = np.bincount(labels[labels >= 0], minlength=whole.num_classes)
    keys = keys_of(key_of(_DEV_SPLIT, seed), np.arange(whole.num_row_groups))
    order = np.argsort(np.repeat(keys, whole.rows), kind="stable")  # one row group after another
    order = order[labels[order] >= 0]
    is_dev = np.zeros(len(labels), np.bool_)
    if not by_class:
        total = round(len(order) * fraction)
        if not 0 < total < len(order):
            raise ValueError(
                f"sweep.dev_fraction={fraction:g} of {len(order)} images is {total}, but both the "
                "dev split and the rest need some; change it, or add images"
            )
        is_dev[order[:total]] = True
    else:  # the first rows of each class
        quotas = class_quotas(counts, fraction, whole.classes)
        grouped = order[np.argsort(labels[order], kind="stable")]
        for first, quota in zip(np.cumsum(counts) - counts, quotas, strict=True):
            is_dev[grouped[first : first + quota]] = True
    return is_dev


def class_quotas(counts: Int64Array, fraction: float, classes: Sequence[str]) -> Int64Array:
    """Dev images of each class: in proportion, but at least one and not all.

    Args:
        counts: (K,), images of each class; a class without images gets 0.

    Raises:
        ValueError: this is not possible; the rarest class is named.
    """
    num_images, has_any = int(counts.sum()), counts > 0
    num_classes, total = int(has_any.sum()), round(num_images * fraction)
    if (counts == 1).any() or not num_classes <= total <= num_images - num_classes:
        rarest = int(np.argmin(np.where(has_any, counts, num_images)))
        raise ValueError(
            f"sweep.dev_fraction={fraction:g} of {num_images} images is {total}, but each of the "
            f"{num_classes} classes needs an image in the dev split and one in the rest; use a "
            f"fraction that gives {num_classes} to {num_images - num_classes} images, and classes "
            f"of two images or more (the rarest is {classes[rarest]!r} with {counts[rarest]})"
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
