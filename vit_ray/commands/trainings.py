"""Trainings, evaluations, sweeps, VTAB, studies, the quickstart, and what is printed for them."""

import math
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from vit_ray.addresses import redact
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data import open_dataset
from vit_ray.data.convert.conversion import convert
from vit_ray.data.dataset import MANIFEST_FILE
from vit_ray.experiments.search_space import point_text
from vit_ray.experiments.study import StudyResult, run_study
from vit_ray.experiments.sweep import SweepResult, run_sweep
from vit_ray.experiments.trials import Published
from vit_ray.experiments.vtab import run_vtab
from vit_ray.launch import run
from vit_ray.launch.connection import connect
from vit_ray.launch.paper_comparison import training_table
from vit_ray.launch.run import RunResult
from vit_ray.measure.phases import describe_phases
from vit_ray.metric_names import (
    EVAL_AVERAGED_TOP1,
    EVAL_LAST_TOP1,
    EVAL_LOSS,
    EVAL_TOP1,
    FEW_SHOT_GROUP,
    PERF_MFU,
    STARTUP_FIRST_STEP_S,
    STUDY_EXAFLOPS,
    STUDY_IMAGES_SEEN,
    TRAIN_IMAGES_PER_S,
    TRAIN_LOSS,
    TRANSFER_GROUP,
    few_shot_top1,
)
from vit_ray.outcomes import RunStoppedError
from vit_ray.paper import SOURCE
from vit_ray.storage import locate

# Metrics of a run's result, with title and format.
_TITLES: Final = {
    EVAL_TOP1: ("top-1 accuracy", "{:.2%}"),
    EVAL_LAST_TOP1: ("top-1 accuracy of the last evaluation", "{:.2%}"),
    EVAL_AVERAGED_TOP1: ("top-1 accuracy, averaged weights", "{:.2%}"),
    EVAL_LOSS: ("evaluation loss", "{:.4f}"),
    TRAIN_LOSS: ("last training loss", "{:.4f}"),
    TRAIN_IMAGES_PER_S: ("images/s", "{:.0f}"),
    PERF_MFU: ("MFU", "{:.1%}"),
    STARTUP_FIRST_STEP_S: ("Ray up to first step, s", "{:.1f}"),
}
_TOP1S = (EVAL_TOP1, EVAL_LAST_TOP1, EVAL_AVERAGED_TOP1)
_ACCURACIES = ("top1", "top3", "top5")  # ends of the names of accuracies
# Columns of a study's table: title, metric and format.
_CELL_COLUMNS = (
    ("exaFLOPs", STUDY_EXAFLOPS, "{:.3g}"),
    ("images seen", STUDY_IMAGES_SEEN, "{:.0f}"),
    ("5-shot", few_shot_top1(5), "{:.2%}"),
    ("top-1", EVAL_TOP1, "{:.2%}"),
    ("top-1 averaged", EVAL_AVERAGED_TOP1, "{:.2%}"),
)
_MAX_WIDTH: Final = 10**6  # characters of a line in a pipe: enough for any row


def pretrain(recipe: Recipe) -> int:
    """Train from the start, or from the newest checkpoint of this run name."""
    return print_result(run.train(recipe))


def finetune(recipe: Recipe) -> int:
    """Train from the weights in `init_from` with a new head."""
    return print_result(run.finetune(recipe))


def evaluate(recipe: Recipe) -> None:
    """Measure the weights in `init_from`."""
    result = run.evaluate(recipe)
    metrics = result.metrics
    print_metrics("Evaluation", metrics, sorted(metrics), result.num_eval_images)
    if EVAL_TOP1 in metrics and recipe.data.eval is not None:
        labels = recipe.benchmark.kind
        _print_beside_paper(training_table(recipe, [metrics[EVAL_TOP1]], labels))
    print_link(result.hint, result.run_id)


def sweep(recipe: Recipe) -> None:
    """Fine-tune over the grid of learning rates and print every trial."""
    print_sweep(run_sweep(recipe))


