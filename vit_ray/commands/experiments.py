"""Sweeps, VTAB, studies and the quickstart, and what is printed for them."""

import math
import re
import tempfile
import time
from pathlib import Path

from vit_ray.addresses import PLACEHOLDER, redact
from vit_ray.commands.tracking_store import report
from vit_ray.commands.train import (
    interval_note,
    print_beside_paper,
    print_figures,
    print_link,
    print_result,
    print_table,
)
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data import open_dataset
from vit_ray.data.convert.conversion import convert
from vit_ray.data.dataset import MANIFEST_FILE
from vit_ray.experiments.search_space import point_text
from vit_ray.experiments.study import StudyResult, run_study
from vit_ray.experiments.sweep import SweepResult, run_sweep
from vit_ray.experiments.vtab import VtabResult, run_vtab
from vit_ray.launch.connection import connect
from vit_ray.launch.run import RunResult, train
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
from vit_ray.storage import locate

# Columns of a study's table: title, metric and format.
_CELL_COLUMNS = (
    ("exaFLOPs", STUDY_EXAFLOPS, "{:.3g}"),
    ("images seen", STUDY_IMAGES_SEEN, "{:.0f}"),
    ("5-shot", few_shot_top1(5), "{:.2%}"),
    ("top-1", EVAL_TOP1, "{:.2%}"),
    ("top-1 averaged", EVAL_AVERAGED_TOP1, "{:.2%}"),
)


def sweep(recipe: Recipe) -> None:
    """Fine-tune over the grid of learning rates and print every trial."""
    print_sweep(run_sweep(recipe))


def vtab(recipe: Recipe) -> int:
    """Fine-tune on every task and print the table; exit code 1 if a task has no accuracy."""
    result = run_vtab(recipe)
    print_table(f"VTAB-1k; the paper's columns are {SOURCE}, Table 9", result.table)
    _print_links(result)
    return 0 if result.is_complete else 1


def study(recipe: Recipe) -> int:
    """Train and evaluate every cell, and print the table."""
    return print_study(run_study(recipe))


def _print_links(result: SweepResult | VtabResult | StudyResult) -> None:
    if result.published.page is not None:
        print(f"report: {result.published.page}")
    print_link(result.published.hint, result.published.run_id)


def print_sweep(result: SweepResult) -> None:
    """Print the grid, the selected point, and the test accuracy."""
    rows = []
    for trial in result.rows:
        outcome = trial.outcome
        note = "chosen" if trial.point == result.best else ""
        if math.isnan(outcome.top1):
            note = f"{outcome.state}: {outcome.error}"
        if outcome.state is TrialState.STOPPED_EARLY:
            note = f"stopped early, at step {outcome.step}"
        rows.append({
            "trial": point_text(trial.point),
            "dev top-1": None if math.isnan(outcome.top1) else f"{outcome.top1:.2%}",
            "note": note,
        })  # fmt: skip
    print_table("Trials (selected on the dev split)", rows)
    runs = len(result.test_top1)
    spread = f" +- {result.deviation:.2%} ({runs} runs)" if runs > 1 else " (1 run of sweep.seeds)"
    print(f"test top-1, trained on all data: {result.mean:.2%}{spread}")
    print_beside_paper(result.beside_paper)
    _print_links(result)


