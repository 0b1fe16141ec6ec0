"""A single training or evaluation, and the tables that commands print at their end."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from vit_ray.addresses import redact
from vit_ray.config import Recipe
from vit_ray.launch import run
from vit_ray.launch.paper_comparison import evaluation_table
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
    TRAIN_IMAGES_PER_S,
    TRAIN_LOSS,
)
from vit_ray.paper import SOURCE


def pretrain(recipe: Recipe) -> int:
    """Train from the start, or from the newest checkpoint of this run name."""
    return print_result(run.train(recipe))


def finetune(recipe: Recipe) -> int:
    """Train from the weights in `init_from` with a new head."""
    return print_result(run.finetune(recipe))


def evaluate(recipe: Recipe) -> None:
    """Measure the weights in `init_from`."""
    result = run.evaluated(recipe)
    metrics = result.metrics
    print_metrics("Evaluation", metrics, sorted(metrics), result.num_eval_images)
    print_beside_paper(evaluation_table(recipe, metrics))
    print_link(result.hint, result.run_id)


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
_MAX_WIDTH: Final = 10**6  # characters of a line in a pipe: enough for any row


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


def interval_note(accuracy: float, num_images: int) -> str:
    """Wilson's 95 % interval of an accuracy on this many images, to print after the accuracy."""
    from vit_ray.report.statistics import wilson  # scipy and pandas: seconds

    interval = wilson(accuracy, num_images)
    return f" ({interval.low:.1%} to {interval.high:.1%} at 95 %, {num_images:,} images)"


def print_link(hint: str, run_id: str | None) -> None:
    """Print the address of a run's page; nothing if MLflow was away and does not have the run."""
    if hint and run_id is not None:
        print(f"MLflow page: {hint}")


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
    print_figures(title, figures)


def print_beside_paper(rows: Sequence[Mapping[str, object]] | None) -> None:
    """Print our row above those of the paper; nothing if the paper has none."""
    if rows and len(rows) > 1:
        print_table(f"This result and the paper's: {SOURCE}", rows)


def print_figures(title: str, figures: Mapping[str, str]) -> None:
    """Print a table of names and values."""
    print_table(title, [{"figure": name, "value": text} for name, text in figures.items()])


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
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
