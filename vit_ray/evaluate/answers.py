"""Which classes are right for an image where the test set's own labels do not say it.

ImageNet's further test sets are published in other classes than the 1,000 that a model was trained
on, or with several right classes for an image, or none. Everything here is about small files and
lists of names; images and models are elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

NO_ANSWER: Final = -1
"""Pads the answers of an image or a class."""
LEAST_AGREEMENT: Final = 0.5
"""Of ReaL with ImageNet's own labels; in the right order it is about 0.9 of the images that ReaL
labels (Beyer et al. 2020, arXiv:2006.07159), in a wrong one about 0.001."""

REAL_FILE: Final = (
    "real.json, which is published at https://github.com/google-research/reassessed-imagenet"
)
OBJECTNET_FOLDER: Final = (
    "the folder `mappings` of objectnet-1.0.zip, published at https://objectnet.dev"
)
_FOLDER_LABELS, _OVERLAP, _INDICES, _NAMES = (
    "folder_to_objectnet_label.json",
    "objectnet_to_imagenet_1k.json",
    "pytorch_to_imagenet_2012_id.json",
    "imagenet_to_label_2012_v2",
)
OBJECTNET_FILES: Final = (_FOLDER_LABELS, _OVERLAP, _INDICES, _NAMES)
_VALIDATION_KEY: Final = re.compile(r"ILSVRC2012_val_(\d{8})\b")
_WORDNET_ID: Final = re.compile(r"(n\d{8})\b")


@dataclass(frozen=True)
class Answers:
    """What counts as right; labels stand for places in `classes`."""

    classes: tuple[str, ...]
    """Names of the classes that compete, in the order in which their logits are compared."""
    num_outputs: int
    """Of the model."""
    competing: NDArray[np.int64] | None = None
    """The model's outputs that compete; None for all."""
    by_sample: Int32Array | None = None
    """(images, L), padded with -1: right classes by sample number."""
    by_class: Int32Array | None = None
    """(classes of the set, L), padded with -1: right classes by the set's own label."""

    def of_batch(self, labels: Int32Array, samples: NDArray[np.int64]) -> Int32Array:
        """Right classes of a batch, int32 (B, L) padded with -1.

        Args:
            labels: the set's own, (B, M) padded with -1.
            samples: sample numbers (B,), -1 for padding, whose answers count for nothing.
        """
        if self.by_sample is not None:
            return self.by_sample[samples]
        if self.by_class is None:
            return labels
        none = np.full((1, self.by_class.shape[1]), NO_ANSWER, np.int32)
        return np.concatenate([self.by_class, none])[labels].reshape(len(labels), -1)


def real_answers(
    lists: Any, keys: Sequence[str], own_labels: Int32Array, classes: Sequence[str], where: str
) -> Answers:
    """ReaL: the classes that raters found in each image of ImageNet's validation set.

    Args:
        lists: content of `real.json`, whose entry i is of `ILSVRC2012_val_{i + 1:08d}`.
        keys: of the set's images, by sample number; they hold that name.
        own_labels: the set's, by sample number.
        classes: of the set.
        where: what errors call the file.

    Raises:
        ValueError: it is no such file, or of another size or in another order than the set.
    """
    if not isinstance(lists, list) or not all(_is_label_list(one, len(classes)) for one in lists):
        raise ValueError(
            f"{where} is not a list of lists of labels from 0 to {len(classes) - 1}; "
            f"give {REAL_FILE}"
        )
    if len(lists) != len(keys):
        raise ValueError(
            f"{where} has labels of {len(lists)} images and data.eval has {len(keys)} images; give "
            "the whole validation set that it is published for"
        )
    places = np.array([_validation_place(key, len(lists)) for key in keys])
    twice = len(places) - len(np.unique(places))
    if twice:
        raise ValueError(f"data.eval: {twice} images have the name of another one")
    answers = _padded(lists)[places]
    _check_order(answers, own_labels, where)
    return Answers(tuple(classes), len(classes), by_sample=answers)


def _is_label_list(one: Any, num_classes: int) -> bool:
    return isinstance(one, list) and all(type(k) is int and 0 <= k < num_classes for k in one)


def _validation_place(key: str, count: int) -> int:
    found = _VALIDATION_KEY.search(key)
    if found is None or not 1 <= int(found[1]) <= count:
        raise ValueError(
            f"data.eval: the key {key!r} does not tell which of ImageNet's {count} validation "
            "images it is; convert the files under their published names, such as "
            "ILSVRC2012_val_00000001.JPEG"
        )
    return int(found[1]) - 1


def _check_order(answers: Int32Array, own_labels: Int32Array, where: str) -> None:
    labelled = (answers >= 0).any(axis=1) & (own_labels >= 0)
    if not labelled.any():
        raise ValueError(f"{where} labels none of the images of data.eval")
    agreement = (answers == own_labels[:, None]).any(axis=1)[labelled].mean()
    if agreement < LEAST_AGREEMENT:
        raise ValueError(
            f"{where} has the label of data.eval for {agreement:.1%} of the images: its order, or "
            "that of the set's classes, is another one. Its lists are in the order of the "
            "validation files' names, its labels those of the classes sorted by WordNet id"
        )


