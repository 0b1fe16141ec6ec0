"""A scaling study: every cell pre-trained, evaluated and transferred, as many in parallel as fit.

Sections 4.3 and 4.4 of the paper, on any data that the recipe names. A trial of Ray Tune trains a
cell, then the cell's fine-tunings, then the cells that branch off it. Cells have stable names, so a
restarted study skips finished cells and resumes interrupted cells. A failed cell stays in the
results, with the error.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune

from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import StudyConfig, StudyTask
from vit_ray.config.schema import errors_of
from vit_ray.experiments.search_space import checked_steps, points_of
from vit_ray.experiments.study_cells import (
    Cell,
    CellResult,
    Planned,
    begin_branch,
    branch_step,
    in_groups,
    key_of_the_cell,
    study_cells,
    study_of,
    task_recipe,
    with_kept_steps,
)
from vit_ray.experiments.sweep import fine_tune
from vit_ray.experiments.trials import (
    METRIC,
    STEP,
    Context,
    OpenParent,
    Outcome,
    open_parent,
    page_of,
    run_trials,
)
from vit_ray.launch.resolved_run import resolve_run
from vit_ray.launch.run_record import NOTE, add_to_ended, description
from vit_ray.launch.terminal import RunStoppedError
from vit_ray.metric_names import (
    EVAL_TOP1,
    STUDY_CELLS,
    STUDY_FAILED_CELLS,
    TRANSFER_GROUP,
    TRANSFER_MEAN_TOP1,
)
from vit_ray.outcomes import EventKind
from vit_ray.storage import locate


@dataclass(frozen=True)
class StudyResult:
    """All cells in the order of the grid, and the page that shows them.

    Attributes:
        page: None while MLflow is away: `vit-ray report` can write it later.
    """

    cells: list[CellResult]
    parent_run_id: str | None
    page: Path | None
    hint: str

    @property
    def is_complete(self) -> bool:
        """Whether every cell of the grid was trained to its end."""
        return not any(cell.error for cell in self.cells)


def run_study(recipe: Recipe) -> StudyResult | None:
    """Train and evaluate every cell, and write the report; None if it was asked to stop.

    Raises:
        ValueError: a cell cannot work; nothing was started.
    """
    recipe = recipe.with_absolute_paths()
    # Also paths in a row's changes: a trial's process runs in another folder.
    cells = [replace(c, recipe=c.recipe.with_absolute_paths()) for c in study_cells(recipe)]
    resolved_runs = [resolve_run(cell.recipe) for cell in cells]
    fine_tunings, steps_of_tasks = _check_tasks(cells, study_of(recipe).transfer)
    steps = [resolved.total_steps for resolved in resolved_runs]
    has_begun = any(locate(cell.recipe.run_folder).list_folders() for cell in cells)
    try:
        with open_parent(
            recipe,
            "study",
            resolved_runs[0],
            sum(steps) + steps_of_tasks,
            continues=has_begun,
            trainings=[cell.recipe for cell in cells] + fine_tunings,
            # So that a report knows which cells have not started.
            tags={"vit_ray.num_cells": str(len(cells))},
        ) as parent:
            results = _run_cells(list(zip(cells, steps, strict=True)), parent)
            totals, record = _totals(results), parent.run.record
            record.results(len(results), totals)
            note = partial(description, recipe, resolved_runs[0], record.command)
            summary = f"Of {len(results)} cells, {totals[STUDY_FAILED_CELLS]:.0f} failed"
            record.tag(NOTE, note(summary))
            if written := page_of(parent):
                record.tag(NOTE, note("\n\n".join(written.lead)))
            page = written.page if written else None
            outcome = StudyResult(results, parent.run_id, page, record.hint())
            parent.run.is_complete = outcome.is_complete
            return outcome
    except RunStoppedError:
        return None


def _check_tasks(cells: list[Cell], tasks: tuple[StudyTask, ...]) -> tuple[list[Recipe], int]:
    """Check each cell's fine-tunings, with the data of the first cell, which all cells share.

    Returns:
        The fine-tunings, and the sum of their steps, trials and retrainings included.

    Raises:
        ValueError: a fine-tuning cannot work.
    """
    fine_tunings, total_steps = list[Recipe](), 0
    for task in tasks:
        recipes = [task_recipe(cell, task).with_absolute_paths() for cell in cells]
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


def _run_cells(planned: list[Planned], parent: OpenParent) -> list[CellResult]:
    study = study_of(parent.recipe)
    groups = {group[0][0].name: group for group in in_groups(study, planned)}
    ended = run_trials(
        partial(_train_group, study, groups),
        parent,
        "cells",
        [group[0][0].recipe for group in groups.values()],
        space={"cell": tune.grid_search(list(groups))},
        max_concurrent=study.max_concurrent,
    )
    lost: dict[str, Any] = {"metrics": {}, "run_id": None, "error": ended.lost.error}
    trained = {name: fields for result in ended.results for name, fields in result["cells"].items()}
    return [CellResult(cell, **trained.get(cell.name, lost)) for cell, _ in planned]


def _train_group(
    study: StudyConfig,
    groups: Mapping[str, Sequence[Planned]],
    config: dict[str, Any],
    context: Context,
) -> dict[str, Any]:
    """Train a cell and its transfers; of a branching row the longest cell first, then the others.

    A failed cell does not end the others.
    """
    (trunk, trunk_steps), *branches = groups[config["cell"]]
    saving = with_kept_steps(trunk, [branch_step(cell, steps) for cell, steps in branches])
    tags = {"vit_ray.study_label": trunk.label}
    outcome = context.train(saving.recipe, "study_cell", tags)
    cells = {trunk.name: _with_transfers(study, (trunk, trunk_steps), outcome, "", context)}
    for cell, steps in branches:
        branched_from = begin_branch(cell, trunk, branch_step(cell, steps))
        if branched_from:
            context.parent.record.event(EventKind.BRANCH, f"{cell.name}: {branched_from}", 0)
        of_branch = context.alone.train(cell.recipe, "study_cell", tags)
        cells[cell.name] = _with_transfers(study, (cell, steps), of_branch, branched_from, context)
    return {STEP: outcome.step, METRIC: outcome.top1, "cells": cells}


def _with_transfers(
    study: StudyConfig, planned: Planned, outcome: Outcome, branched_from: str, context: Context
) -> dict[str, Any]:
    """Fine-tune a cell on each task, and add the accuracies to the cell's run.

    A failed task does not end the others.

    Returns:
        The fields of the cell's `CellResult`.
    """
    cell, steps = planned
    keys = {f"{TRANSFER_GROUP}{task.name}_top1" for task in study.transfer}
    metrics, errors = dict(outcome.metrics), [outcome.first_line] if outcome.error else []
    for task in () if errors else study.transfer:
        try:
            added = _transfer(cell, task, context)
            metrics |= added
            if keys <= metrics.keys():
                added[TRANSFER_MEAN_TOP1] = statistics.fmean(metrics[key] for key in keys)
                metrics |= added
            add_to_ended(cell.recipe, outcome.run_id, added, context.parent)
        except RunStoppedError:
            raise
        except Exception as error:
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            errors.append(f"transfer to {task.name}: {reason}")
    if errors:
        text = f"{cell.name}: {'; '.join(errors)}"
        context.parent.record.event(EventKind.CELL_FAILED, text, 0)
    context.parent.record.child_step(cell.name, steps)
    return {
        "metrics": metrics,
        "run_id": outcome.run_id,
        "was_finished": outcome.was_finished,
        "branched_from": branched_from,
        "error": "; ".join(errors),
    }


def _transfer(cell: Cell, task: StudyTask, context: Context) -> dict[str, float]:
    """Accuracy of the cell on the task, as metrics of the cell's run.

    Raises:
        RunFailedError: the fine-tuning, or each trial of the sweep, failed.
        ValueError: the recipe cannot work, or the weights do not exist.
    """
    recipe = task_recipe(cell, task).with_absolute_paths()
    tags = {"vit_ray.transfer_task": task.name, "vit_ray.study_cell": cell.name}
    key, swept = f"{TRANSFER_GROUP}{task.name}_top1", fine_tune(recipe, context, tags)
    return {key: swept.mean} | ({f"{key}_std": swept.deviation} if recipe.sweep else {})


def _totals(results: list[CellResult]) -> dict[str, float]:
    failed = sum(bool(result.error) for result in results)
    # Cells without a test set are evaluated on held-out images, and are not compared.
    tested = [result.metrics for result in results if result.cell.recipe.data.eval]
    top1 = [metrics[EVAL_TOP1] for metrics in tested if EVAL_TOP1 in metrics]
    return {
        **({EVAL_TOP1: max(top1)} if top1 else {}),  # the first that MLflow's pages show
        STUDY_CELLS: float(len(results) - failed),
        STUDY_FAILED_CELLS: float(failed),
    }
