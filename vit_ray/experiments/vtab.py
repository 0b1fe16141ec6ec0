"""VTAB-1k: every task fine-tuned with one recipe, group means, and the paper's row next to ours.

Section 4.1, Table 4 and Table 9 of the paper. Tasks run under one parent run and have stable names,
so that a repeated command resumes. A task without data, or that failed, stays in the table, with
the reason; a mean is shown only if all tasks of the paper's mean have an accuracy.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import VtabConfig, VtabTask
from vit_ray.data.dataset import MANIFEST_FILE
from vit_ray.experiments.search_space import check_in_turn, checked_steps, point_text
from vit_ray.experiments.sweep import fine_tune
from vit_ray.experiments.trials import (
    METRIC,
    STEP,
    OpenParent,
    Published,
    open_parent,
    run_trials,
)
from vit_ray.launch.paper_comparison import Rows, in_percent
from vit_ray.launch.resolved_run import ResolvedRun, check_weights, resolve_run
from vit_ray.launch.run import Following
from vit_ray.metric_names import EVAL_TOP1, VTAB_GROUP, VTAB_NUM_TASKS
from vit_ray.outcomes import EventKind, RunFailedError
from vit_ray.paper import TABLE_9, VTAB_TASKS
from vit_ray.storage import locate

# Images of each task's training set in VTAB-1k: 800 and 200.
NUM_IMAGES: Final = 1000
# Model and `paper.pretraining` of each column of the paper's Table 9.
PAPER_MODELS: Final = (
    ("ViT-H/14", "jft300m"), ("ViT-L/16", "jft300m"), ("ViT-L/16", "imagenet21k"),
)  # fmt: skip
# Tasks of each mean of the paper's Table 9.
MEANS: Final = {
    "natural": VTAB_TASKS[:7],
    "specialized": VTAB_TASKS[7:11],
    "structured": VTAB_TASKS[11:],
    "mean": VTAB_TASKS,
}


@dataclass(frozen=True)
class TaskResult:
    """The result of a task.

    Attributes:
        top1: on the task's test set, with averaged weights if the recipe averages.
        num_images: of the training set, 1,000 in VTAB-1k; None if there are no data.
        error: why there is no accuracy; empty if there is one.
        deviation: over seeds; None for a single run.
        chosen: the point that a sweep of the task has selected.
    """

    task: VtabTask
    top1: float | None = None
    num_images: int | None = None
    error: str = ""
    deviation: float | None = None
    chosen: str = ""


@dataclass(frozen=True)
class VtabResult:
    """Every task in the order of the recipe, and their table."""

    rows: list[TaskResult]
    table: Rows
    published: Published


def vtab_of(recipe: Recipe) -> VtabConfig:
    """The recipe's section.

    Raises:
        ValueError: there is no such section, or nothing to fine-tune.
    """
    config = require(recipe.vtab, "vtab", "vtab.data and vtab.tasks, as in the recipe `vtab_1k`")
    if config.sweep_each:
        require(recipe.sweep, "sweep", "the points for vtab.sweep_each=true to select from")
    require(recipe.init_from, "init_from", "the run, checkpoint or file to fine-tune")
    return config


def task_recipe(recipe: Recipe, task: VtabTask) -> Recipe:
    """Fine-tune on one task, and evaluate on its test set."""
    folder = f"{vtab_of(recipe).data.rstrip('/')}/{task.name}"
    augment = recipe.data.augment.model_dump(mode="json")
    augment["flip"] = recipe.data.augment.flip and task.flip
    if not task.crop:
        augment["kind"] = "resize"
    return recipe.with_changes(
        name=f"{recipe.name}-{task.name}",
        data={"train": f"{folder}/train", "eval": f"{folder}/test", "augment": augment},
        vtab=None,
        **({} if vtab_of(recipe).sweep_each else {"sweep": None}),
    )


def with_data(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The recipes whose training set and test set exist.

    Raises:
        ValueError: no recipe has both.
    """
    existing = {
        name: recipe
        for name, recipe in recipes.items()
        if all(
            locate(str(path)).child(MANIFEST_FILE).exists()
            for path in (recipe.data.train, recipe.data.eval)
        )
    }
    if not existing:
        first = next(iter(recipes.values())).data
        raise ValueError(
            "vtab.data: no task has its data; the first would need the converted sets "
            f"{first.train} and {first.eval}"
        )
    return existing


def run_vtab(recipe: Recipe) -> VtabResult:
    """Fine-tune on every task that has data.

    Raises:
        ValueError: no task has data, or the recipe cannot work; nothing was started.
        RunStoppedError: as `run_trials`.
    """
    recipe = recipe.with_absolute_paths()
    recipes = {task.name: task_recipe(recipe, task) for task in vtab_of(recipe).tasks}
    resolved_runs, total_steps = dict[str, ResolvedRun](), 0
    for name, tuning in with_data(recipes).items():
        check_in_turn(tuning, f"vtab: {tuning.name}")
        resolved_runs[name] = resolved = resolve_run(tuning)
        total_steps += checked_steps(tuning, resolved.num_images)
        if not locate(tuning.run_folder).list_folders():  # it has not begun
            check_weights(resolved, "finetune")
    first, *_ = resolved_runs.values()
    trainings = [recipes[name] for name in resolved_runs]
    # At a restart the parent run continues, with the finished tasks under it.
    with open_parent(recipe, "vtab", first, total_steps, trainings) as parent:
        rows = _run_tasks(recipe, resolved_runs, parent)
        tops = [row.top1 for row in rows if row.top1 is not None]
        mean = f"; their mean is {statistics.fmean(tops):.2%}" if tops else ""
        published = parent.conclude(
            f"Of {len(rows)} tasks, {len(tops)} have an accuracy{mean}",
            vtab_metrics(rows),
            is_complete=len(tops) == len(rows),
        )
    is_papers_model = (recipe.model.name, recipe.paper.pretraining) in PAPER_MODELS
    return VtabResult(rows, vtab_table(rows, is_papers_model), published)


