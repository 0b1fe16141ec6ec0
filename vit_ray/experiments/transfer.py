"""A study's transfers: every cell's weights fine-tuned on other data, at one rate or over a sweep.

Section 4.1 of the paper and Table 6. They run after the pre-training of their cell, in its trial;
accuracies are metrics of the cell's own run: `transfer/TASK_top1`, over seeds if there are several.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from vit_ray.config import Recipe, load_recipe
from vit_ray.config.command_sections import StudyTask
from vit_ray.experiments.search_space import short_name, with_point
from vit_ray.experiments.study_cells import Cell, leaves, training_of
from vit_ray.experiments.sweep import check_in_turn, fine_tune
from vit_ray.experiments.trials import Context
from vit_ray.launch.run_metadata import SIZES
from vit_ray.metric_names import TRANSFER_GROUP

_OF_THE_CELL: Final = (
    "name",
    "output",
    "init_from",
    "seed",
    "tracking",
    "storage",
    "workers",
    "resume",
)
"""Sections and keys of a task's recipe that come from the cell."""
_SIZES: Final = (
    "name", "depth", "width", "mlp_dim", "num_heads", "patch_size", "stages", "width_factor",
)  # fmt: skip
"""Keys of the model that its weights need."""
_OF_PRETRAINING: Final = ("representation", "head_bias", "dropout", "stochastic_depth")
"""Options of the model that come from the task's recipe."""


def task_recipe(cell: Cell, task: StudyTask) -> Recipe:
    """The fine-tuning of a cell's weights on a task; starts nothing and opens no data.

    A part of its name stands for its settings: a finished run is not continued with another recipe,
    so a changed task is trained as a new run.

    Raises:
        ValueError: there is no such recipe, or it cannot have such a change.
    """
    where = f"study.transfer {task.name!r}"
    point = dict(leaves(task.changes))
    if taken := key_of_the_cell(point):
        raise ValueError(f"{where}: changes.{taken} comes from the cell; leave it out")
    base, own = load_recipe(task.recipe), cell.recipe
    # Off and unset are equal: a model without the option can be fine-tuned with the recipe, too.
    of_task = {key: getattr(base.model, key) or None for key in _OF_PRETRAINING}
    model = own.model.model_dump(mode="json") | of_task
    changes: dict[str, Any] = {
        "name": f"{cell.name}-{task.name}",
        "output": own.output,
        "init_from": own.run_folder,
        "seed": own.seed,
        "tracking": own.tracking.model_dump(mode="json"),
        "storage": own.storage.model_dump(mode="json"),
        "workers": own.workers.model_dump(mode="json"),
        "model": model | {"image_size": own.model.whole_patches(base.model.image_size)},
        "study": None,
    }
    recipe = with_point(base, point, where, **changes)
    check_in_turn(recipe, where)
    # What is trained, on any number of workers: another training needs another name.
    flat = json.loads(training_of(recipe))
    text = json.dumps({key: flat[key] for key in flat if key not in SIZES})
    return recipe.with_changes(name=short_name(f"{recipe.name}-{_digest(text)[:8]}"))


def key_of_the_cell(point: Mapping[str, Any]) -> str | None:
    """A key that a task changes or varies although the cell sets it; None if there is none."""
    of_model = [f"model.{key}" for key in _SIZES]
    taken = (k for k, _ in leaves(point) if k.partition(".")[0] in _OF_THE_CELL or k in of_model)
    return next(taken, None)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def top1_key(task: StudyTask) -> str:
    """Metric in the cell's run."""
    return f"{TRANSFER_GROUP}{task.name}_top1"


def task_tags(cell: Cell, task: StudyTask) -> dict[str, str]:
    """Tags of the cell's run that identify the recipe behind its accuracy."""
    recipe = task_recipe(cell, task)
    sweep = recipe.sweep.model_dump(mode="json") if recipe.sweep else None
    text = f"{training_of(recipe)} {json.dumps(sweep, sort_keys=True)}"
    return {f"vit_ray.transfer.{task.name}": _digest(text)}


def transfer(cell: Cell, task: StudyTask, context: Context) -> dict[str, float]:
    """Accuracy of the cell on the task as metrics of its run.

    Raises:
        RunFailedError: the fine-tuning, or each trial of it, failed.
        ValueError: the recipe cannot work, or the weights do not exist.
    """
    recipe = task_recipe(cell, task).with_absolute_paths()
    tags = {"vit_ray.transfer_task": task.name, "vit_ray.study_cell": cell.name}
    key, swept = top1_key(task), fine_tune(recipe, context, tags)
    return {key: swept.mean} | ({f"{key}_std": swept.deviation} if recipe.sweep else {})
