"""A scaling study: every cell pre-trained, evaluated and transferred, as many in parallel as fit.

Sections 4.3 and 4.4 of the paper, on any data that the recipe names. A trial of Ray Tune trains a
cell, then the cell's fine-tunings, then the cells that branch off it. Cells have stable names, so a
restarted study skips finished cells and resumes interrupted cells. A failed cell stays in the
results, with the error.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import StudyConfig, StudyTask
from vit_ray.config.schema import errors_of
from vit_ray.experiments.search_space import checked_steps, points_of
from vit_ray.experiments.study_cells import (
    Cell,
    begin_branch,
    branch_step,
    in_groups,
    key_of_the_cell,
    study_cells,
    study_of,
    task_recipe,
)
from vit_ray.experiments.sweep import fine_tune
from vit_ray.experiments.trials import (
    METRIC,
    STEP,
    OpenParent,
    Outcome,
    Published,
    open_parent,
    run_trials,
    train_child,
)
from vit_ray.launch.resolved_run import resolve_run
from vit_ray.launch.run import Following
from vit_ray.launch.run_record import add_to_ended
from vit_ray.metric_names import (
    EVAL_TOP1,
    STUDY_CELLS,
    STUDY_FAILED_CELLS,
    TRANSFER_GROUP,
    TRANSFER_MEAN_TOP1,
)
from vit_ray.outcomes import EventKind, RunFailedError


@dataclass(frozen=True)
class CellResult:
    """The result of a cell.

    Attributes:
        outcome: of the training; metrics and error include those of the transfers.
        branched_from: cell and step of the checkpoint that the training started from; empty if the
            training started from step 0.
    """

    cell: Cell
    outcome: Outcome
    branched_from: str = ""


@dataclass(frozen=True)
class StudyResult:
    """All cells in the order of the grid."""

    cells: list[CellResult]
    published: Published


def run_study(recipe: Recipe) -> StudyResult:
    """Train and evaluate every cell, and write the report.

    Raises:
        ValueError: a cell cannot work; nothing was started.
        RunStoppedError: as `run_trials`.
    """
    recipe = recipe.with_absolute_paths()
    cells = study_cells(recipe)
    resolved_runs = [resolve_run(cell.recipe) for cell in cells]
    cells = [
        replace(cell, steps=resolved.total_steps)
        for cell, resolved in zip(cells, resolved_runs, strict=True)
    ]
    fine_tunings, steps_of_tasks = _check_tasks(cells, study_of(recipe).transfer)
    trainings = [*(cell.recipe for cell in cells), *fine_tunings]
    # So that a report knows which cells have not started.
    tags = {"vit_ray.num_cells": str(len(cells))}
    total_steps = sum(cell.steps for cell in cells) + steps_of_tasks
    with open_parent(
        recipe, "study", resolved_runs[0], total_steps, trainings, tags=tags
    ) as parent:
        results = _run_cells(cells, parent)
        totals = _totals(results)
        published = parent.conclude(
            f"Of {len(results)} cells, {totals[STUDY_FAILED_CELLS]:.0f} failed",
            totals,
            is_complete=not totals[STUDY_FAILED_CELLS],
            step=len(results),
        )
    return StudyResult(results, published)


def _check_tasks(cells: list[Cell], tasks: tuple[StudyTask, ...]) -> tuple[list[Recipe], int]:
    """Check each cell's fine-tunings, with the data of the first cell, which all cells share.

    Returns:
        The fine-tunings, and the sum of their steps, trials and retrainings included.

    Raises:
        ValueError: a fine-tuning cannot work.
    """
    fine_tunings, total_steps = list[Recipe](), 0
    for task in tasks:
        recipes = [task_recipe(cell, task) for cell in cells]
        fine_tunings += recipes
        num_images = resolve_run(recipes[0]).num_images
        require(recipes[0].data.eval, f"study.transfer {task.name!r}: data.eval", "a test set")
        for cell, recipe in zip(cells, recipes, strict=True):
            with errors_of(f"study.transfer {task.name!r} of cell {cell.name!r}"):
                for point in points_of(recipe, recipe.sweep) if recipe.sweep else ():
                    if taken := key_of_the_cell(point):
                        raise ValueError(f"sweep.space: {taken} comes from the cell; leave it out")
                total_steps += checked_steps(recipe, num_images)
    return fine_tunings, total_steps


def _run_cells(cells: Sequence[Cell], parent: OpenParent) -> list[CellResult]:
    study = study_of(parent.recipe)
    groups = {group[0].name: group for group in in_groups(study, cells)}
    results = run_trials(
        partial(_train_group, study, groups),
        parent,
        "cells",
        [trunk.recipe for trunk, *_ in groups.values()],
        [{"cell": name} for name in groups],
        max_concurrent=study.max_concurrent,
    )
    trained: dict[str, CellResult] = {}
    for group, result in zip(groups.values(), results, strict=True):
        for cell in group:
            fields = result.get("cells", {}).get(cell.name, result)  # else the process died
            origin = fields.get("branched_from", "")
            trained[cell.name] = CellResult(cell, Outcome.of_result(fields), origin)
    return [trained[cell.name] for cell in cells]


def _train_group(
    study: StudyConfig,
    groups: Mapping[str, Sequence[Cell]],
    config: dict[str, Any],
    following: Following,
) -> dict[str, Any]:
    """Train a cell and its transfers; of a branching row the longest cell first, then the others.

    A failed cell does not end the others.
    """
    trunk, *branches = groups[config["cell"]]
    tags = {"vit_ray.study_label": trunk.label}
    keep_steps = {*trunk.recipe.checkpoint.keep_steps, *map(branch_step, branches)} - {0}
    saving = trunk.recipe.with_changes(checkpoint={"keep_steps": sorted(keep_steps)})
    outcome = train_child(following, saving, "study_cell", tags)
    following = Following(following.parent, following.stop)  # Tune follows the longest cell alone
    cells = {trunk.name: asdict(_with_transfers(study, trunk, outcome, following))}
    for cell in branches:
        branched_from = begin_branch(cell, trunk)
        if branched_from:
            following.parent.record.event(EventKind.BRANCH, f"{cell.name}: {branched_from}", 0)
        of_branch = train_child(following, cell.recipe, "study_cell", tags)
        fields = asdict(_with_transfers(study, cell, of_branch, following))
        cells[cell.name] = fields | {"branched_from": branched_from}
    return {STEP: outcome.step, METRIC: outcome.top1, "cells": cells}


def _with_transfers(
    study: StudyConfig, cell: Cell, outcome: Outcome, following: Following
) -> Outcome:
    """Fine-tune a cell on each task, and add the accuracies to the cell's run and its outcome.

    A failed task does not end the others.
    """
    metrics, top1 = dict(outcome.metrics), list[float]()
    errors = [outcome.error] if outcome.error else []
    for task in () if outcome.error else study.transfer:
        tags = {"vit_ray.transfer_task": task.name, "vit_ray.study_cell": cell.name}
        key = f"{TRANSFER_GROUP}{task.name}_top1"
        try:
            swept = fine_tune(task_recipe(cell, task), following, tags)
        except RunFailedError as error:
            errors.append(f"transfer to {task.name}: {error}")
            continue
        top1.append(swept.mean)
        added = {key: swept.mean}
        if swept.rows:
            added[f"{key}_std"] = swept.deviation
        if len(top1) == len(study.transfer):
            added[TRANSFER_MEAN_TOP1] = statistics.fmean(top1)
        metrics |= added
        add_to_ended(cell.recipe, outcome.run_id, added, following.parent)
    if errors:
        text = f"{cell.name}: {'; '.join(errors)}"
        following.parent.record.event(EventKind.CELL_FAILED, text, 0)
    following.parent.record.child_step(cell.name, cell.steps)
    return replace(outcome, metrics=metrics, error="; ".join(errors))


def _totals(results: list[CellResult]) -> dict[str, float]:
    failed = sum(bool(result.outcome.error) for result in results)
    # Cells without a test set are evaluated on held-out images, and are not compared.
    tested = [result.outcome.metrics for result in results if result.cell.recipe.data.eval]
    top1 = [metrics[EVAL_TOP1] for metrics in tested if EVAL_TOP1 in metrics]
    return {
        **({EVAL_TOP1: max(top1)} if top1 else {}),  # the first that MLflow's pages show
        STUDY_CELLS: float(len(results) - failed),
        STUDY_FAILED_CELLS: float(failed),
    }