def numbered_answers(set_classes: Sequence[str], classes: Sequence[str]) -> Answers:
    """ImageNet-v2: the names of the class folders are numbers of ImageNet's classes.

    Raises:
        ValueError: one of them is not.
    """
    strange = [name for name in set_classes if not name.isdigit() or int(name) >= len(classes)]
    if strange:
        raise ValueError(
            f"benchmark.kind=imagenet_v2: the class {strange[0]!r} of data.eval is not a number "
            f"from 0 to {len(classes) - 1}; convert the published folders"
        )
    table = np.array([[int(name)] for name in set_classes], np.int32)
    return Answers(tuple(classes), len(classes), by_class=table)


def named_answers(set_classes: Sequence[str], classes: Sequence[str]) -> Answers:
    """The set's classes are some of the model's, by name, and only they compete.

    Raises:
        ValueError: the model has no such class.
    """
    outputs = {name: index for index, name in enumerate(classes)}
    strange = [name for name in set_classes if name not in outputs]
    if strange:
        raise ValueError(
            f"benchmark: {len(strange)} classes of data.eval are none of the model's "
            f"{len(classes)}, such as {strange[0]!r} (the model's are like {classes[0]!r}); name "
            "the model's classes in benchmark.model_classes"
        )
    competing = np.array(sorted(outputs[name] for name in set_classes), np.int64)
    places = np.searchsorted(competing, [outputs[name] for name in set_classes])
    return Answers(
        tuple(classes[index] for index in competing),
        len(classes),
        competing=None if len(competing) == len(classes) else competing,
        by_class=places.astype(np.int32)[:, None],
    )


def objectnet_answers(
    files: Mapping[str, str], set_classes: Sequence[str], classes: Sequence[str]
) -> Answers:
    """ObjectNet: 113 of its 313 classes are one or several of ImageNet's; others are skipped.

    A prediction is any of the model's classes: one that ObjectNet does not have is wrong.

    Args:
        files: content of `OBJECTNET_FILES` by name.
        set_classes: names of the image folders.
        classes: ImageNet's, sorted by WordNet id.

    Raises:
        ValueError: a file is not as it is published, or the set has other classes.
    """
    try:
        folders: dict[str, str] = json.loads(files[_FOLDER_LABELS])
        overlap = {label: text.split("; ") for label, text in json.loads(files[_OVERLAP]).items()}
        # The challenge numbers classes in an order of its own, in which the names stand.
        output_of = {number: int(k) for k, number in json.loads(files[_INDICES]).items()}
        names = [line.strip() for line in files[_NAMES].splitlines()]
        outputs = {name: output_of[number] for number, name in enumerate(names)}
        shared = {label: [outputs[name] for name in found] for label, found in overlap.items()}
    except (ValueError, AttributeError, KeyError) as error:
        raise ValueError(
            f"benchmark.label_file: the mappings of ObjectNet are damaged ({error!r}); give "
            f"{OBJECTNET_FOLDER}"
        ) from None
    strange = [name for name in set_classes if name not in folders]
    if strange:
        raise ValueError(
            f"benchmark.kind=objectnet: the class {strange[0]!r} of data.eval is no folder of "
            "ObjectNet; convert the folder `images` of objectnet-1.0.zip"
        )
    table = _padded([shared.get(folders[name], []) for name in set_classes])
    if table.max() >= len(classes):
        raise ValueError(
            f"benchmark.kind=objectnet needs a model of ImageNet's 1,000 classes; "
            f"benchmark.model_classes has {len(classes)}"
        )
    return Answers(tuple(classes), len(classes), by_class=table)


def _padded(lists: Sequence[Sequence[int]]) -> Int32Array:
    width = max(1, *map(len, lists)) if lists else 1
    table = np.full((len(lists), width), NO_ANSWER, np.int32)
    for row, labels in zip(table, lists, strict=True):
        row[: len(labels)] = labels
    return table


def parse_classes(text: str, suffix: str, where: str) -> tuple[str, ...]:
    """Class names in the order of a model's outputs, from a file of them.

    Args:
        suffix: `.json` or `.txt`, as in `benchmark.model_classes`.
        where: what errors call the file.

    Raises:
        ValueError: it is in neither form, or names a class twice.
    """
    if suffix not in _PARSERS:
        raise ValueError(f"{where}: give a converted set, a .txt or a .json file")
    try:
        names = _PARSERS[suffix](text)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise ValueError(f"{where} is no list of classes: {error}") from None
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not names:
        told = f"names {twice[0]!r} twice" if twice else "names no class"
        raise ValueError(f"{where} {told}")
    return tuple(names)


def _from_lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ids = [_WORDNET_ID.match(line) for line in lines]
    return [found[1] if found else line for found, line in zip(ids, lines, strict=True)]


def _from_json(text: str) -> list[str]:
    told = json.loads(text)
    if isinstance(told, dict):
        told = [told[str(index)] for index in range(len(told))]
    return [str(one[0]) if isinstance(one, list) else str(one) for one in told]


_PARSERS: Final[dict[str, Callable[[str], list[str]]]] = {".txt": _from_lines, ".json": _from_json}
