"""The display of a running run: a bar with ETA and images/s, or plain lines in a log file."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn

from vit_ray.addresses import redact
from vit_ray.data.tasks import ANSWER_S, clock, print_line, repeated
from vit_ray.metric_names import (
    EVAL_AVERAGED_TOP1,
    EVAL_TOP1,
    PERF_MFU,
    TRAIN_IMAGES_PER_S,
    TRAIN_LOSS,
    TRAIN_LR,
)
from vit_ray.tracking.recorder import Recorder

LINE_EVERY_S: Final = 10.0
NO_STEP_S: Final = 15.0
NO_STEP_TIMES: Final = 5.0
"""A step counts as slow if it takes longer than this, and this many times as long as the others."""
_SPEED_OVER_S: Final = 1800.0
_FIGURES: Final = (
    (TRAIN_LOSS, "loss {:.3f}"),
    (TRAIN_IMAGES_PER_S, "{:.0f} images/s"),
    (PERF_MFU, "MFU {:.1%}"),
    (EVAL_TOP1, "top-1 {:.2%}"),
    (EVAL_AVERAGED_TOP1, "of averaged weights {:.2%}"),
    (TRAIN_LR, "lr {:.2e}"),
)
MOST_FIGURES: Final = 5
"""Of these, shown after the step and the remaining time; MLflow has all others."""


@contextlib.contextmanager
def shown_progress(record: Recorder, name: str, total: int) -> Iterator[None]:
    """Show new events and the progress of the run while the block runs.

    The remaining time is by the pace of the steps since the first that was seen.
    """
    console, seen, line_s = Console(file=sys.stderr), 0, 0.0
    step_s = time.monotonic()  # when the newest step was seen
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    bar = Progress(
        *columns,
        TextColumn("{task.fields[text]}"),
        console=console,
        get_time=time.monotonic,
        speed_estimate_period=_SPEED_OVER_S,
    )
    bar.add_task(name, total=total, text="starting")
    (task,) = bar.tasks

    def update(is_last: bool) -> None:
        nonlocal seen, line_s, step_s
        status = record.status(ANSWER_S)
        for event in status.events[seen:]:
            print_line(console, redact(f"{name}: {event.kind}: {event.text}"))
        seen = len(status.events)
        if min(status.step, total) != task.completed:
            step_s = time.monotonic()
        bar.update(task.id, completed=min(status.step, total))
        text = describe(status.metrics, pace(task, time.monotonic() - step_s))
        bar.update(task.id, text=text)
        is_due = is_last or time.monotonic() - line_s > LINE_EVERY_S
        if not console.is_terminal and status.step and is_due:
            line_s = time.monotonic()
            print_line(console, f"{name}: step {status.step}/{total}, {text}")

    if not console.is_terminal:
        print_line(console, f"{name}: starting workers")
    with bar if console.is_terminal else contextlib.nullcontext(), repeated(update):
        yield


def pace(task: Task, waited_s: float) -> str:
    """The remaining time, or for how long no step has come if that is longer than usual."""
    if not task.completed:
        return "starting"
    usual_s = 1 / task.speed if task.speed else 0.0
    if not task.finished and waited_s > max(NO_STEP_S, NO_STEP_TIMES * usual_s):
        return f"no step for {clock(waited_s)}"
    left_s = task.time_remaining
    return "ETA --:--" if left_s is None else f"ETA {clock(left_s)}"


def describe(metrics: dict[str, float], pace: str) -> str:
    """The pace, and the first figures that are there, as one text."""
    texts = [text.format(metrics[key]) for key, text in _FIGURES if key in metrics]
    return ", ".join([pace, *texts[:MOST_FIGURES]])
