"""Class names in label order, from the labels of a source and its declarations."""

import re
from collections import Counter
from collections.abc import Sequence, Set
from typing import Final, Literal

from vit_ray.data.prepare.sources.label_values import has_control_character

MOST_CLASSES: Final = 1_000_000

LabelsAre = Literal["auto", "names", "indices"]

_INTEGER: Final = re.compile(r"-?[0-9]{1,100}")


def class_names(
    found: Set[str],
    kinds: Set[str],
    names: list[str] | None,
    labels_are: LabelsAre,
    *,
    of_folders: bool = False,
) -> tuple[list[str], bool]:
    """Class names in label order, and whether labels are indices into them.

    Without names they are the labels, sorted, as numbers if they are integers.

    Args:
        found: labels of the source.
        kinds: how the source marks its labels: `name`, `index`, or neither.
        names: as given or declared.
        of_folders: labels are the names of folders, and so class names even if they look like
            numbers.

    Raises:
        ValueError: a label is not one of the names, or the meaning of the labels is not clear.
    """
    labels = sorted(found)
    check_class_count(len(labels), "the source")
    if names is None:
        are_numbers = "name" not in kinds and all(map(_INTEGER.fullmatch, labels))
        if labels_are == "indices":
            if wrong := [one for one in labels if not are_numbers or str(abs(int(one))) != one]:
                raise ValueError(
                    f"convert.labels_are=indices: labels such as {wrong[:5]} are not integers from "
                    "0 on; correct them, or set convert.labels_are=names"
                )
            count = max(map(int, labels), default=-1) + 1
            check_class_count(count, "the source")
            return [str(index) for index in range(count)], True  # a name for every index
        if are_numbers and not of_folders and labels_are == "auto":
            _check_gapless(labels)
        return sorted(labels, key=lambda text: (int(text), text)) if are_numbers else labels, False
    are_indices = _are_indices(labels, kinds, names, labels_are)
    allowed = {str(i) for i in range(len(names))} if are_indices else set(names)
    if unknown := [label for label in labels if label not in allowed]:
        what = f"indices of the {len(names)} classes" if are_indices else "in the classes"
        raise ValueError(
            f"convert: labels {unknown[:5]} are not {what} {names[:20]}; correct convert.classes, "
            "or set convert.labels_are to names or indices"
        )
    return list(names), are_indices


def check_names(names: Sequence[str], whose: str) -> None:
    """Raises ValueError if two classes have the same name, or names that look the same."""
    if hidden := [name for name in names if has_control_character(name)]:
        raise ValueError(
            f"{whose} has the class name {hidden[0]!r} with an invisible control character; remove "
            "it"
        )
    counts = Counter(name.strip() for name in names)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(
            f"{whose} has several classes with the name {twice[0]!r}; give each its own name"
        )


def declared_classes(declared: list[tuple[str, list[str]]]) -> list[str] | None:
    """The names that files of a source declare, by path.

    Raises:
        ValueError: two of them declare different names.
    """
    for path, names in declared[1:]:
        if names != declared[0][1]:
            raise ValueError(
                f"{declared[0][0]!r} and {path!r} declare different class names; give "
                "them by convert.classes, or convert one of the two"
            )
    return declared[0][1] if declared else None


def _check_gapless(labels: list[str]) -> None:
    """Raises ValueError if integers are not 0 to n - 1: they may not be labels."""
    numbers = sorted({int(label) for label in labels})
    if len(numbers) == len(labels) and numbers == list(range(len(numbers))):
        return
    if numbers[0] < 0:
        raise ValueError(
            f"convert: a label is {numbers[0]}, which by convention means that an image is not "
            "labelled, and the source declares no class names; remove such images, or make it a "
            "class with convert.labels_are=names"
        )
    missing = next((k for k in range(len(numbers)) if k not in numbers), None)
    text = f"without {missing}" if missing is not None else f"such as {labels[:3]}"
    raise ValueError(
        f"convert: labels are the integers {numbers[0]} to {numbers[-1]}, {text}, and the source "
        "declares no class names; set convert.labels_are=indices to keep them, "
        "convert.labels_are=names to renumber them from 0 on, or give convert.classes"
    )


def _are_indices(
    labels: list[str], kinds: Set[str], names: list[str], labels_are: LabelsAre
) -> bool:
    """As the source declares; if it does not, integers are indices when names are words.

    Raises:
        ValueError: both labels and class names are numbers, but not the same.
    """
    if labels_are != "auto" or kinds <= {"name"} or kinds == {"index"}:
        return labels_are == "indices" if labels_are != "auto" else kinds == {"index"}
    if not all(map(_INTEGER.fullmatch, labels)):
        return False
    if not any(map(_INTEGER.fullmatch, names)):
        return True
    if all(name == str(i) for i, name in enumerate(names)):
        return False
    raise ValueError(
        f"convert: labels such as {labels[:5]} may be names or indices of the classes {names[:5]}; "
        "set convert.labels_are=names or convert.labels_are=indices"
    )


def check_class_count(count: int, source: str) -> None:
    """Raises ValueError for more labels than any data set has classes."""
    if count > MOST_CLASSES:
        raise ValueError(
            f"{source!r} has more than {MOST_CLASSES:,} different labels; check convert.label_field"
        )
