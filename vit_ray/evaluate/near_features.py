"""Images of one data set whose features are close to those of others, by their cosine."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from vit_ray.evaluate.feature_files import read_facts, read_features
from vit_ray.evaluate.few_shot import unit_rows
from vit_ray.storage import Location

_OF_THE_SET: Final = (
    "data_fingerprint", "num_images", "with_logits", "is_complete", "files", "speed",
)  # fmt: skip
"""Keys in which features of one model may differ."""
_ROWS_AT_A_TIME: Final = 1024


def near_features(
    source: Location, others: Sequence[Location], min_cosine: float
) -> Iterator[tuple[int, str, int, str, float]]:
    """Images of `source` close to one of the others: linear time in it, and in all others together.

    The features of the others are in memory, those of `source` a file at a time.

    Returns:
        Sample number and key of the image, which of the others has its nearest image, the key
        there, and their cosine.
    """
    parts = [
        (place, part) for place, one in enumerate(others)
        for part in read_features(one, ("key", "feature"))
    ]  # fmt: skip
    known = unit_rows(np.concatenate([part["feature"] for _, part in parts]))
    names = [(place, str(key)) for place, part in parts for key in part["key"]]
    for part in read_features(source, ("key", "sample", "feature")):
        for first in range(0, len(part["key"]), _ROWS_AT_A_TIME):
            some = slice(first, first + _ROWS_AT_A_TIME)
            cosines = unit_rows(part["feature"][some]) @ known.T
            nearest = cosines.argmax(axis=1)
            best = cosines[np.arange(len(nearest)), nearest]
            for row in np.flatnonzero(best >= min_cosine).tolist():
                at = names[int(nearest[row])]
                key, sample = str(part["key"][some][row]), int(part["sample"][some][row])
                yield sample, key, *at, float(best[row])


def check_same_model(folders: Sequence[Location], fingerprints: Sequence[str]) -> None:
    """Check where some features come from, before they are compared.

    Args:
        fingerprints: of the data sets, in the order of the folders.

    Raises:
        ValueError: features are incomplete, of another data set, or not all of one model.
    """
    first: dict[str, object] | None = None
    for folder, fingerprint in zip(folders, fingerprints, strict=True):
        facts = read_facts(folder)
        if facts is None or not facts.get("is_complete"):
            raise ValueError(
                f"{folder.uri} holds no complete set of features; run `vit-ray extract_features`"
            )
        if facts["data_fingerprint"] != fingerprint:
            raise ValueError(
                f"{folder.uri} has the features of another data set ({facts['data_fingerprint']}, "
                f"not {fingerprint}); give the folders in the order of the data sets"
            )
        of_model = {key: value for key, value in facts.items() if key not in _OF_THE_SET}
        first = first or of_model
        if differing := sorted(k for k in of_model if of_model[k] != first.get(k)):
            raise ValueError(
                f"{folders[0].uri} and {folder.uri} have features of different models "
                f"({', '.join(differing)}); extract both with one model"
            )
