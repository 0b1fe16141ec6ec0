"""What the study command prints of its results."""

from __future__ import annotations

import re

from rich.console import Console
from rich.table import Table

from vit_ray.commands.tables.printed_tables import print_link
from vit_ray.config.secrets import redact
from vit_ray.experiments.study import StudyResult
from vit_ray.experiments.study_cells import CellResult
from vit_ray.metric_names import (
    EVAL_AVERAGED_TOP1,
    EVAL_TOP1,
    STUDY_EXAFLOPS,
    STUDY_IMAGES_SEEN,
    TRANSFER_GROUP,
    few_shot_top1,
)

_COLUMNS = (
    ("exaFLOPs", STUDY_EXAFLOPS, "{:.3g}"),
    ("images seen", STUDY_IMAGES_SEEN, "{:.0f}"),
    ("5-shot", few_shot_top1(5), "{:.2%}"),
    ("top-1", EVAL_TOP1, "{:.2%}"),
)
_AVERAGED = ("top-1 averaged", EVAL_AVERAGED_TOP1, "{:.2%}")


def print_study(result: StudyResult) -> int:
    """A row per cell; exit code 0 if all are done, 1 if any failed, 3 if stopped on request."""
    table = Table(title="Scaling study (proxy data: not the paper's JFT-300M)")
    for title in ("model", "data", "length", "seed"):
        table.add_column(title)
    has_averaged = any(_AVERAGED[1] in cell.metrics for cell in result.cells)
    columns = [*_COLUMNS, *([_AVERAGED] if has_averaged else []), *_transfer_columns(result)]
    for title, _, _ in columns:
        table.add_column(title, justify="right")
    for cell in result.cells:
        table.add_row(*_row(cell, columns))
    Console().print(table)
    for line in _notes(result):
        print(line)
    if result.page is not None:
        print(f"report: {result.page}")
    print_link(result.hint, result.parent_run_id)
    if any(cell.error for cell in result.cells):
        return 1
    return 0 if result.is_complete else 3


def _transfer_columns(result: StudyResult) -> list[tuple[str, str, str]]:
    """One column for each task on which any cell has an accuracy."""
    keys = dict.fromkeys(key for cell in result.cells for key in cell.metrics)
    found = [re.fullmatch(rf"{TRANSFER_GROUP}(.+)_top1", key) for key in keys]
    return [(match[1], match[0], "{:.2%}") for match in found if match]


def _row(result: CellResult, columns: list[tuple[str, str, str]]) -> list[str]:
    cell = result.cell
    figures = [
        form.format(result.metrics[key]) if key in result.metrics else "-"
        for _, key, form in columns
    ]
    share = f"{cell.fraction * 100:.3g}%"
    length = f"{cell.length}, branched" if result.branched_from else cell.length
    return [cell.label, share, length, str(cell.recipe.seed), *figures]


def _notes(result: StudyResult) -> list[str]:
    notes = [
        redact(f"failed: {cell.cell.name}: {cell.error}") for cell in result.cells if cell.error
    ]
    num_before = sum(cell.was_finished for cell in result.cells)
    if num_before:
        notes.append(f"{num_before} of {result.num_cells} cells had finished before")
    if len(result.cells) < result.num_cells:
        left = result.num_cells - len(result.cells)
        notes.append(f"stopped: {left} cells are left; run the same command again to continue")
    return notes
