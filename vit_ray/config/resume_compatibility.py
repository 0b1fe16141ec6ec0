"""Which recipe keys decide the result of a training, by the marks on the keys.

A run is resumed, and a finished cell of a study reused, only if no deciding key has changed.
"""

import os.path
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from vit_ray.config.recipe import Recipe
from vit_ray.config.schema import OnResume, UsedIf, fields_below
from vit_ray.own_parts import is_own

_OFF: Final = ("None", "0", "0.0")
DATA_SET: Final = "the data set's fingerprint"
"""Compared as if it were a key; it is as fixed as the seed."""


def _marks() -> dict[str, tuple[OnResume | None, UsedIf | None]]:
    found: dict[str, tuple[OnResume | None, UsedIf | None]] = {"": (None, None)}
    for key, field in fields_below(Recipe):
        section, dot, _ = key.rpartition(".")
        marks = [one for one in field.metadata if isinstance(one, OnResume)]
        used_if = [one for one in field.metadata if isinstance(one, UsedIf)]
        switch = replace(used_if[0], key=f"{section}{dot}{used_if[0].key}") if used_if else None
        found[key] = (marks[0] if marks else found[section][0]), switch
    return found | {DATA_SET: (OnResume.FIXED, None)}


_MARKS: Final = _marks()
EVALUATED_SETS: Final = tuple(k for k, (mark, _) in _MARKS.items() if mark is OnResume.EVALUATED)
"""They decide what is measured, not the weights; the same set may have moved."""
LENGTH: Final = tuple(k for k, (mark, _) in _MARKS.items() if mark is OnResume.LENGTH)
TAGGED: Final = ("data.train", "init_from", "data.held_out_fraction", *EVALUATED_SETS)
"""Recorded as tags: locations, and what is measured."""


def on_resume(key: str) -> OnResume | None:
    """Whether a run may be resumed with another value; None for a key that no training reads."""
    return _MARKS.get(key, (None, None))[0]


@dataclass(frozen=True)
class Change:
    """A deciding key that has changed, and its values as text."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key} was {self.before} and is {self.now}"

    @property
    def is_move(self) -> bool:
        """Whether initial weights are compared by name: the run already has them."""
        before, now = (os.path.basename(path.rstrip("/")) for path in (self.before, self.now))
        return self.key == "init_from" and before == now


def is_trained(key: str) -> bool:
    """Whether the key of a recipe decides the result of the training."""
    return on_resume(key) not in (None, OnResume.FREE)


def incompatible_changes(
    before: Mapping[str, str], now: Mapping[str, str], without: tuple[str, ...] = ()
) -> list[Change]:
    """The deciding keys that differ, in the recipe's order; `auto` matches any earlier value.

    Args:
        before, now: `Recipe.flat`; a key that is not in both is ignored.
        without: further keys to ignore.
    """
    unused = unused_keys(now) & unused_keys({**now, **before})
    skipped = {*without, *unused, *_moved_along(before, now)}
    if "None" in (now.get("train.early_stopping"), before.get("train.early_stopping")):
        skipped.add("evaluate.every_steps")  # else it decides when the run stops
    return [
        Change(key, before[key], value)
        for key, value in now.items()
        if is_trained(key) and key not in skipped
        if value != "auto" and before.get(key, value) != value
    ]


def unused_keys(flat: Mapping[str, str]) -> set[str]:
    """Keys that decide nothing in a recipe, `Recipe.flat`, given the values of its other keys."""
    return {
        key
        for key, (_, used_if) in _MARKS.items()
        if used_if and (value := flat.get(used_if.key)) is not None
        if (value not in used_if.values if used_if.values else value in _OFF) and not is_own(value)
    }


def _moved_along(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Paths that are unchanged relative to the run's output: everything was moved together."""
    places = {}
    for key in (*EVALUATED_SETS, "init_from"):
        pairs = [(flat.get(key, "None"), flat.get("output", "None")) for flat in (before, now)]
        if not any(place == "None" or "://" in place for place in (*pairs[0], *pairs[1])):
            places[key] = {os.path.relpath(*pair) for pair in pairs}
    return [key for key, ways in places.items() if len(ways) == 1]
