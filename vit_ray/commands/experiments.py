"""Sweeps and studies, and the tables printed for them."""

import math
import re

from vit_ray.addresses import redact
from vit_ray.commands.train import print_beside_paper, print_link, print_table
from vit_ray.config import Recipe
from vit_ray.experiments.search_space import point_text
from vit_ray.experiments.study import StudyResult, run_study
from vit_ray.experiments.sweep import SweepResult, run_sweep
from vit_ray.experiments.vtab import run_vtab
from vit_ray.metric_names import (
    EVAL_AVERAGED_TOP1,
    EVAL_TOP1,
    STUDY_EXAFLOPS,
    STUDY_IMAGES_SEEN,
    TRANSFER_GROUP,
    few_shot_top1,
)
from vit_ray.outcomes import TrialState
from vit_ray.paper import SOURCE

_OF_CELLS = (
    ("exaFLOPs", STUDY_EXAFLOPS, "{:.3g}"),
    ("images seen", STUDY_IMAGES_SEEN, "{:.0f}"),
    ("5-shot", few_shot_top1(5), "{:.2%}"),
    ("top-1", EVAL_TOP1, "{:.2%}"),
    ("top-1 averaged", EVAL_AVERAGED_TOP1, "{:.2%}"),
)


def sweep(recipe: Recipe) -> int:
    """Fine-tune over the grid of learning rates and print every trial."""
    return print_sweep(run_sweep(recipe))


def vtab(recipe: Recipe) -> int:
    """Fine-tune on every task and print the table; 1 if a task has no accuracy, 3 if stopped."""
    result = run_vtab(recipe)
    if result is None:
        print(
            "stopped on request; run the same command again to continue with the interrupted task"
        )
        return 3
    title = f"VTAB-1k; the paper's columns are {SOURCE}, Table 9"
    print_table(title, result.table)
    if result.page is not None:
        print(f"report: {result.page}")
    print_link(result.hint, result.parent_run_id)
    return 0 if result.is_complete else 1


def study(recipe: Recipe) -> int:
    """Train and evaluate every cell, and print the table."""
    return print_study(run_study(recipe))


def print_sweep(result: SweepResult | None) -> int:
    """The grid, the selected point, the test accuracy; exit code 3 if stopped on request."""
    if result is None:
        print("stopped on request; the same command resumes its runs from their checkpoints")
        return 3
    rows = []
    for row in result.rows:
        outcome = row.outcome
        note = "chosen" if row.point == result.best else ""
        if math.isnan(outcome.top1):
            note = f"{outcome.state}: {outcome.error}"
        if outcome.state is TrialState.STOPPED_EARLY:
            note = f"stopped early, at step {outcome.step}"
        top1 = None if math.isnan(outcome.top1) else f"{outcome.top1:.2%}"
        rows.append({"trial": point_text(row.point), "dev top-1": top1, "note": note})
    print_table("Trials (selected on the dev split)", rows)
    runs = len(result.test_top1)
    spread = f" +- {result.deviation:.2%} ({runs} runs)" if runs > 1 else " (1 run of sweep.seeds)"
    print(f"test top-1, trained on all data: {result.mean:.2%}{spread}")
    print_beside_paper(result.beside_paper)
    if result.page is not None:
        print(f"report: {result.page}")
    print_link(result.hint, result.parent_run_id)
    return 0


def print_study(result: StudyResult | None) -> int:
    """A row per cell; exit code 0 if all are done, 1 if any failed, 3 if stopped on request."""
    if result is None:
        print("stopped on request; the same command resumes its cells from their checkpoints")
        return 3
    everything = dict.fromkeys(key for cell in result.cells for key in cell.metrics)
    tasks = [re.fullmatch(rf"{TRANSFER_GROUP}(.+)_top1", key) for key in everything]
    columns = [*_OF_CELLS, *((task[1], task[0], "{:.2%}") for task in tasks if task)]
    rows = []
    for one in result.cells:
        cell = one.cell
        row: dict[str, object] = {
            "model": cell.label,
            "data": f"{cell.fraction * 100:.3g}%",
            "length": f"{cell.length}, branched" if one.branched_from else cell.length,
            "seed": cell.recipe.seed,
        }
        for title, key, form in columns:
            row[title] = form.format(one.metrics[key]) if key in one.metrics else None
        rows.append(row)
    print_table("Scaling study (proxy data: not the paper's JFT-300M)", rows)
    for one in result.cells:
        if one.error:
            print(redact(f"failed: {one.cell.name}: {one.error}"))
    if num_before := sum(cell.was_finished for cell in result.cells):
        print(f"{num_before} of {len(result.cells)} cells had finished before")
    if result.page is not None:
        print(f"report: {result.page}")
    print_link(result.hint, result.parent_run_id)
    return 0 if result.is_complete else 1