def _run_tasks(
    recipe: Recipe, resolved_runs: Mapping[str, ResolvedRun], parent: OpenParent
) -> list[TaskResult]:
    tasks = {task.name: task for task in vtab_of(recipe).tasks}
    results = run_trials(
        partial(_fine_tune, recipe, tasks),
        parent,
        "tasks",
        [resolved.recipe for resolved in resolved_runs.values()],
        [{"task": name} for name in resolved_runs],
    )
    absent = "absent: no converted data"
    rows = {name: TaskResult(task, error=absent) for name, task in tasks.items()}
    for (name, resolved), result in zip(resolved_runs.items(), results, strict=True):
        fields = result.get("row") or {"error": f"failed: {result['error']}"}
        rows[name] = TaskResult(tasks[name], num_images=resolved.num_images, **fields)
    return list(rows.values())


def _fine_tune(
    recipe: Recipe, tasks: Mapping[str, VtabTask], config: dict[str, Any], following: Following
) -> dict[str, Any]:
    # With `sweep_each` in the protocol's two stages: select a point on 200 images, train on all.
    task = tasks[config["task"]]
    tags = {"vit_ray.vtab_task": task.name, "vit_ray.vtab_group": task.group}
    try:
        # 200 images cannot include all of Sun397's classes.
        swept = fine_tune(task_recipe(recipe, task), following, tags, by_class=False)
    except RunFailedError as error:
        following.parent.record.event(EventKind.TASK_FAILED, f"{task.name}: {error}", 0)
        return {STEP: 0, METRIC: math.nan, "row": {"error": f"failed: {error}"}}
    row = {
        "top1": swept.mean,
        "deviation": swept.deviation if len(swept.finals) > 1 else None,
        "chosen": point_text(swept.best),
    }
    return {STEP: swept.finals[0].step, METRIC: swept.mean, "row": row}


def _means(rows: Sequence[TaskResult]) -> dict[str, float]:
    """Those means of the paper's Table 9 whose tasks all have an accuracy."""
    tops = {row.task.name: row.top1 for row in rows if row.top1 is not None}
    return {
        mean: statistics.fmean(tops[name] for name in names)
        for mean, names in MEANS.items()
        if tops.keys() >= set(names)
    }


def vtab_metrics(rows: Sequence[TaskResult]) -> dict[str, float]:
    """What the parent run records.

    The mean over tasks comes first, if every task has an accuracy; then the accuracy of each task,
    and those means of the paper whose tasks all have one.
    """
    tops = {row.task.name: row.top1 for row in rows if row.top1 is not None}
    metrics = {f"{VTAB_GROUP}{name}_top1": top1 for name, top1 in {**tops, **_means(rows)}.items()}
    first = {EVAL_TOP1: statistics.fmean(tops.values())} if len(tops) == len(rows) else {}
    return {**first, **metrics, VTAB_NUM_TASKS: float(len(tops))}


def vtab_table(rows: Sequence[TaskResult], is_papers_model: bool) -> Rows:
    """Tasks and means, ours and those of the paper's Table 9.

    A row is labelled `data` if every accuracy is of a task of VTAB-1k, by its name and its 1,000
    images, and of a model and a pre-training that the paper has; all others are `proxy`.
    """
    images = {row.task.name: row.num_images for row in rows}

    def line(title: str, names: Sequence[str], top1: float | None) -> dict[str, Any]:
        is_data = is_papers_model and all(
            name in VTAB_TASKS and images[name] == NUM_IMAGES for name in names
        )
        columns = [VTAB_TASKS.index(name) for name in names if name in VTAB_TASKS]
        papers = {
            f"paper: {model} %": statistics.fmean(values[column] for column in columns)
            if columns
            else None
            for model, values in TABLE_9.items()
        }
        label = "data" if is_data else "proxy"
        return {
            "task": title, "group": "", "images": "", "ours, top-1 %": in_percent(top1), **papers,
            "deviation %": "", "chosen": "", "label": "" if top1 is None else label, "note": "",
        }  # fmt: skip

    of_tasks = [
        line(row.task.name, [row.task.name], row.top1)
        | {
            "group": row.task.group, "images": row.num_images,
            "deviation %": in_percent(row.deviation), "chosen": row.chosen, "note": row.error,
        }
        for row in rows
    ]  # fmt: skip
    return of_tasks + [
        line(mean if mean == "mean" else f"mean of {mean}", MEANS[mean], top1)
        for mean, top1 in _means(rows).items()
    ]
