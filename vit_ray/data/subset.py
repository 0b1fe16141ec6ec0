"""Nested subsets of a data set, written as manifests only: no image is copied.

Rows were shuffled at conversion, so any row groups are a random sample. They are taken in an order
that the seed fixes, so that a smaller subset is part of every larger one (9M / 30M / 90M / 303M).
"""

import hashlib
from typing import Final

import numpy as np

from vit_ray.data.dataset import MANIFEST_FILE, STAGING_FOLDER, Manifest, open_dataset, write_part
from vit_ray.data.keyed_random import key_of
from vit_ray.data.shards import keys as all_keys
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
        keys: a file with the keys of the images to take.

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
    origin = {"subset_of": whole.fingerprint, "seed": seed, "count": wanted}
    return derive(whole.ranked(0, wanted, key_of(_SUBSET, seed)), destination, origin)


def _listed(whole: Manifest, destination: str, keys: str) -> Manifest:
    """The images whose keys are listed."""
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER)
    content = locate(keys).read()
    listed = set(filter(None, content.decode("utf-8-sig").splitlines()))
    if not listed:
        raise ValueError(f"subset.keys={keys!r} lists no key; give one key per line")
    missing, is_listed = set(listed), []
    for of_file in all_keys(whole):
        missing.difference_update(of_file)
        is_listed.append(np.array([key in listed for key in of_file]))
    if missing:
        raise ValueError(
            f"subset.keys={keys!r}: {len(missing)} of {len(listed)} keys are not in "
            f"{whole.path!r}, such as {sorted(missing)[:3]}; remove them from the list"
        )
    digest = hashlib.sha256(content).hexdigest()
    origin: dict[str, object] = {"subset_of": whole.fingerprint, "keys": digest}
    return derive(whole.without(np.flatnonzero(~np.concatenate(is_listed))), destination, origin)


def derive(part: Manifest, destination: str, origin: dict[str, object]) -> Manifest:
    """Write a part of a data set as a manifest over the shards of the whole, and open it.

    Raises:
        ValueError: the destination holds a data set already.
    """
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER)
    write_part(locate(destination), part, origin)
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
