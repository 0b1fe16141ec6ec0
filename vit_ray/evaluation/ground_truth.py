"""The correct classes of images where the labels of a test set do not give them.

Several test sets for ImageNet models are published with other classes than the model's 1,000, or
with several correct classes for an image, or none. This module reads only label files and lists of
names, no images and no models.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

NO_ANSWER: Final = -1  # pads the correct classes of an image or a class
# Agreement of ReaL with ImageNet's own labels; in the right order it is about 0.9 of the images
# that ReaL labels (Beyer et al. 2020, arXiv:2006.07159), in a wrong order about 0.001.
MIN_AGREEMENT: Final = 0.5

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
# Numbers of ImageNet's classes, as they are written in files.
_IMAGENET: Final = {str(number): number for number in range(1000)}
_VALIDATION_KEY: Final = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")
_WORDNET_ID: Final = re.compile(r"n\d{8}\b")


@dataclass(frozen=True)
class Answers:
    """The correct classes of a test set's images, as indices into `classes`.

    Attributes:
        classes: names of the classes that a prediction can be, in the order of their logits.
        num_outputs: of the model.
        competing: the model's outputs for these classes; None for all.
        by_sample: (images, L), padded with -1: correct classes by sample number.
        by_class: (classes of the set, L), padded with -1: correct classes by the set's label.
    """

    classes: tuple[str, ...]
    num_outputs: int
    competing: NDArray[np.int64] | None = None
    by_sample: Int32Array | None = None
    by_class: Int32Array | None = None

    def of_batch(self, labels: Int32Array, samples: NDArray[np.int64]) -> Int32Array:
        """Correct classes of a batch, int32 (B, L) padded with -1.

        Args:
            labels: the set's labels, (B, M) padded with -1.
            samples: sample numbers (B,); -1 for padding, whose result has no meaning.
        """
        if self.by_sample is not None:
            return self.by_sample[samples]
        if self.by_class is None:
            return labels
        no_answer = np.full((1, self.by_class.shape[1]), NO_ANSWER, np.int32)  # for a label of -1
        return np.concatenate([self.by_class, no_answer])[labels].reshape(len(labels), -1)


def real_answers(
    lists: Any,
    keys: Sequence[str],
    own_labels: Int32Array,
    set_classes: Sequence[str],
    classes: Sequence[str],
    where: str,
) -> Answers:
    """ReaL: the classes that raters found in each image of ImageNet's validation set.

    Args:
        lists: content of `real.json`: lists of indices into `set_classes`; entry i is for
            `ILSVRC2012_val_{i + 1:08d}`.
        keys: of the set's images, by sample number; they contain the images' published names.
        own_labels: the set's labels, by sample number.
        set_classes: of the set.
        classes: of the model, which may have more classes or another order.
        where: the file's name in errors.

    Raises:
        ValueError: the content is something else, or in another order or of another size than the
            set; or the model lacks a class.
    """
    if not isinstance(lists, list) or not all(
        isinstance(labels, list)
        and all(type(label) is int and 0 <= label < len(set_classes) for label in labels)
        for labels in lists
    ):
        raise ValueError(
            f"{where} is not a list of lists of labels from 0 to {len(set_classes) - 1}; "
            f"give {REAL_FILE}"
        )
    if len(lists) != len(keys):
        raise ValueError(
            f"{where} has labels of {len(lists)} images and data.eval has {len(keys)} images; "
            "give the whole validation set that it is published for"
        )
    named = named_answers(set_classes, classes)
    assert named.by_class is not None
    # 0 for a key without a number. There are as many keys as lists, so each number is there once.
    numbers = [int(match[1]) if (match := _VALIDATION_KEY.search(key)) else 0 for key in keys]
    counts, published = Counter(numbers), range(1, len(lists) + 1)
    for key, number in zip(keys, numbers, strict=True):
        if number not in published or counts[number] > 1:
            raise ValueError(
                f"data.eval: the key {key!r} does not identify one of ImageNet's {len(lists)} "
                "validation images, or another image has its number; convert each file once, "
                "under its published name, such as ILSVRC2012_val_00000001.JPEG"
            )
    answers = _padded(lists)[np.array(numbers, np.int64) - 1]
    labelled = (answers >= 0).any(axis=1) & (own_labels >= 0)
    right = (answers == own_labels[:, None]).any(axis=1) & labelled
    agreement = right.sum() / max(1, labelled.sum())
    if agreement < MIN_AGREEMENT:
        raise ValueError(
            f"{where} agrees with data.eval for {agreement:.1%} of the {labelled.sum()} images "
            "that both label: its order, or that of the set's classes, is another one; its lists "
            "must be in the order of the validation files' names, its labels those of the classes "
            "sorted by WordNet id"
        )
    of_model = np.append(named.by_class[:, 0], np.int32(NO_ANSWER))
    return replace(named, by_class=None, by_sample=of_model[answers])


def numbered_answers(set_classes: Sequence[str], classes: Sequence[str]) -> Answers:
    """ImageNet-v2: the names of the class folders are numbers of ImageNet's classes.

    Raises:
        ValueError: a name is not such a number, or the model has other classes.
    """
    _require_imagenet(classes, "imagenet_v2")
    if wrong := [name for name in set_classes if name not in _IMAGENET]:
        raise ValueError(
            f"benchmark.kind=imagenet_v2: a class of data.eval, {wrong[0]!r}, is not a number from "
            f"0 to {len(_IMAGENET) - 1}; convert the published folders"
        )
    table = np.array([[_IMAGENET[name]] for name in set_classes], np.int32)
    return Answers(tuple(classes), len(classes), by_class=table)


def _require_imagenet(classes: Sequence[str], kind: str) -> None:
    if len(classes) != len(_IMAGENET):
        raise ValueError(
            f"benchmark.kind={kind} needs a model of ImageNet's 1,000 classes; this model has "
            f"{len(classes)}; name the model's classes in benchmark.model_classes"
        )


def named_answers(set_classes: Sequence[str], classes: Sequence[str]) -> Answers:
    """The set's classes are some of the model's, by name; only these outputs compete.

    Raises:
        ValueError: the model lacks a class.
    """
    outputs = {name: index for index, name in enumerate(classes)}
    missing = [name for name in set_classes if name not in outputs]
    if missing:
        raise ValueError(
            f"benchmark: the model lacks {len(missing)} classes of data.eval, such as "
            f"{missing[0]!r} (it has {len(classes)}, such as {classes[0]!r}); name the model's "
            "classes in benchmark.model_classes"
        )
    competing = np.array(sorted(outputs[name] for name in set_classes), np.int64)
    labels = np.searchsorted(competing, [outputs[name] for name in set_classes])
    return Answers(
        tuple(classes[index] for index in competing),
        len(classes),
        competing=None if len(competing) == len(classes) else competing,
        by_class=labels.astype(np.int32)[:, None],
    )


def objectnet_answers(
    files: Mapping[str, str], set_classes: Sequence[str], classes: Sequence[str]
) -> Answers:
    """ObjectNet: 113 of the 313 classes match ImageNet classes; images of the others are skipped.

    A prediction can be any of the model's classes; a class that ObjectNet lacks is wrong.

    Args:
        files: content of `OBJECTNET_FILES` by name.
        set_classes: names of the image folders.
        classes: ImageNet's, sorted by WordNet id.

    Raises:
        ValueError: a file is not as published, or the set has other classes.
    """
    _require_imagenet(classes, "objectnet")
    try:
        # The challenge numbers classes in the order of the names, not in ImageNet's.
        indices = json.loads(files[_INDICES])
        class_of = {number: _IMAGENET[text] for text, number in indices.items()}
        names = [line.strip() for line in files[_NAMES].splitlines()]
        of_name = {name: class_of[number] for number, name in enumerate(names)}
        overlap = json.loads(files[_OVERLAP]).items()
        shared = {label: [of_name[name] for name in text.split("; ")] for label, text in overlap}
        folders = json.loads(files[_FOLDER_LABELS]).items()
        # A folder whose class is not in ImageNet has no correct class.
        of_folder = {folder: shared.get(label, []) for folder, label in folders}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"benchmark.label_file: the mappings of ObjectNet are damaged ({error!r}); give "
            f"{OBJECTNET_FOLDER}"
        ) from None
    unknown = [name for name in set_classes if name not in of_folder]
    if unknown:
        raise ValueError(
            f"benchmark.kind=objectnet: the class {unknown[0]!r} of data.eval is not a folder of "
            "ObjectNet; convert the folder `images` of objectnet-1.0.zip"
        )
    table = _padded([of_folder[name] for name in set_classes])
    if table.max() < 0:
        raise ValueError(
            "benchmark.label_file: by the mappings no class of data.eval is one of ImageNet's; "
            f"give {OBJECTNET_FOLDER}"
        )
    return Answers(tuple(classes), len(classes), by_class=table)


def _padded(lists: Sequence[Sequence[int]]) -> Int32Array:
    width = max([1, *map(len, lists)])
    table = np.full((len(lists), width), NO_ANSWER, np.int32)
    for row, labels in zip(table, lists, strict=True):
        row[: len(labels)] = labels
    return table


def parse_classes(text: str, suffix: str, where: str) -> tuple[str, ...]:
    """Class names in the order of a model's outputs, from the text of a file.

    Args:
        suffix: `.json` or `.txt`, as in `benchmark.model_classes`.
        where: the file's name in errors.

    Raises:
        ValueError: the text has neither form, or names a class twice.
    """
    try:
        if suffix == ".json":
            content = json.loads(text)
            if isinstance(content, dict):
                content = [content[str(index)] for index in range(len(content))]
            names = [str(name[0] if isinstance(name, list) else name) for name in content]
        else:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            names = [ids[0] if (ids := _WORDNET_ID.match(line)) else line for line in lines]
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise ValueError(f"{where} is not a list of classes: {error}") from None
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice or not names:
        problem = f"names {twice[0]!r} twice" if twice else "names no class"
        raise ValueError(f"{where} {problem}")
    return tuple(names)
