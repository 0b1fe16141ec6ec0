"""What a command prints when it has ended: tables for users."""

import sys
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from vit_ray.addresses import redact
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

_SHOWN = (
    (EVAL_TOP1, "top-1 accuracy", "{:.2%}"),
    (EVAL_LAST_TOP1, "top-1 accuracy of the last evaluation", "{:.2%}"),
    (EVAL_AVERAGED_TOP1, "top-1 accuracy, averaged weights", "{:.2%}"),
    (EVAL_LOSS, "evaluation loss", "{:.4f}"),
    (TRAIN_LOSS, "last training loss", "{:.4f}"),
    (TRAIN_IMAGES_PER_S, "images/s", "{:.0f}"),
    (PERF_MFU, "MFU", "{:.1%}"),
    (STARTUP_FIRST_STEP_S, "Ray up to first step, s", "{:.1f}"),
)
_TOP1S = (EVAL_TOP1, EVAL_LAST_TOP1, EVAL_AVERAGED_TOP1)
_SHARES = ("top1", "top3", "top5")
"""Ends of the names of accuracies."""
_WIDEST: Final = 10**6
"""Characters of a line in a pipe: of any cell, whole."""


def print_result(result: RunResult) -> int:
    """A run's outcome; exit code 0 if it reached its end, 3 if it was stopped on request."""
    found, figures = result.metrics, dict[str, str]()
    for key, title, form in _SHOWN:
        if key in found:
            figures[title] = _figure(key, form, found[key], result.num_eval_images)
    for key, value in sorted(found.items()):
        if key.startswith(FEW_SHOT_GROUP):
            figures[key.removeprefix(FEW_SHOT_GROUP).replace("_", " ")] = f"{value:.2%}"
    title = f"{result.name}: step {result.steps} of {result.total_steps}"
    print_figures(title, figures)
    note = " (it was complete before)" if result.already_complete else ""
    print(f"checkpoint: {result.checkpoint or 'none'}{note}")
    if goodput := describe_phases(result.metrics):
        print(goodput)
    print_link(result.hint, result.run_id)
    return 0 if result.is_complete else 3


def _figure(key: str, form: str, value: float, num_images: int) -> str:
    """A figure in this form; top-1 with its interval, if it is of an evaluation."""
    with_note = key in _TOP1S and num_images
    return form.format(value) + (interval_note(value, num_images) if with_note else "")


def interval_note(share: float, num_images: int) -> str:
    """Wilson's 95 % interval of an accuracy on this many images, to be shown behind it."""
    from vit_ray.report.statistics import wilson  # scipy and pandas: seconds

    interval = wilson(share, num_images)
    return f" ({interval.low:.1%} to {interval.high:.1%} at 95 %, {num_images:,} images)"


def print_link(hint: str, run_id: str | None) -> None:
    """Where MLflow shows a run; nothing if MLflow was away and does not have it."""
    if hint and run_id is not None:
        print(f"MLflow page: {hint}")


def print_metrics(metrics: Mapping[str, float], num_images: int) -> None:
    """Figures of an evaluation; accuracies in percent, top-1 with its interval."""
    forms = {key: "{:.2%}" if key.endswith(_SHARES) else "{:.4f}" for key in metrics}
    texts = {key: _figure(key, forms[key], metrics[key], num_images) for key in sorted(metrics)}
    print_figures("Evaluation", texts)


def print_beside_paper(rows: Sequence[Mapping[str, object]] | None) -> None:
    """Our row above those of the paper; nothing if the paper has none."""
    if rows and len(rows) > 1:
        print_table(f"This result and the paper's: {SOURCE}", rows)


def print_figures(title: str, figures: Mapping[str, str]) -> None:
    """A table of two columns."""
    print_table(title, [{"figure": name, "value": text} for name, text in figures.items()])


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """A table; columns without a value are left out, and of no rows it is the title alone.

    What reads a pipe takes whole lines. A terminal that is too narrow for the longest words of all
    columns gets a block of lines for each row.
    """
    print(redact(title))
    if not rows:
        return
    kept = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    texts = [{name: _text(row[name]) for name in kept} for row in rows]
    table = Table(*(Column(escape(name), overflow="fold") for name in kept))
    for row in texts:
        table.add_row(*map(escape, row.values()))
    console = Console(width=None if sys.stdout.isatty() else _WIDEST)
    widest = console.options.update(max_width=_WIDEST)
    if console.measure(table, options=widest).minimum <= console.width:
        console.print(table)
        return
    for row in texts:
        print(*(f"{name}: {text}" for name, text in row.items()), "", sep="\n")


def _text(cell: object) -> str:
    """A cell; a number that is not known is a dash."""
    if cell is None:
        return "-"
    return redact(f"{cell:.2f}" if isinstance(cell, float) else str(cell))