def vtab(recipe: Recipe) -> int:
    """Fine-tune on every task and print the table; exit code 1 if a task has no accuracy."""
    result = run_vtab(recipe)
    _print_table(f"VTAB-1k; the paper's columns are {SOURCE}, Table 9", result.table)
    _print_links(result.published)
    return 0 if result.published.is_complete else 1


def study(recipe: Recipe) -> int:
    """Train and evaluate every cell, and print the table."""
    return print_study(run_study(recipe))


def print_result(result: RunResult) -> int:
    """Print a run's result; exit code 0 if it reached its end, 3 if stopped on request."""
    metrics = result.metrics
    keys = [key for key in _TITLES if key in metrics]
    keys += sorted(key for key in metrics if key.startswith(FEW_SHOT_GROUP))
    title = f"{result.name}: step {result.steps} of {result.total_steps}"
    print_metrics(title, metrics, keys, result.num_eval_images)
    note = " (it was complete before)" if result.already_complete else ""
    print(f"checkpoint: {result.checkpoint or 'none'}{note}")
    if goodput := describe_phases(metrics):
        print(goodput)
    print_link(result.hint, result.run_id)
    return 0 if result.is_complete else 3


def print_sweep(result: SweepResult) -> None:
    """Print the grid, the selected point, and the test accuracy."""
    rows = []
    for trial in result.rows:
        outcome = trial.outcome
        note = "chosen" if trial.point == result.best else ""
        if outcome.error:
            note = f"failed: {outcome.error}"
        if outcome.is_stopped_early:
            note = f"stopped early, at step {outcome.step}"
        rows.append({
            "trial": point_text(trial.point),
            "dev top-1": None if math.isnan(outcome.top1) else f"{outcome.top1:.2%}",
            "note": note,
        })  # fmt: skip
    _print_table("Trials (selected on the dev split)", rows)
    runs = len(result.test_top1)
    spread = f" +- {result.deviation:.2%} ({runs} runs)" if runs > 1 else " (1 run of sweep.seeds)"
    print(f"test top-1, trained on all data: {result.mean:.2%}{spread}")
    _print_beside_paper(result.beside_paper)
    _print_links(result.published)


def print_study(study: StudyResult) -> int:
    """Print a row for each cell; exit code 1 if a cell failed."""
    keys = dict.fromkeys(key for result in study.cells for key in result.outcome.metrics)
    tasks = [re.fullmatch(rf"{TRANSFER_GROUP}(.+)_top1", key) for key in keys]
    columns = [*_CELL_COLUMNS, *((task[1], task[0], "{:.2%}") for task in tasks if task)]
    rows = []
    for result in study.cells:
        cell, metrics = result.cell, result.outcome.metrics
        rows.append({
            "model": cell.label,
            "data": f"{cell.fraction * 100:.3g}%",
            "length": f"{cell.length}, branched" if result.branched_from else cell.length,
            "seed": cell.recipe.seed,
            **{title: form.format(metrics[key]) if key in metrics else None
               for title, key, form in columns},
        })  # fmt: skip
    _print_table("Scaling study (proxy data: not the paper's JFT-300M)", rows)
    for result in study.cells:
        if result.outcome.error:
            print(redact(f"failed: {result.cell.name}: {result.outcome.error}"))
    if num_before := sum(result.outcome.was_finished for result in study.cells):
        print(f"{num_before} of {len(study.cells)} cells had finished before")
    _print_links(study.published)
    return 0 if study.published.is_complete else 1


