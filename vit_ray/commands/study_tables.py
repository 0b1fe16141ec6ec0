"""What the study job prints: its plan before, its results after."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from vit_ray.commands.plan import data_facts
from vit_ray.config import Recipe
from vit_ray.experiments.study import CellResult, StudyResult, study_cells

_COLUMNS = (
    ("exaFLOPs", "study/exaflops", "{:.3g}"),
    ("images seen", "study/images_seen", "{:.0f}"),
    ("5-shot", "few_shot/5_shot_top1", "{:.2%}"),
    ("top-1", "eval/top1", "{:.2%}"),
)


def describe_study(recipe: Recipe) -> str:
    """Every cell with steps and compute, for `--dry-run`; starts nothing.

    Raises:
        ValueError: as `data_facts`.
    """
    lines, total = [], 0.0
    for cell in study_cells(recipe):
        facts = data_facts(cell.recipe)
        total += facts.exaflops
        lines.append(
            f"{cell.name}: {facts.num_images} images, {facts.total_steps} steps, "
            f"{facts.exaflops:.3g} exaFLOPs"
        )
    lines.append(f"{len(lines)} cells, {total:.3g} exaFLOPs in all ({facts.source})")
    return "\n".join(lines)


def print_study(result: StudyResult) -> int:
    """A row per cell; exit code 0 if all are done, 1 if any failed, 3 if stopped on request."""
    table = Table(title="Scaling study (proxy data: not the paper's JFT-300M)")
    for title in ("model", "data", "epochs"):
        table.add_column(title)
    for title, _, _ in _COLUMNS:
        table.add_column(title, justify="right")
    for cell in result.cells:
        table.add_row(*_row(cell))
    Console().print(table)
    for line in _notes(result):
        print(line)
    if result.page is not None:
        print(f"report: {result.page}")
    print(f"MLflow page: {result.hint}")
    if any(cell.error for cell in result.cells):
        return 1
    return 0 if result.is_complete else 3


def _row(result: CellResult) -> list[str]:
    cell = result.cell
    figures = [
        form.format(result.metrics[key]) if key in result.metrics else "-"
        for _, key, form in _COLUMNS
    ]
    return [cell.label, f"{cell.fraction:.0%}", f"{cell.epochs:g}", *figures]


def _notes(result: StudyResult) -> list[str]:
    notes = [f"failed: {cell.cell.name}: {cell.error}" for cell in result.cells if cell.error]
    num_before = sum(cell.was_finished for cell in result.cells)
    if num_before:
        notes.append(f"{num_before} of {result.num_cells} cells were finished before")
    if len(result.cells) < result.num_cells:
        left = result.num_cells - len(result.cells)
        notes.append(f"stopped: {left} cells are left; run the same command again to go on")
    return notes
