"""A scaling study: models by data sizes by lengths, each cell pre-trained and few-shot evaluated.

Sections 4.3 and 4.4 of the paper, on whatever data the recipe names. Cells run one after another,
each on all workers; their names are derived from the grid, so a study that is started again skips
what is finished and continues the cell that was cut short.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import StudyModel
from vit_ray.config.decisive import DATA_SET, EVALUATED_SETS, decisive_changes
from vit_ray.experiments.page import page_of
from vit_ray.experiments.parent_run import OpenParent, open_parent
from vit_ray.launch.preflight import ResolvedRun, resolve_run
from vit_ray.launch.run import train
from vit_ray.launch.run_metadata import data_inputs, recorded_before
from vit_ray.launch.worker_group import RunFailedError
from vit_ray.tracking.mlflow_api import Run
from vit_ray.tracking.past_runs import finished_children, newest_run


@dataclass(frozen=True)
class Cell:
    """One training of the grid."""

    label: str
    fraction: float
    epochs: float
    recipe: Recipe

    @property
    def name(self) -> str:
        """Run name: the study's, the model's label, the share of data, the length."""
        return self.recipe.name


@dataclass(frozen=True)
class CellResult:
    """The result of a cell."""

    cell: Cell
    metrics: dict[str, float]
    run_id: str | None
    was_finished: bool = False
    """It was complete before; nothing was trained."""
    error: str = ""
    """Why it failed; empty if it did not."""


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


def study_cells(recipe: Recipe) -> list[Cell]:
    """The grid: every model with every share of the data and every length.

    Raises:
        ValueError: the recipe has no study, or two cells would have one name.
    """
    hint = "study.models, a list of {label: ..., model: {name: ...}}"
    study = require(recipe.study, "study", hint)
    cells = [
        Cell(model.label, fraction, epochs, _cell_recipe(recipe, model, fraction, epochs))
        for model in study.models
        for fraction in study.data_fractions
        for epochs in study.epochs
    ]
    names = [cell.name for cell in cells]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"study: {len(twice)} cells have a name twice, such as {twice[0]!r}; give each of "
            "study.models its own label, and list no fraction or length twice"
        )
    return cells


def run_study(recipe: Recipe) -> StudyResult:
    """Train and evaluate every cell that is not finished, and write the report.

    Raises:
        ValueError: a cell cannot work, or is finished with another recipe; nothing was started.
    """
    recipe = recipe.with_absolute_paths()
    cells = study_cells(recipe)
    resolved_runs = [resolve_run(cell.recipe) for cell in cells]
    parent_id = newest_run(recipe.tracking, recipe.name, "study")
    finished = _finished_cells(recipe, cells, resolved_runs, parent_id)
    total_steps = sum(one.total_steps for one in resolved_runs)
    first = next((cell.recipe for cell in cells if cell.name not in finished), None)
    resolved = resolved_runs[0]
    with open_parent(recipe, "study", resolved, total_steps, parent_id, first=first) as parent:
        results = _run_cells(cells, resolved_runs, finished, parent)
        parent.record.ask("metrics", len(results), _totals(results))
        page = page_of(recipe, parent.run_id, parent.record.recorder)
        hint = parent.record.ask("hint")
        outcome = StudyResult(results, len(cells), parent.run_id, page, hint)
        parent.record.is_complete = outcome.is_complete
        return outcome


def _cell_recipe(recipe: Recipe, model: StudyModel, fraction: float, epochs: float) -> Recipe:
    label = re.sub(r"[^A-Za-z0-9._+]+", "-", model.label).strip("-")
    rate = model.learning_rate or recipe.optim.learning_rate
    return recipe.with_changes(
        name=f"{recipe.name}-{label}-data{fraction:g}-epochs{epochs:g}",
        model=model.model.model_dump(mode="json"),
        data={"fraction": fraction},
        optim={"learning_rate": rate, "epochs": epochs, "steps": None, "images": None},
        study=None,
    )


def _finished_cells(
    recipe: Recipe, cells: list[Cell], resolved_runs: list[ResolvedRun], parent_id: str | None
) -> dict[str, CellResult]:
    if parent_id is None:
        return {}
    runs = finished_children(recipe.tracking, parent_id)
    found = {}
    for cell, resolved in zip(cells, resolved_runs, strict=True):
        run = runs.get(cell.name)
        if run is not None and "study/exaflops" in run.data.metrics:
            _check_same_cell(cell, resolved, run)
            found[cell.name] = CellResult(
                cell, dict(run.data.metrics), str(run.info.run_id), was_finished=True
            )
    return found


def _check_same_cell(cell: Cell, resolved: ResolvedRun, run: Run) -> None:
    before = recorded_before(run.data.params, run.data.tags)
    if fingerprint := run.data.tags.get("vit_ray.data_fingerprint"):
        before[DATA_SET] = fingerprint
    now = {**cell.recipe.flat(), DATA_SET: resolved.manifest.fingerprint}
    moved = EVALUATED_SETS if _has_same_sets(resolved, run) else ()
    if changed := decisive_changes(before, now, without=moved):
        raise ValueError(
            f"cell {cell.name!r} was finished with another recipe: "
            f"{'; '.join(map(str, changed))}. Put that back, or choose another name for the study"
        )


def _has_same_sets(resolved: ResolvedRun, run: Run) -> bool:
    """Whether the run used what the cell opens, by fingerprint and by what for."""
    used = {
        (tag.value, one.dataset.digest)
        for one in (run.inputs.dataset_inputs if run.inputs else ())
        for tag in one.tags
        if tag.key == "mlflow.data.context"
    }
    return used == {(one["context"], one["digest"]) for one in data_inputs(resolved)}


def _run_cells(
    cells: list[Cell],
    resolved_runs: list[ResolvedRun],
    finished: dict[str, CellResult],
    parent: OpenParent,
) -> list[CellResult]:
    recorder = parent.record.recorder
    results = []
    for cell, resolved in zip(cells, resolved_runs, strict=True):
        if parent.record.ask("stop_reason"):
            break  # between two cells
        if cell.name in finished:
            results.append(finished[cell.name])
        else:
            result = _run_cell(cell, parent)
            if result is None:
                break  # stopped on request: what is left runs when the study is started again
            results.append(result)
        if results[-1].error:
            recorder.event.remote("failed cell", f"{cell.name}: {results[-1].error}", 0)
        recorder.child_step.remote(cell.name, resolved.total_steps)
    return results


def _run_cell(cell: Cell, parent: OpenParent) -> CellResult | None:
    """Train one cell; None if it was stopped on request. A failing cell does not end the study."""
    recipe = cell.recipe.with_changes(tracking={"parent_run_id": parent.run_id})
    tags = {"vit_ray.study_label": cell.label}
    try:
        result = train(recipe, kind="study_cell", tags=tags, parent=parent.for_children)
    except RunFailedError as error:
        return CellResult(cell, {}, None, error=str(error).strip().splitlines()[0])
    if not result.is_complete:
        return None
    return CellResult(cell, result.metrics, result.run_id, result.already_complete)


def _totals(results: list[CellResult]) -> dict[str, float]:
    exaflops = sum(result.metrics.get("study/exaflops", 0.0) for result in results)
    failed = sum(bool(result.error) for result in results)
    return {
        "study/cells": float(len(results) - failed),
        "study/failed_cells": float(failed),
        "study/exaflops_total": exaflops,
    }