def print_study(result: StudyResult) -> int:
    """Print a row for each cell; exit code 1 if a cell failed."""
    metrics = dict.fromkeys(key for outcome in result.cells for key in outcome.metrics)
    tasks = [re.fullmatch(rf"{TRANSFER_GROUP}(.+)_top1", key) for key in metrics]
    columns = [*_CELL_COLUMNS, *((task[1], task[0], "{:.2%}") for task in tasks if task)]
    rows = []
    for outcome in result.cells:
        cell = outcome.cell
        row: dict[str, object] = {
            "model": cell.label,
            "data": f"{cell.fraction * 100:.3g}%",
            "length": f"{cell.length}, branched" if outcome.branched_from else cell.length,
            "seed": cell.recipe.seed,
        }
        for title, key, form in columns:
            row[title] = form.format(outcome.metrics[key]) if key in outcome.metrics else None
        rows.append(row)
    print_table("Scaling study (proxy data: not the paper's JFT-300M)", rows)
    for outcome in result.cells:
        if outcome.error:
            print(redact(f"failed: {outcome.cell.name}: {outcome.error}"))
    if num_before := sum(outcome.was_finished for outcome in result.cells):
        print(f"{num_before} of {len(result.cells)} cells had finished before")
    _print_links(result)
    return 0 if result.is_complete else 1


def run_quickstart(recipe: Recipe) -> int:
    """Convert handwritten digits, pre-train, sweep, train from scratch, and compare; finished parts
    are not repeated.
    """
    from vit_ray.commands.plan import planned_runs
    from vit_ray.data.convert.digits import write_digits

    start_s = time.monotonic()
    recipe = recipe.with_absolute_paths()
    sweep, scratch = (
        load_recipe(name, {"tracking": recipe.tracking.model_dump(mode="json")}).with_changes(
            output=recipe.output, data={"train": recipe.data.train, "eval": recipe.data.eval}
        )
        for name in ("digits_sweep", "digits_scratch")
    )
    sweep = sweep.with_changes(init_from=f"{recipe.output}/{recipe.name}")
    # Wrong keys are reported before the digits are written.
    sets = [locate(str(path)) for path in (recipe.data.train, recipe.data.eval)]
    checked = recipe
    if not all(folder.child(MANIFEST_FILE).exists() for folder in sets):
        checked = recipe.with_changes(
            data={"train": PLACEHOLDER, "eval": None},
            plan={"num_images": 1497, "num_classes": 10},  # of the digits
        )
    planned_runs(checked)
    connect(recipe)
    with tempfile.TemporaryDirectory() as temporary:
        images = Path(temporary if "://" in recipe.output else recipe.output) / "digits_images"
        for split, folder in zip(("train", "test"), sets, strict=True):
            if folder.child(MANIFEST_FILE).exists():
                continue
            write_digits(images)  # also after an interruption: the files are the same
            config = ConvertConfig(source=str(images / split), destination=folder.uri)
            converted = convert(config, recipe.seed)
            print(f"{folder.uri}: {converted.num_images} digits in {converted.num_shards} shard(s)")
    code = _train_and_compare(recipe, sweep, scratch)
    print(f"Total time: {time.monotonic() - start_s:.0f} s")
    return code


def _train_and_compare(recipe: Recipe, sweep: Recipe, scratch: Recipe) -> int:
    """Train everything and write one page of all runs; returns the first non-zero exit code."""
    pretrained = train(recipe)
    if code := print_result(pretrained):
        return code
    swept = run_sweep(sweep)
    print_sweep(swept)
    from_scratch = train(scratch)
    if code := print_result(from_scratch):
        return code
    accuracies = {
        f"pre-trained, {_length(recipe, pretrained)}": pretrained.top1,
        f"fine-tuned, {_length(scratch, from_scratch)}": swept.mean,
        f"from scratch, {_length(scratch, from_scratch)}": from_scratch.top1,
    }
    count = open_dataset(str(recipe.data.eval)).num_images
    figures = {
        name: f"{top1:.2%}{interval_note(top1, count)}"
        for name, top1 in accuracies.items()
        if not math.isnan(top1)  # of a failed evaluation
    }
    print_figures("Top-1 accuracy on the test set", figures)
    if (run_id := swept.published.run_id) is not None:
        print(f"report of all runs: {report(recipe, keep_with=run_id).page}")
    return 0


def _length(recipe: Recipe, result: RunResult) -> str:
    return f"{result.total_steps} steps at {recipe.model.image_size} px"
