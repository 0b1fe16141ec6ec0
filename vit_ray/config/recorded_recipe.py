"""The recipe of a run in MLflow, limited to the keys that decide what was trained."""

import contextlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from vit_ray.config.keys import TAGGED, is_trained
from vit_ray.config.recipe import Recipe

CHANGED_PARAMS: Final = "vit_ray.changed_params"
"""Tag with the parameters, as JSON, that have changed since the run was created."""
PARENT_TAG: Final = "mlflow.parentRunId"
KIND: Final = "vit_ray.kind"
"""Tag with what the run is, such as `sweep` or `finetune`."""
RUN_FOLDER: Final = "vit_ray.run_folder"
"""Tag with the folder of the run's checkpoints: two outputs may have runs of one name."""
INIT_RUN: Final = "vit_ray.init_run"
"""Tag with the run whose weights it began with."""
GROUP: Final = "vit_ray.group"
"""Tag that is equal for runs that differ by the seed alone."""
SHOWN_TAGS: Final = (
    "init_from", KIND, "vit_ray.cluster", RUN_FOLDER, "vit_ray.device",
    "vit_ray.study_label", "vit_ray.study_cell", "vit_ray.vtab_task", "vit_ray.transfer_task",
    "vit_ray.branched_from", "vit_ray.started_over_from", "vit_ray.stopped_early",
    "vit_ray.failure", "vit_ray.error", GROUP, INIT_RUN,
)  # fmt: skip
"""Tags that users read on a run's page; a training has three or four of them."""
_HIDDEN: Final = "mlflow."
"""MLflow's pages hide tags with this prefix."""


def stored_tag(name: str) -> str:
    """The name of a tag in MLflow; tags for programs get the hidden prefix."""
    is_ours = name.startswith("vit_ray.") or name in TAGGED
    return f"{_HIDDEN}{name}" if is_ours and name not in SHOWN_TAGS else name


def tags_of(stored: Mapping[str, str]) -> dict[str, str]:
    """A run's tags by our names."""
    ours = {key: key.removeprefix(_HIDDEN) for key in stored}
    return {name if stored_tag(name) == key else key: stored[key] for key, name in ours.items()}


def recorded_before(params: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    """The flat recipe with which a run in MLflow ended, limited to the deciding keys.

    A key that is not recorded was unset; values that a restart changed are in a tag.
    """
    tags = tags_of(tags)
    with contextlib.suppress(json.JSONDecodeError):  # cut off at the length of a tag
        params = {**params, **json.loads(tags.get(CHANGED_PARAMS, "{}"))}
    return {**_unset(), **{key: tags[key] for key in TAGGED if key in tags}, **params}


def used_sections(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a recorded recipe that inference needs."""
    used = {"data": ("eval_augment",), "train": ("loss", "precision"), "evaluate": ("batch_size",)}
    return {"model": recipe.get("model", {})} | {
        section: {key: recipe[section][key] for key in keys if key in recipe.get(section, {})}
        for section, keys in used.items()
    }


@cache
def _unset() -> dict[str, str]:
    flat = Recipe(name="unset").flat()
    return {key: flat[key] for key in flat if is_trained(key) or key in TAGGED}
