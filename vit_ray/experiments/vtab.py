"""VTAB-1k: every task fine-tuned with one recipe, group means, and the paper's row next to ours.

Section 4.1, Table 4 and Table 9 of the paper. Tasks run under one parent run and have stable names,
so that repeating a command continues. A task without data, or that failed, is a row like the
others; a group has a mean only if all of its tasks have an accuracy, and the paper's mean is taken
over the same tasks.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ray import tune

from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import VtabConfig, VtabTask
from vit_ray.data.dataset import MANIFEST_FILE
from vit_ray.experiments.parent_run import OpenParent, open_parent
from vit_ray.experiments.search_space import point_text
from vit_ray.experiments.sweep import check_in_turn, fine_tune, plan_sweep
from vit_ray.experiments.trials import (
    METRIC,
    STEP,
    Context,
    num_fitting,
    run_trials,
    tune_folder,
)
from vit_ray.launch.inputs.streams import ResolvedRun, resolve_run
from vit_ray.launch.paper_comparison import Rows, csv_text, in_percent
from vit_ray.launch.prepared_run import PreparedRun, check_weights
from vit_ray.launch.stopping import RunStoppedError
from vit_ray.metric_names import VTAB_GROUP, VTAB_NUM_TASKS
from vit_ray.outcomes import EventKind
from vit_ray.paper import TABLE_9, VTAB_TASKS
from vit_ray.storage import locate

NUM_IMAGES: Final = 1000
"""Images of each task's training set in VTAB-1k: 800 and 200."""
GROUPS = ("natural", "specialized", "structured")
PAPER_MODELS: Final = (
    ("ViT-H/14", "jft300m"), ("ViT-L/16", "jft300m"), ("ViT-L/16", "imagenet21k"),
)  # fmt: skip
"""Model and `paper.pretraining` of each column of the paper's Table 9."""
PAPER_GROUPS = {
    "natural": set(VTAB_TASKS[:7]),
    "specialized": set(VTAB_TASKS[7:11]),
    "structured": set(VTAB_TASKS[11:]),
    "mean": set(VTAB_TASKS),
}
"""Tasks of each mean of the paper's Table 9."""


@dataclass(frozen=True)
class TaskResult:
    """One row."""

    task: VtabTask
    top1: float | None = None
    """On the task's test set, with averaged weights if the recipe averages."""
    num_images: int | None = None
    """Images of its training set, 1,000 in VTAB-1k; None if there are no data."""
    run_id: str | None = None
    error: str = ""
    """Why there is no accuracy; empty if there is one."""
    deviation: float | None = None
    """Over seeds; None for a single run."""
    chosen: str = ""
    """The point that a sweep of the task has selected."""


@dataclass(frozen=True)
class VtabResult:
    """Every task of the recipe, in its order."""

    rows: list[TaskResult]
    parent_run_id: str | None
    hint: str
    is_papers_model: bool = False
    """Model and pre-training are those of a column of the paper's Table 9."""

    @property
    def is_complete(self) -> bool:
        return all(row.top1 is not None for row in self.rows)


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
    augment = {"flip": recipe.data.augment.flip and task.flip}
    if not task.crop:
        augment["kind"] = "resize"  # type: ignore[assignment]
    whole = recipe.data.augment.model_dump(mode="json") | augment
    return recipe.with_changes(
        name=f"{recipe.name}-{task.name}",
        data={"train": f"{folder}/train", "eval": f"{folder}/test", "augment": whole},
        vtab=None,
        **({} if vtab_of(recipe).sweep_each else {"sweep": None}),
    )


