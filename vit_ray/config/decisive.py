"""Which keys of a recipe decide what its training results in, and which only speed or place.

A run that goes on, and a cell of a study that is finished, are of the recipe at hand only if what
decides is as it was.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

DATA_SET: Final = "the data set's fingerprint"
"""Compared as if it were a key."""
_DECISIVE: Final = (
    DATA_SET,
    "seed",
    "model.",
    "data.",
    "optim.",
    "train.",
    "evaluate.",
    "init_",
)
_HARMLESS: Final = (
    "data.cache_dir",
    "data.cache_gib",
    "data.cpus_per_task",
    "data.max_bad_fraction",
    "data.max_tasks",
    "data.object_store_mib",
    "data.prefetch_batches",
    "data.task_memory_mib",
    "data.train",  # the data set's fingerprint tells more than its path
    "evaluate.batch_size",
    "train.activation_checkpointing",
    "train.compile",
    "train.log_every_steps",
    "train.max_nonfinite_steps",
    "train.micro_batch_size",
    "train.nonfinite",  # what to do when a step is refused, which is told
    "train.offload",
    "train.profile_steps",
    "train.step_timeout_s",
    "train.zero_stage",
)
_UNUSED: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    **{
        f"data.augment.randaugment_{key}": {"data.augment.randaugment": ("None",)}
        for key in ("layers", "magnitude", "magnitude_std")
    },
    "optim.cooldown_fraction": {"optim.schedule": ("linear", "cosine", "constant", "steps")},
    "optim.decay_at": {"optim.schedule": ("linear", "cosine", "constant", "cooldown")},
    "optim.end_learning_rate": {"optim.schedule": ("constant", "steps")},
    "optim.momentum": {"optim.name": ("adamw", "adafactor")},
    "optim.betas": {"optim.name": ("sgd",)},
    "optim.first_moment": {"optim.name": ("sgd",)},
    "train.masked_target": {"train.loss": ("softmax", "sigmoid")},
    "evaluate.shots": {"evaluate.few_shot_train": ("None",)},
    "evaluate.few_shot_seeds": {"evaluate.few_shot_train": ("None",)},
}
"""Keys that decide nothing while each of the others has one of its values."""
EVALUATED_SETS: Final = ("data.eval", "evaluate.few_shot_test", "evaluate.few_shot_train")
"""They decide what is measured, and nothing of the weights; the same set may have moved."""
TAGGED: Final = ("data.train", "init_from", "data.held_out_fraction", *EVALUATED_SETS)
"""Recorded as tags: where things lie, and what is measured."""
LENGTH: Final = ("optim.epochs", "optim.images", "optim.steps")
_FIXED: Final = (
    DATA_SET,
    "seed",
    "model.",
    "data.fraction",
    "data.held_out_fraction",
    "data.shuffle_window",
    "optim.name",
    "optim.frozen",
    "train.global_batch_size",
    "train.loss",
    "train.masked_target",
)
"""Without these as they were, a checkpoint's tensors or its place in the data mean nothing."""


@dataclass(frozen=True)
class Change:
    """A key that decides, and its values as text."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key} was {self.before} and is {self.now}"

    @property
    def is_fixed(self) -> bool:
        """Whether no run can go on with it."""
        return self.key.startswith(_FIXED)

    @property
    def is_move(self) -> bool:
        """Whether the first weights, which the run has taken over, are by name the same."""
        before, now = (os.path.basename(path.rstrip("/")) for path in (self.before, self.now))
        return self.key == "init_from" and before == now


def is_trained(key: str) -> bool:
    """Whether the key of a recipe decides what the training results in."""
    return key.startswith(_DECISIVE) and key not in _HARMLESS


def decisive_changes(
    before: Mapping[str, str], now: Mapping[str, str], without: tuple[str, ...] = ()
) -> list[Change]:
    """What decides and differs, in the recipe's order; `auto` stands for what there was before.

    Args:
        before, now: `Recipe.flat`; a key that is not in both is passed over.
        without: keys that are passed over, too.
    """
    skipped = {*_HARMLESS, *without, *_moved_along(before, now)}
    skipped |= unused_keys(now) & unused_keys({**now, **before})
    if "None" in (now.get("train.early_stopping"), before.get("train.early_stopping")):
        skipped.add("evaluate.every_steps")  # else it decides when the run stops
    return [
        Change(key, before[key], value)
        for key, value in now.items()
        if key.startswith(_DECISIVE) and key not in skipped
        if value != "auto" and before.get(key, value) != value
    ]


def unused_keys(flat: Mapping[str, str]) -> set[str]:
    """Keys that decide nothing in a recipe, `Recipe.flat`, as others of it are set."""
    return {
        key
        for key, others in _UNUSED.items()
        if all(flat.get(other) in values for other, values in others.items())
    }


def _moved_along(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Places that lie from the run's output as they did: all was moved together."""
    places = (*EVALUATED_SETS, "init_from")
    return [key for key in places if (way := _way(before, key)) and way == _way(now, key)]


def _way(flat: Mapping[str, str], key: str) -> str | None:
    place, output = flat.get(key, "None"), flat.get("output", "None")
    if "None" in (place, output) or "://" in place + output:
        return None
    return os.path.relpath(place, output)
