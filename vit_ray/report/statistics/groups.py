"""Which runs form a group: they were trained and tested the same, except for the seed.

Every mean, line, law and comparison of a report is between groups. A group is defined by the keys
of the recipe that decide the result (the keys that are compared on resume), the fingerprints of the
training and test sets, the initial weights and the git commit.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

TRAINING_SET: Final = "training set"
TRAINING_IMAGES: Final = "training images"
TEST_SET: Final = "test set"
WEIGHTS: Final = "first weights"
COMMIT: Final = "git commit"
EXAFLOPS: Final = "exaFLOPs"
"""Stands for the length of a training whose recipe has none."""
MEASURED_ON: Final = "measured on"
PRETRAINING: Final = "pre-training "
"""Prefix for the pre-training of a fine-tuned model."""
FEW_SHOT_SETS: Final = ("few-shot training set", "few-shot test set")


@dataclass(frozen=True)
class Group:
    """Values of everything that decides a result, by key."""

    items: frozenset[tuple[str, str]]
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Name of a value for readers, such as the folder of a fingerprint; by value."""

    @classmethod
    def of(cls, values: Mapping[str, str], names: Mapping[str, str]) -> "Group":
        """The group of these values; unset keys do not count."""
        return cls(frozenset((k, v) for k, v in values.items() if v != "None"), names)

    @property
    def values(self) -> dict[str, str]:
        return dict(self.items)

    @property
    def digest(self) -> str:
        """Short name: runs with one digest differ only in the seed."""
        return hashlib.sha256(repr(sorted(self.items)).encode()).hexdigest()[:8]

    def only(self, is_kept: Callable[[str], bool]) -> "Group":
        return Group(frozenset(item for item in self.items if is_kept(item[0])), self.names)

    def without(self, *keys: str) -> "Group":
        """The group without these keys; a key that ends with a dot stands for its whole section."""
        return self.only(
            lambda key: not any(key == k or (k[-1] == "." and key.startswith(k)) for k in keys)
        )


def differing_keys(groups: Iterable[Group]) -> list[str]:
    """Keys in which these groups differ."""
    values = [group.values for group in groups]
    keys = sorted({key for one in values for key in one})
    return [key for key in keys if len({one.get(key) for one in values}) > 1]


def differences(groups: Sequence[Group]) -> dict[Group, str]:
    """Each group's values of the keys in which the groups differ; empty if there are none.

    The fingerprint of a set follows its name if another set has the same name.
    """
    shown: dict[Group, list[str]] = {group: [] for group in groups}
    for key in differing_keys(groups):
        held = {group: group.values.get(key, "unset") for group in groups}
        names = {value: group.names.get(value, value) for group, value in held.items()}
        texts = [*names.values()]
        for group, value in held.items():
            name = names[value]
            is_clear = name == value or texts.count(name) == 1
            shown[group].append(f"{key} {name if is_clear else f'{name} {value[:8]}'}")
    return {group: ", ".join(parts) for group, parts in shown.items()}