def run_quickstart(recipe: Recipe) -> None:
    """Convert handwritten digits, pre-train, sweep, train from scratch, and compare; finished parts
    are not repeated.

    Raises:
        RunStoppedError: it was stopped on request.
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
    digits = {"num_images": 1497, "num_classes": 10}
    planned_runs(recipe.with_changes(plan=digits), prefers_plan=True)
    connect(recipe)
    with tempfile.TemporaryDirectory() as temporary:
        images = Path(temporary if "://" in recipe.output else recipe.output) / "digits_images"
        for split, path in (("train", recipe.data.train), ("test", recipe.data.eval)):
            folder = locate(str(path))
            if folder.child(MANIFEST_FILE).exists():
                continue
            write_digits(images)  # also after an interruption: the files are the same
            config = ConvertConfig(source=str(images / split), destination=folder.uri)
            converted = convert(config, recipe.seed)
            print(f"{folder.uri}: {converted.num_images} digits in {converted.num_shards} shard(s)")
    _train_and_compare(recipe, sweep, scratch)
    print(f"Total time: {time.monotonic() - start_s:.0f} s")


def _train_and_compare(recipe: Recipe, sweep: Recipe, scratch: Recipe) -> None:
    """Train everything and write one page of all runs."""
    pretrained = _trained(recipe)
    swept = run_sweep(sweep)
    print_sweep(swept)
    from_scratch = _trained(scratch)
    count = open_dataset(str(recipe.data.eval)).num_images
    figures = {
        f"{name}, {result.total_steps} steps at {source.model.image_size} px": (
            f"{top1:.2%}{interval_note(top1, count)}"
        )
        for name, source, result, top1 in (
            ("pre-trained", recipe, pretrained, pretrained.top1),
            ("fine-tuned", scratch, from_scratch, swept.mean),
            ("from scratch", scratch, from_scratch, from_scratch.top1),
        )
        if not math.isnan(top1)  # of a failed evaluation
    }
    _print_figures("Top-1 accuracy on the test set", figures)
    if swept.published.run_id is not None:
        from vit_ray.report.page import write_page  # with charts: seconds
        from vit_ray.tracking.mlflow_client import asking

        with asking(recipe.tracking.uri):
            print(f"report of all runs: {write_page(recipe, None).page}")


def _trained(recipe: Recipe) -> RunResult:
    result = run.train(recipe)
    if print_result(result):
        raise RunStoppedError("stopped on request; the same command continues")
    return result


def interval_note(accuracy: float, num_images: int) -> str:
    """Wilson's 95 % interval of an accuracy on this many images, to print after the accuracy."""
    from vit_ray.report.statistics import wilson  # scipy and pandas: seconds

    interval = wilson(accuracy, num_images)
    return f" ({interval.low:.1%} to {interval.high:.1%} at 95 %, {num_images:,} images)"


def print_link(hint: str, run_id: str | None) -> None:
    """Print the address of a run's page; nothing if MLflow was away and does not have the run."""
    if hint and run_id is not None:
        print(f"MLflow page: {hint}")


def _print_links(published: Published) -> None:
    if published.page is not None:
        print(f"report: {published.page}")
    print_link(published.hint, published.run_id)


def print_metrics(
    title: str, metrics: Mapping[str, float], keys: Iterable[str], num_images: int
) -> None:
    """Print figures; accuracies in percent, top-1 with its interval."""
    figures = dict[str, str]()
    for key in keys:
        usual = "{:.2%}" if key.endswith(_ACCURACIES) else "{:.4f}"
        name, form = _TITLES.get(key, (key, usual))
        note = interval_note(metrics[key], num_images) if key in _TOP1S and num_images else ""
        figures[name] = f"{form.format(metrics[key])}{note}"
    _print_figures(title, figures)


def _print_beside_paper(rows: Sequence[Mapping[str, object]] | None) -> None:
    # Nothing if the paper has no row.
    if rows and len(rows) > 1:
        _print_table(f"This result and the paper's: {SOURCE}", rows)


def _print_figures(title: str, figures: Mapping[str, str]) -> None:
    _print_table(title, [{"figure": name, "value": text} for name, text in figures.items()])


def _print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print a table without its empty columns; if there are no rows, only the title.

    In a pipe, a row is one line.
    """
    print(redact(title))
    if not rows:
        return
    columns = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    table = Table(*(Column(escape(name), overflow="fold") for name in columns))
    for row in rows:
        table.add_row(*(escape(_text(row[name])) for name in columns))
    Console(width=None if sys.stdout.isatty() else _MAX_WIDTH).print(table)


def _text(cell: object) -> str:
    # An unknown value is a dash.
    if cell is None:
        return "-"
    return redact(f"{cell:.2f}" if isinstance(cell, float) else str(cell))
