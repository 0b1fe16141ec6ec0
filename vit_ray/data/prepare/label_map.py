"""Class names in label order, from the labels of a source and what it declares of them."""

import re
from collections import Counter
from collections.abc import Sequence, Set
from typing import Final, Literal

MOST_CLASSES: Final = 1_000_000

LabelsAre = Literal["auto", "names", "indices"]

_INTEGER: Final = re.compile(r"-?[0-9]{1,100}")


def class_names(
    found: Set[str], kinds: Set[str], names: list[str] | None, labels_are: LabelsAre
) -> tuple[list[str], bool]:
    """Class names in label order, and whether labels are indices into them.

    Without names they are the labels, sorted, as numbers where they are integers.

    Args:
        found: labels of the source.
        kinds: what the source says that its labels are: `name`, `index`, or neither.
        names: as given or declared.

    Raises:
        ValueError: a label is none of the names, or nobody can tell what the labels are.
    """
    labels = sorted(found)
    check_class_count(len(labels), "the source")
    if names is None and labels_are == "indices":
        raise ValueError(
            "convert.labels_are=indices needs the names that they are indices of; give them by "
            "convert.classes."
        )
    if names is None:
        are_numbers = "name" not in kinds and all(map(_INTEGER.fullmatch, labels))
        return sorted(labels, key=lambda text: (int(text), text)) if are_numbers else labels, False
    are_indices = _are_indices(labels, kinds, names, labels_are)
    allowed = {str(i) for i in range(len(names))} if are_indices else set(names)
    if unknown := [label for label in labels if label not in allowed]:
        what = f"indices of the {len(names)} classes" if are_indices else "in the classes"
        raise ValueError(
            f"convert: labels {unknown[:5]} are not {what} {names[:20]}; correct convert.classes, "
            f"or say by convert.labels_are whether labels are names or indices."
        )
    return list(names), are_indices


def check_unique(names: Sequence[str], whose: str) -> None:
    """Raises ValueError if two classes have one name, which would make them one."""
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(
            f"{whose} has several classes of the name {twice[0]!r}; give each a name of its own."
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
                f"them by convert.classes, or convert one of the two."
            )
    return declared[0][1] if declared else None


def _are_indices(
    labels: list[str], kinds: Set[str], names: list[str], labels_are: LabelsAre
) -> bool:
    """As the source declares; where it does not say, integers are indices into names of words.

    Raises:
        ValueError: nobody can tell: both labels and class names are numbers, and not the same.
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
        f"convert: labels such as {labels[:5]} may be names or indices of the classes "
        f"{names[:5]}; say which by convert.labels_are=names or convert.labels_are=indices."
    )


def check_class_count(count: int, source: str) -> None:
    """Raises ValueError for more labels than any data set has classes."""
    if count > MOST_CLASSES:
        raise ValueError(
            f"{source!r} has more than {MOST_CLASSES:,} different labels; are they labels?"
        )
