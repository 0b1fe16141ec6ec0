"""The keys of a recipe: their help, which of them decide a training, and names of tags in MLflow.

A run is resumed, and a finished cell of a study reused, only if no deciding key has changed.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vit_ray.config.recipe import Recipe
from vit_ray.config.schema import (
    Key,
    OnResume,
    is_list,
    keys_of,
    nearest_key,
    one_line,
    section_type,
)

# Names of tags. The first has the parameters, as JSON, that have changed since the run was created.
CHANGED_PARAMS: Final = "vit_ray.changed_params"
PARENT_TAG: Final = "mlflow.parentRunId"
# What the run is, such as `sweep` or `finetune`.
KIND: Final = "vit_ray.kind"
# The folder of the run's checkpoints: two outputs may have runs of one name.
RUN_FOLDER: Final = "vit_ray.run_folder"
# The run whose weights were its initial weights.
INIT_RUN: Final = "vit_ray.init_run"
# Equal for runs that differ only in the seed.
GROUP: Final = "vit_ray.group"
# Compared like a key that is as fixed as the seed.
DATA_SET: Final = "the data set's fingerprint"


# Every key that takes a value, also a list of sections, in the order of the schema.
KEYS: Final = [
    key
    for key in keys_of(Recipe)
    if section_type(key.field.annotation) is None or is_list(key.field.annotation)
]
_MARKS: Final = {DATA_SET: OnResume.FIXED, **{key.name: key.on_resume for key in KEYS}}
# Keys that decide what is measured, not the weights; the same set may have moved.
EVALUATED_SETS: Final = tuple(k for k, mark in _MARKS.items() if mark is OnResume.EVALUATED)
LENGTH: Final = tuple(k for k, mark in _MARKS.items() if mark is OnResume.LENGTH)


def on_resume(key: str) -> OnResume | None:
    """Whether a run may be resumed with another value; None for a key that no training reads."""
    return _MARKS.get(key)


@dataclass(frozen=True)
class Change:
    """A changed key that decides the training, with its values as text."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key} was {self.before} and is {self.now}"


def is_trained(key: str) -> bool:
    """Whether the key of a recipe decides the result of the training."""
    return on_resume(key) not in (None, OnResume.FREE)


def incompatible_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """The deciding keys that differ, in the recipe's order; `auto` matches any earlier value.

    Args:
        before, now: `Recipe.flat`; a key that is not in both is ignored.
    """
    stops_early = [flat.get("train.early_stopping") for flat in (before, now)]
    # With early stopping, this interval decides when the run stops.
    ignored = "evaluate.every_steps" if "None" in stops_early else ""
    return [
        Change(key, before[key], value)
        for key, value in now.items()
        if is_trained(key) and key != ignored
        if value != "auto" and before.get(key, value) != value
    ]


def sections() -> dict[str, str]:
    """Every section and its meaning; the first, without a name, is the recipe itself."""
    return {key.section: one_line(key.schema.__doc__) for key in KEYS}


def keys_below(*prefixes: str) -> list[Key]:
    """The keys that are, or are below, one of the prefixes; without prefixes all."""
    below = tuple(f"{prefix}." for prefix in prefixes) or ""
    return [key for key in KEYS if f"{key.name}.".startswith(below)]


def known_key(key: str) -> str:
    """A valid key or section itself, else the most similar key, or itself if none is similar."""
    valid = [] if "." in key else list(Recipe.model_fields)
    return key if keys_below(key) else nearest_key(Recipe, key, valid) or key


def recorded_before(params: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    """The flat recipe with which a run in MLflow ended, limited to the deciding keys that are set.

    Values that a restart changed are in a tag.
    """
    with contextlib.suppress(json.JSONDecodeError):  # MLflow limits the length of a tag
        return {**params, **json.loads(tags.get(CHANGED_PARAMS, "{}"))}
    return dict(params)


def used_sections(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a recorded recipe that inference needs."""
    keys = {"data": ("eval_augment",), "train": ("loss", "precision"), "evaluate": ("batch_size",)}
    return {"model": recipe.get("model", {})} | {
        section: {key: recipe[section][key] for key in names if key in recipe.get(section, {})}
        for section, names in keys.items()
    }
