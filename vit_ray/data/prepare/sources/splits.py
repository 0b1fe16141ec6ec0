"""The split of a file or folder, by the usual names, and the choice of one.

As the Hugging Face hub reads names: `data/NAME-00000-of-00002.parquet` is in the split NAME;
otherwise the first word that names a split decides, in the file's name or in its folders'.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

ALL_SPLITS: Final = "all"
"""The value of `convert.split` that takes every split as one data set."""

_WORDS: Final = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF_WORD: Final = {word: split for split, words in _WORDS.items() for word in words}
_NUMBERED: Final = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-\w+)?")

Item = TypeVar("Item")


class SeveralSplitsError(ValueError):
    """A source has several splits, and none is chosen."""

    def __init__(self, message: str, splits: tuple[str | None, ...] = ()) -> None:
        super().__init__(message)
        self.splits = splits


def named_split(name: str) -> str | None:
    """The split with exactly this name; None if there is none."""
    return _SPLIT_OF_WORD.get(name.lower())


def split_of(path: str) -> str | None:
    """The split of a file by its relative path; None if the path has no split name."""
    *folders, file = path.split("/")
    stem = file.partition(".")[0]
    if numbered := _NUMBERED.fullmatch(stem):
        return named_split(numbered[1]) or numbered[1]
    for part in (stem, *reversed(folders)):
        for word in re.findall("[a-z]+", part.lower()):
            if word in _SPLIT_OF_WORD:
                return _SPLIT_OF_WORD[word]
    return None


def choose_split(
    items: Mapping[str | None, Sequence[Item]], wanted: str | None, source: str
) -> list[Item]:
    """The items of the wanted split; of the only one there is if none is wanted.

    Args:
        items: by split; None is the key of items without a split.

    Raises:
        SeveralSplitsError: there are several and none is wanted.
        ValueError: the wanted split does not exist.
    """
    listed = ", ".join(split or "(files without a split)" for split in sorted(items, key=str))
    if wanted == ALL_SPLITS or (wanted is None and len(items) == 1):
        return [item for split in sorted(items, key=str) for item in items[split]]
    if wanted is None:
        raise SeveralSplitsError(
            f"convert.source={source!r} has several splits: {listed}; give one as convert.split, "
            f"or convert.split={ALL_SPLITS} to make one data set from all of them",
            tuple(items),
        )
    split = named_split(wanted) or wanted
    if split not in items:
        raise ValueError(f"convert.split={wanted!r} is not in {source!r}; it has {listed}")
    return list(items[split])