def run_vtab(recipe: Recipe) -> VtabResult | None:
    """Fine-tune on every task that has data; None if it was stopped on request.

    Raises:
        ValueError: no task has data, or the recipe cannot work; nothing was started.
    """
    recipe = recipe.with_absolute_paths()
    tasks = vtab_of(recipe).tasks
    recipes = {task.name: task_recipe(recipe, task) for task in tasks}
    has_begun = any(locate(one.run_folder).list_folders() for one in recipes.values())
    resolved, steps, trainings = dict[str, ResolvedRun](), 0, list[Recipe]()
    for name, one in recipes.items():
        sets = (one.data.train, one.data.eval)
        if all(locate(str(path)).child(MANIFEST_FILE).exists() for path in sets):
            resolved[name], its_steps, its_trainings = _checked(one)
            steps += its_steps
            trainings += its_trainings
    if not resolved:
        first = next(iter(recipes.values())).data
        raise ValueError(
            "vtab.data: no task has its data; the first would need the converted sets "
            f"{first.train} and {first.eval}"
        )
    shown = next(iter(resolved.values()))
    try:
        # Its own parent run continues, with the finished tasks under it.
        with open_parent(
            recipe, "vtab", shown, steps, continues=has_begun, trainings=trainings
        ) as parent:
            rows = _run_tasks(recipe, resolved, parent)
            parent.run.record.results(0, vtab_metrics(rows))
            is_papers = (recipe.model.name, recipe.paper.pretraining) in PAPER_MODELS
            parent.run.record.text("vtab/tasks.csv", csv_text(vtab_table(rows, is_papers)))
            outcome = VtabResult(rows, parent.run_id, parent.run.record.hint(), is_papers)
            parent.run.is_complete = outcome.is_complete
            return outcome
    except RunStoppedError:
        return None


def _checked(recipe: Recipe) -> tuple[ResolvedRun, int, list[Recipe]]:
    """A task's own training, the steps of all its trainings, and those that differ.

    Raises:
        ValueError: the recipe cannot work, or its weights do not exist.
    """
    if recipe.sweep is not None:
        check_in_turn(recipe, f"vtab: {recipe.name}")
        # 200 images cannot include all of Sun397's classes.
        plan = plan_sweep(recipe, needs_every_class=False)
        return plan.resolved, plan.total_steps, plan.trials
    resolved = resolve_run(recipe)
    if newest_checkpoint(locate(recipe.run_folder)) is None:
        check_weights(PreparedRun("finetune", resolved))
    return resolved, resolved.total_steps, [recipe]


def _run_tasks(
    recipe: Recipe, resolved: Mapping[str, ResolvedRun], parent: OpenParent
) -> list[TaskResult]:
    """A row for each task; a failed one does not end the others."""
    tasks = {task.name: task for task in vtab_of(recipe).tasks}
    recipes = [one.recipe for one in resolved.values()]
    ended = run_trials(
        partial(_fine_tune, recipe, tasks),
        parent.run,
        folder=tune_folder(recipe, "tasks"),
        space={"task": tune.grid_search(list(resolved))},
        max_concurrent=num_fitting(recipes, parent.cluster),
        is_private=parent.cluster.is_private,
    )
    found = {one["config"]["task"]: one["row"] for one in ended.results}
    lost = {"error": f"failed: {ended.lost.first_line}"}
    return [
        TaskResult(task, num_images=resolved[name].num_images, **found.get(name, lost))
        if name in resolved
        else TaskResult(task, error="absent: no converted data")
        for name, task in tasks.items()
    ]


def _fine_tune(
    recipe: Recipe, tasks: Mapping[str, VtabTask], config: dict[str, Any], context: Context
) -> dict[str, Any]:
    """Train a task, by the protocol's two stages if `sweep_each`: a point is selected on 200
    images, and trained on all of them.
    """
    task = tasks[config["task"]]
    tags = {"vit_ray.vtab_task": task.name, "vit_ray.vtab_group": task.group}
    try:
        found = fine_tune(task_recipe(recipe, task), context, tags, needs_every_class=False)
    except RunStoppedError:
        raise
    except Exception as error:
        reason = (str(error).strip() or repr(error)).partition("\n")[0]
        context.parent.record.event(EventKind.TASK_FAILED, f"{task.name}: {reason}", 0)
        return {STEP: 0, METRIC: math.nan, "row": {"error": f"failed: {reason}"}}
    row = {
        "top1": found.mean,
        "run_id": found.finals[0].run_id,
        "deviation": found.deviation if len(found.finals) > 1 else None,
        "chosen": point_text(found.best),
    }
    return {STEP: found.finals[0].step, METRIC: found.mean, "row": row}


