"""A scaling study: every cell pre-trained, evaluated and transferred, as many in parallel as fit.

Sections 4.3 and 4.4 of the paper, on any data that the recipe names. Cells have stable names, so a
restarted study skips finished cells and continues interrupted ones. A failed cell is restarted from
its newest checkpoint, and if it fails again is a row like the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from vit_ray.config import Recipe, require
from vit_ray.config.branch_origin import own_share
from vit_ray.config.command_sections import StudyConfig, StudyTask, SweepConfig
from vit_ray.config.validation import errors_of
from vit_ray.experiments.branching import begin_branch, branch_step, with_kept_steps
from vit_ray.experiments.finished_cells import finished_cells
from vit_ray.experiments.parent_run import OpenParent, earlier_run, open_parent
from vit_ray.experiments.runner import Flow, Work, cluster_room, in_parallel, room_of
from vit_ray.experiments.search_space import errors_of_point, points_of, with_point
from vit_ray.experiments.study_cells import Cell, CellResult, study_cells, study_of
from vit_ray.experiments.study_flow import group_flow, in_groups, in_order
from vit_ray.experiments.sweep_state import grace_steps
from vit_ray.experiments.training import deciding_metric
from vit_ray.experiments.transfer import key_of_the_cell, task_recipe, task_tags, transfer
from vit_ray.experiments.write_page import page_of
from vit_ray.launch.cluster.cluster_checks import check_batch
from vit_ray.launch.inputs.streams import ResolvedRun, resolve_run
from vit_ray.launch.model_checks import check_head_is_trained, check_model
from vit_ray.launch.record.run_metadata import training_cost
from vit_ray.launch.stopping import RunStoppedError
from vit_ray.metric_names import (
    STUDY_CELLS,
    STUDY_EXAFLOPS,
    STUDY_EXAFLOPS_TOTAL,
    STUDY_FAILED_CELLS,
    STUDY_IMAGES_SEEN,
)
from vit_ray.outcomes import EventKind
from vit_ray.tracking.past_runs import add_to_finished

Planned = tuple[Cell, ResolvedRun]


@dataclass(frozen=True)
class StudyResult:
    """All cells in the order of the grid, and the page that shows them."""

    cells: list[CellResult]
    num_cells: int
    """Cells of the whole grid; more than `cells` if the study was stopped on request."""
    parent_run_id: str | None
    page: Path | None
    """None while MLflow is away: `vit-ray report` can write it later."""
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
    # Also those given by a row: a trial's process runs in a separate folder.
    cells = [replace(c, recipe=c.recipe.with_absolute_paths()) for c in study_cells(recipe)]
    resolved_runs = [resolve_run(cell.recipe) for cell in cells]
    fine_tunings, steps_of_tasks = _check_tasks(cells, study_of(recipe).transfer)
    parent_id = earlier_run(recipe, "study")
    finished = finished_cells(recipe, cells, resolved_runs, parent_id)
    total_steps = sum(one.total_steps for one in resolved_runs) + steps_of_tasks
    resolved = resolved_runs[0]
    # So that a report knows which cells have not started.
    tags = {"vit_ray.num_cells": str(len(cells))}
    trainings = [cell.recipe for cell in cells if cell.name not in finished] + fine_tunings
    with open_parent(
        recipe, "study", resolved, total_steps, parent_id, trainings=trainings, tags=tags
    ) as parent:
        results = StudyRun(study_of(recipe), cells, resolved_runs, finished, parent).run()
        parent.run.record.results(len(results), _totals(results))
        page = page_of(recipe, parent.run_id, parent.run.record)
        hint = parent.run.record.hint()
        outcome = StudyResult(results, len(cells), parent.run_id, page, hint)
        parent.run.is_complete = outcome.is_complete
        return outcome


def _check_tasks(cells: list[Cell], tasks: tuple[StudyTask, ...]) -> tuple[list[Recipe], int]:
    """Check each cell's recipe and sweep, and the first cell's data, which all cells share.

    Returns:
        The fine-tunings, and steps of all of them, trials and retrainings included.

    Raises:
        ValueError: a fine-tuning cannot work.
    """
    fine_tunings: list[Recipe] = []
    total_steps = 0
    for task in tasks:
        recipes = [task_recipe(cell, task).with_absolute_paths() for cell in cells]
        fine_tunings += recipes
        resolved = resolve_run(recipes[0])
        require(recipes[0].data.eval, f"study.transfer {task.name!r}: data.eval", "a test set")
        for cell, recipe in zip(cells, recipes, strict=True):
            with errors_of(f"study.transfer {task.name!r} of cell {cell.name!r}"):
                check_model(recipe)
                check_batch(recipe, resolved.num_images)
                batch = recipe.train.global_batch_size
                steps = recipe.optim.total_steps(resolved.num_images, batch)
                if recipe.sweep is None:
                    total_steps += steps
                else:
                    tried = _check_sweep(recipe, recipe.sweep, resolved.num_images)
                    total_steps += tried + recipe.sweep.seeds * steps
    return fine_tunings, total_steps


def _check_sweep(recipe: Recipe, sweep: SweepConfig, num_images: int) -> int:
    """Checked without its dev split, which is written first, and its weights, which do not exist
    yet.

    Returns:
        Steps of its trials.

    Raises:
        ValueError: as `points_of` and `grace_steps`, or a point has other weights or workers than
            the cell, or its batch does not divide.
    """
    trials, kept = [], round(num_images * (1 - sweep.dev_fraction))
    for point in points_of(recipe, sweep):
        trials.append(with_point(recipe, point))
        with errors_of_point(recipe, point):
            if taken := key_of_the_cell(point):
                raise ValueError(f"{taken} comes from the cell; leave it out")
            check_head_is_trained(trials[-1], "sweep_trial")
            check_batch(trials[-1], kept)
    steps = [one.optim.total_steps(kept, one.train.global_batch_size) for one in trials]
    if sweep.scheduler == "asha":
        grace_steps(sweep, max(steps))
    return sum(steps)


@dataclass
class StudyRun:
    """The cells of a study in progress."""

    study: StudyConfig
    cells: list[Cell]
    resolved_runs: list[ResolvedRun]
    finished: dict[str, CellResult]
    """Cells finished by an earlier start, except for missing transfers."""
    parent: OpenParent
    """Called when a cell has ended and others have not."""
    ended: dict[str, CellResult] = field(default_factory=dict)

    def run(self) -> list[CellResult]:
        """Of all cells that have ended and were not stopped, in the order of the grid."""
        study, parent = self.study, self.parent
        parent.run.control.begin_stage("cell", len(self.cells))
        pairs = list(zip(self.cells, self.resolved_runs, strict=True))
        steps = [one.total_steps for one in self.resolved_runs]
        groups: list[Sequence[Planned]] = [
            [pairs[k] for k in group] for group in in_groups(study, self.cells, steps)
        ]
        room = cluster_room(study.max_concurrent, study.max_gpus)
        groups = in_order(
            [group for group in groups if not self._is_over(group)],
            room,
            lambda one: room_of(one[0].recipe, room),
            lambda one: training_cost(one[1], one[1].total_steps)[STUDY_EXAFLOPS],
        )
        soon = (cell for group in groups for cell, _ in group if cell.name not in self.finished)
        parent.start_workers(first.recipe if (first := next(soon, None)) else None)
        flows = [
            group_flow(group, partial(self._train, branches=group[1:]), self._transfers)
            for group in groups
        ]
        parent.run_flow(in_parallel(flows), study.max_concurrent, study.max_gpus)
        return [self.ended[cell.name] for cell in self.cells if cell.name in self.ended]

    def _is_over(self, group: Sequence[Planned]) -> bool:
        """Whether nothing is left to do in the group; notes the end of what is finished."""
        for cell, resolved in group:
            before = self.finished.get(cell.name)
            if before is not None and not before.missing:
                self._note_end(before, resolved)
        return all(cell.name in self.ended for cell, _ in group)

    def _train(
        self, planned: Planned, trunk: Planned | None, branches: Sequence[Planned]
    ) -> Flow[CellResult]:
        """A failed cell does not end the study.

        Args:
            trunk: its checkpoint is the start of a branch.
            branches: of the trunk.
        """
        cell, resolved = planned
        if cell.name in self.finished:
            return self.finished[cell.name]
        kept, begin = cell, None
        if trunk is None:
            kept = with_kept_steps(cell, [branch_step(c, its.total_steps) for c, its in branches])
        else:
            begin = partial(begin_branch, cell, trunk[0], branch_step(cell, resolved.total_steps))
        training = self.parent.training(
            kept.recipe,
            "study_cell",
            tags={"vit_ray.study_label": cell.label},
            retries=self.study.retries,
            begin=begin,
        )
        (outcome,) = yield [Work(training)]
        if outcome.result is None:
            return CellResult(cell, {}, None, error=outcome.error.splitlines()[0])
        return CellResult(
            cell,
            outcome.result.metrics,
            outcome.run_id,
            outcome.result.already_complete,
            branched_from=outcome.branched_from,
            missing=self.study.transfer,
        )

    def _transfers(self, planned: Planned, result: CellResult) -> Flow[None]:
        """Add accuracies on the tasks to the cell's run. A failed task does not end the others."""
        cell, resolved = planned
        if cell.name in self.ended:
            return
        if not result.error:
            found = yield [self._transfer(cell, task) for task in result.missing]
            metrics, errors = dict(result.metrics), []
            for task, (values, error) in zip(result.missing, found, strict=True):
                if error:
                    errors.append(f"transfer to {task.name}: {error}")
                elif result.run_id is not None:
                    tags = task_tags(cell, task)
                    add_to_finished(cell.recipe.tracking, result.run_id, values, tags)
                metrics |= values
            result = replace(result, metrics=metrics, error="; ".join(errors), missing=())
        self._note_end(result, resolved)

    def _transfer(self, cell: Cell, task: StudyTask) -> Flow[tuple[dict[str, float], str]]:
        """Accuracies on a task, or why there are none."""
        try:
            return (yield from transfer(cell, task, self.parent, self.study.retries)), ""
        except RunStoppedError:
            raise
        except Exception as error:
            return {}, (str(error).strip() or repr(error)).splitlines()[0]

    def _note_end(self, result: CellResult, resolved: ResolvedRun) -> None:
        cell, run = result.cell, self.parent.run
        self.ended[cell.name] = result
        if result.error:
            run.record.event(EventKind.CELL_FAILED, f"{cell.name}: {result.error}", 0)
        run.control.child_step(cell.name, resolved.total_steps)
        run.control.child_ended(cell.label, result.metrics.get(deciding_metric(cell.recipe)))


def _totals(results: list[CellResult]) -> dict[str, float]:
    failed = sum(bool(result.error) for result in results)
    # Of a branch only those of its cool-down: its trunk has computed the rest.
    exaflops = [
        one.metrics.get(STUDY_EXAFLOPS, 0.0)
        * own_share(
            one.branched_from,
            one.cell.recipe.train.global_batch_size,
            one.metrics.get(STUDY_IMAGES_SEEN),
        )
        for one in results
    ]
    return {
        STUDY_CELLS: float(len(results) - failed),
        STUDY_FAILED_CELLS: float(failed),
        STUDY_EXAFLOPS_TOTAL: sum(exaflops, 0.0),
    }
