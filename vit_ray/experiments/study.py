"""A scaling study: every cell pre-trained, evaluated and transferred, as many at a time as fit.

Sections 4.3 and 4.4 of the paper, on whatever data the recipe names. Cells have stable names, so a
study that is started again skips what is finished and continues the cells that were cut short. A
cell that fails is started again from its newest checkpoint, and then is a row like the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from vit_ray.config import Recipe, require
from vit_ray.config.branch_origin import own_share
from vit_ray.config.command_sections import StudyConfig, StudyTask, SweepConfig
from vit_ray.experiments.asha import grace_steps
from vit_ray.experiments.branching import (
    begin_branch,
    branch_step,
    in_groups,
    with_kept_steps,
)
from vit_ray.experiments.finished_cells import finished_cells
from vit_ray.experiments.parent_run import OpenParent, earlier_run, open_parent
from vit_ray.experiments.retries import train_with_retries
from vit_ray.experiments.search_space import errors_of_point, points_of, with_point
from vit_ray.experiments.side_by_side import Room, room_of, run_side_by_side, starting_now
from vit_ray.experiments.stage import deciding_metric
from vit_ray.experiments.study_cells import Cell, CellResult, study_cells, study_of
from vit_ray.experiments.transfer import key_of_the_cell, run_transfer, task_recipe, task_tags
from vit_ray.experiments.write_page import page_meanwhile, page_of
from vit_ray.launch.cluster import capacity
from vit_ray.launch.cluster_checks import check_batch
from vit_ray.launch.model_checks import check_head_is_trained, check_model
from vit_ray.launch.run_metadata import training_cost
from vit_ray.launch.streams import ResolvedRun, resolve_run
from vit_ray.outcomes import EventKind
from vit_ray.tracking.past_runs import add_to_finished

_LOG = logging.getLogger(__name__)

Group = list[tuple[Cell, ResolvedRun]]
"""Cells that are trained one after another: one, or the lengths of a row that branches."""


@dataclass(frozen=True)
class StudyResult:
    """All cells in the order of the grid, and the page that shows them."""

    cells: list[CellResult]
    num_cells: int
    """Of the whole grid; more than `cells` if the study was stopped on request."""
    parent_run_id: str | None
    page: Path | None
    """None while MLflow is away: `jobs/report.py` makes it later."""
    hint: str

    @property
    def is_complete(self) -> bool:
        """Whether every cell of the grid was trained to its end."""
        return len(self.cells) == self.num_cells and not any(cell.error for cell in self.cells)


def run_study(recipe: Recipe) -> StudyResult:
    """Train and evaluate every cell that is not finished, and write the report.

    Raises:
        ValueError: a cell cannot work, or is finished with another recipe; nothing was started.
    """
    recipe = recipe.with_absolute_paths()
    cells = study_cells(recipe)
    resolved_runs = [resolve_run(cell.recipe) for cell in cells]
    steps_of_tasks = _check_tasks(cells, study_of(recipe).transfer)
    parent_id = earlier_run(recipe, "study")
    finished = finished_cells(recipe, cells, resolved_runs, parent_id)
    total_steps = sum(one.total_steps for one in resolved_runs) + steps_of_tasks
    resolved = resolved_runs[0]
    tags = {"vit_ray.num_cells": str(len(cells))}  # so that a report knows what has not begun
    open_cells = [cell.recipe for cell in cells if cell.name not in finished]
    with open_parent(
        recipe, "study", resolved, total_steps, parent_id, trainings=open_cells, tags=tags
    ) as parent:
        with page_meanwhile(recipe, parent.run_id) as renew_page:
            results = _run_cells(
                study_of(recipe), cells, resolved_runs, finished, parent, renew_page
            )
        parent.run.record.results(len(results), _totals(results))
        page = page_of(recipe, parent.run_id, parent.run.record)
        hint = parent.run.record.hint()
        outcome = StudyResult(results, len(cells), parent.run_id, page, hint)
        parent.run.is_complete = outcome.is_complete
        return outcome


def _check_tasks(cells: list[Cell], tasks: tuple[StudyTask, ...]) -> int:
    """Of each cell the recipe and its sweep; of the first the data, too: the same for all.

    Returns:
        Steps of all fine-tunings, trials and retrainings included.

    Raises:
        ValueError: one cannot work.
    """
    total_steps = 0
    for task in tasks:
        recipes = [task_recipe(cell, task) for cell in cells]
        resolved = resolve_run(recipes[0])
        require(recipes[0].data.eval, f"study.transfer {task.name!r}: data.eval", "a test set")
        for cell, recipe in zip(cells, recipes, strict=True):
            try:
                check_model(recipe)
                check_batch(recipe, resolved.num_images)
                batch = recipe.train.global_batch_size
                steps = recipe.optim.total_steps(resolved.num_images, batch)
                if recipe.sweep is None:
                    total_steps += steps
                else:
                    tried = _check_sweep(recipe, recipe.sweep, resolved.num_images)
                    total_steps += tried + recipe.sweep.seeds * steps
            except ValueError as error:
                told = f"study.transfer {task.name!r} of cell {cell.name!r}: {error}"
                raise ValueError(told) from None
    return total_steps


def _check_sweep(recipe: Recipe, sweep: SweepConfig, num_images: int) -> int:
    """Without its dev split, which is written first, and its weights, which are not there yet.

    Returns:
        Steps of its trials.

    Raises:
        ValueError: as `points_of` and `grace_steps`, or a point is of other weights or workers than
            the cell's, or its batch does not divide.
    """
    trials, kept = [], round(num_images * (1 - sweep.dev_fraction))
    for point in points_of(recipe, sweep):
        trials.append(with_point(recipe, point))
        with errors_of_point(recipe, point):
            if taken := key_of_the_cell(point):
                raise ValueError(f"{taken} is the cell's; leave it out")
            check_head_is_trained(trials[-1], "sweep_trial")
            check_batch(trials[-1], kept)
    steps = [one.optim.total_steps(kept, one.train.global_batch_size) for one in trials]
    if sweep.scheduler == "asha":
        grace_steps(sweep, max(steps))
    return sum(steps)


def _run_cells(
    study: StudyConfig,
    cells: list[Cell],
    resolved_runs: list[ResolvedRun],
    finished: dict[str, CellResult],
    parent: OpenParent,
    renew_page: Callable[[], None] = lambda: None,
) -> list[CellResult]:
    """Of all that have ended, in the order of the grid; of none that was stopped on request."""
    parent.run.control.begin_stage("cell", len(cells))
    run = _StudyRun(study, parent, finished, renew_page, len(cells))
    pairs = list(zip(cells, resolved_runs, strict=True))
    groups = [
        [pairs[index] for index in group]
        for group in in_groups(study, cells, [one.total_steps for one in resolved_runs])
    ]
    room = cluster_room(study)
    open_groups = _in_order([group for group in groups if not run.is_over(group)], room)
    soon = (cell for group in open_groups for cell, _ in group if cell.name not in finished)
    parent.start_workers(first.recipe if (first := next(soon, None)) else None)

    def room_now() -> Room:
        nonlocal room
        try:
            room = cluster_room(study)
        except Exception as error:  # of a cluster that does not answer for now
            _LOG.warning("what the cluster has is not known, cells start as before: %s", error)
        return room

    run_side_by_side(
        lambda place: run.train_group(open_groups[place]),
        lambda now: [_needs(group, now) for group in open_groups],
        room_now,
        count=len(open_groups),
        is_stopped=run.is_stopped,
    )
    return [run.ended[cell.name] for cell in cells if cell.name in run.ended]


@dataclass
class _StudyRun:
    """Cells on their way; its methods run in several threads, each with cells of its own."""

    study: StudyConfig
    parent: OpenParent
    finished: dict[str, CellResult]
    """By an earlier start, but for their missing transfers."""
    renew_page: Callable[[], None]
    """Called when a cell has ended and others have not."""
    num_cells: int
    ended: dict[str, CellResult] = field(default_factory=dict)

    def is_stopped(self) -> bool:
        """Whether the study was asked to stop."""
        return bool(self.parent.run.control.stop_reason())

    def is_over(self, group: Group) -> bool:
        """Whether nothing is left to do of the group; notes the end of what is finished."""
        for cell, resolved in group:
            before = self.finished.get(cell.name)
            if before is not None and not before.missing:
                self._note_end(before, resolved)
        return all(cell.name in self.ended for cell, _ in group)

    def train_group(self, group: Group) -> None:
        """One after another, the longest of a branching row first."""
        (longest, _), *others = group
        steps = [branch_step(cell, resolved.total_steps) for cell, resolved in others]
        for place, (cell, resolved) in enumerate(group):
            if cell.name in self.ended:
                continue
            if self.is_stopped():
                return
            result = self.finished.get(cell.name)
            if result is None and place == 0:
                result = self._train(with_kept_steps(longest, steps))
            elif result is None:
                result = self._train(cell, longest, steps[place - 1])
            if result is not None and not result.error:
                result = self._transfer(result)
            if result is not None:
                self._note_end(replace(result, cell=cell), resolved)
                if len(self.ended) < self.num_cells:
                    self.renew_page()

    def _train(self, cell: Cell, trunk: Cell | None = None, step: int = 0) -> CellResult | None:
        """None if it was stopped on request. A cell that fails does not end the study."""
        recipe = cell.recipe.with_changes(tracking={"parent_run_id": self.parent.run_id})
        tags = {"vit_ray.study_label": cell.label}
        retries, origin = self.study.retries, ""
        try:
            if trunk is not None and (
                origin := begin_branch(cell, trunk, step, self._tell_of_branch)
            ):
                tags["vit_ray.branched_from"] = origin
            parent, retried = self.parent.for_children, EventKind.CELL_RETRIED
            result = train_with_retries(recipe, "study_cell", parent, retries, tags, retried)
        except Exception as error:
            return CellResult(cell, {}, None, error=_told(error))
        if not result.is_complete:
            return None
        return CellResult(
            cell,
            result.metrics,
            result.run_id,
            result.already_complete,
            branched_from=origin,
            missing=self.study.transfer,
        )

    def _tell_of_branch(self, text: str) -> None:
        self.parent.run.record.event(EventKind.BRANCH, text, 0)

    def _transfer(self, result: CellResult) -> CellResult | None:
        """With accuracies on the tasks; None if it was stopped. One that fails ends no other."""
        cell, errors = result.cell, []
        for task in result.missing:
            if self.is_stopped():
                return None
            try:
                found = run_transfer(cell, task, self.parent, self.study.retries)
            except Exception as error:
                errors.append(f"transfer to {task.name}: {_told(error)}")
                continue
            if found is None:
                return None
            if result.run_id is not None:
                tags = task_tags(cell, task)
                add_to_finished(cell.recipe.tracking, result.run_id, found, tags)
            result = replace(result, metrics={**result.metrics, **found})
        return replace(result, error="; ".join(errors), missing=())

    def _note_end(self, result: CellResult, resolved: ResolvedRun) -> None:
        cell, run = result.cell, self.parent.run
        self.ended[cell.name] = result
        if result.error:
            run.record.event(EventKind.CELL_FAILED, f"{cell.name}: {result.error}", 0)
        run.control.child_step(cell.name, resolved.total_steps)
        run.control.child_ended(cell.label, result.metrics.get(deciding_metric(cell.recipe)))


def _told(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _in_order(groups: list[Group], room: Room) -> list[Group]:
    """Largest first where some run side by side; one after another as the recipe has them."""
    needs = sorted((_needs(group, room) for group in groups), key=lambda it: (it.gpus, it.cpus))
    if len(starting_now(range(len(needs[:2])), (), needs[:2], room)) < 2:
        return groups

    def exaflops(group: Group) -> float:
        cell, resolved = group[0]
        cost = training_cost(cell.recipe, resolved, resolved.total_steps)
        return cost["study/exaflops"]

    return sorted(groups, key=exaflops, reverse=True)


def _needs(group: Group, room: Room) -> Room:
    return room_of(group[0][0].recipe, room)


def cluster_room(study: StudyConfig) -> Room:
    """What the cells may take together, of the cluster as it is now or may become."""
    gpus, cpus = capacity()
    most = gpus if study.max_gpus is None else min(gpus, study.max_gpus)
    return Room(most, cpus, study.max_concurrent or math.inf)


def _totals(results: list[CellResult]) -> dict[str, float]:
    failed = sum(bool(result.error) for result in results)
    return {
        "study/cells": float(len(results) - failed),
        "study/failed_cells": float(failed),
        "study/exaflops_total": sum(map(_exaflops_computed, results)),
    }


def _exaflops_computed(result: CellResult) -> float:
    """Of a branch those of its cool-down alone: its trunk has computed the rest."""
    found = result.metrics
    batch = result.cell.recipe.train.global_batch_size
    share = own_share(result.branched_from, batch, found.get("study/images_seen"))
    return found.get("study/exaflops", 0.0) * share