def group_means(values: Sequence[tuple[str, float | None]]) -> dict[str, float | None]:
    """Mean of each group and of all tasks; None if one of its tasks has no value.

    Args:
        values: group and accuracy of each task.
    """
    found = {}
    for group in (*GROUPS, "mean"):
        mine = [value for its, value in values if group in (its, "mean")]
        whole = [value for value in mine if value is not None]
        found[group] = statistics.fmean(whole) if mine and len(whole) == len(mine) else None
    return found


def vtab_metrics(rows: Sequence[TaskResult]) -> dict[str, float]:
    """What the parent run records: accuracy of each task, and the complete means.

    A mean over other tasks than the paper's has another name.
    """
    metrics = {f"{VTAB_GROUP}{row.task.name}_top1": row.top1 for row in rows}
    for group, mean in group_means([(row.task.group, row.top1) for row in rows]).items():
        count = f"_{len(_members(group, rows))}_of_{len(PAPER_GROUPS[group])}"
        metrics[f"{VTAB_GROUP}{group}{'' if _is_whole(group, rows) else count}_top1"] = mean
    known = {key: value for key, value in metrics.items() if value is not None}
    return {**known, VTAB_NUM_TASKS: float(sum(row.top1 is not None for row in rows))}


def vtab_table(rows: Sequence[TaskResult], is_papers_model: bool) -> Rows:
    """Tasks and means, ours and those of the paper's Table 9.

    A row is labelled `data` if every accuracy is of a task of VTAB-1k, by its name and its 1,000
    images, and of a model and a pre-training that the paper has; all others are `proxy`.
    """
    lines: Rows = [
        {
            "task": row.task.name, "group": row.task.group, "images": row.num_images,
            **_accuracies([row.top1, *_of_paper(row)]), "deviation %": in_percent(row.deviation),
            "chosen": row.chosen, "label": _label([row], is_papers_model), "note": row.error,
        }
        for row in rows
    ]  # fmt: skip
    groups = [row.task.group for row in rows]
    columns_of_paper = zip(*map(_of_paper, rows), strict=True)
    accuracies = ([row.top1 for row in rows], *columns_of_paper)
    means = [group_means(list(zip(groups, values, strict=True))) for values in accuracies]
    for group, mean in means[0].items():
        title = "mean" if group == "mean" else f"mean of {group}"
        # The paper's mean is taken over the same tasks.
        title += "" if _is_whole(group, rows) else ", these tasks only"
        lines.append({
            "task": title, "group": "", "images": None,
            **_accuracies([of[group] for of in means]), "deviation %": None, "chosen": "",
            "label": _label(_members(group, rows), is_papers_model),
            "note": "" if mean is not None else "not all of its tasks have an accuracy",
        })  # fmt: skip
    return lines


def _accuracies(values: Sequence[float | None]) -> dict[str, float | None]:
    """Ours and those of the paper's models, by column."""
    titles = ["ours, top-1 %", *(f"paper: {name} %" for name in TABLE_9)]
    return {title: in_percent(one) for title, one in zip(titles, values, strict=False)}


def _label(rows: Sequence[TaskResult], is_papers_model: bool) -> str:
    if not rows or any(row.top1 is None for row in rows):
        return ""
    is_data = all(row.task.name in VTAB_TASKS and row.num_images == NUM_IMAGES for row in rows)
    return "data" if is_data and is_papers_model else "proxy"


def _members(group: str, rows: Sequence[TaskResult]) -> list[TaskResult]:
    return [row for row in rows if group in (row.task.group, "mean")]


def _is_whole(group: str, rows: Sequence[TaskResult]) -> bool:
    return {row.task.name for row in _members(group, rows)} == PAPER_GROUPS[group]


def _of_paper(row: TaskResult) -> list[float | None]:
    if row.task.name not in VTAB_TASKS:
        return [None] * len(TABLE_9)
    return [values[VTAB_TASKS.index(row.task.name)] / 100 for values in TABLE_9.values()]
