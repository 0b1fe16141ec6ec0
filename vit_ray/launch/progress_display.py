"""The display of a running run: a bar with ETA and images/s, or plain lines in a log file."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from vit_ray.config.secrets import redact
from vit_ray.data.progress import ANSWER_S, clock, print_line, repeated
from vit_ray.metric_names import (
    DATA_WAIT_FRACTION,
    EVAL_AVERAGED_TOP1,
    EVAL_TOP1,
    PERF_MFU,
    TRAIN_IMAGES_PER_S,
    TRAIN_LOSS,
    TRAIN_LR,
)
from vit_ray.tracking.recorder import Recorder
from vit_ray.tracking.run_state import RunStatus

Show = Callable[[RunStatus, str, bool], None]
"""Takes the state of the run, what `Pace` says about it, and whether it has ended."""

LINE_EVERY_S = 10.0
NO_STEP_S, NO_STEP_TIMES = 15.0, 5.0
"""A step counts as slow if it takes longer than this, and this many times as long as the others."""

_TOP1 = (
    (EVAL_TOP1, "top-1 {:.2%}"),
    (EVAL_AVERAGED_TOP1, "of averaged weights {:.2%}"),
)
_FIGURES = (
    (TRAIN_LOSS, "loss {:.3f}"),
    (TRAIN_IMAGES_PER_S, "{:.0f} images/s"),
    (DATA_WAIT_FRACTION, "data wait {:.0%}"),
    (PERF_MFU, "MFU {:.1%}"),
    *_TOP1,
    (TRAIN_LR, "lr {:.2e}"),
)
MOST_FIGURES = 5
"""Of these, shown after the step and the remaining time; MLflow has all others."""


@contextlib.contextmanager
def shown_progress(
    record: Recorder, name: str, total: int, *, is_shown: bool = True
) -> Iterator[None]:
    """Show the progress of the run while the block runs."""
    if not is_shown:
        yield
        return
    seen, pace, console = 0, Pace(total), Console(file=sys.stderr)

    def update(is_last: bool) -> None:
        """Print new events, and the state of the run."""
        nonlocal seen
        status = record.status(ANSWER_S)
        for event in status.events[seen:]:
            print_line(console, redact(f"{name}: {event.kind}: {event.text}"))
        seen = len(status.events)
        show(status, pace.left(status), is_last)

    lines = _bar(console, name, total) if console.is_terminal else _lines(console, name, total)
    with lines as show, repeated(update):
        yield


def describe(status: RunStatus) -> str:
    """The first figures that are known, as one text."""
    known = status.metrics
    texts = [text.format(known[key]) for key, text in _FIGURES if key in known][:MOST_FIGURES]
    return ", ".join(texts)


class Pace:
    """The remaining time of a run by its pace, or how long no step has come.

    For a single run, from the steps since the first seen, without start-up. For a run with child
    runs, from the whole time since the display began, because each child starts up.
    """

    def __init__(self, total: int) -> None:
        self._total, self._began_s = total, time.monotonic()
        self._first: tuple[int, float] | None = None
        self._newest = (0, self._began_s)

    def left(self, status: RunStatus) -> str:
        now_s = time.monotonic()
        if status.step != self._newest[0]:
            self._newest = (status.step, now_s)
        if self._first is None and (status.step or status.has_children):
            self._first = (status.step, self._began_s if status.has_children else now_s)
        step, since_s = self._first or (status.step, now_s)
        waited_s = now_s - self._newest[1]
        usual_s = (
            self._newest[1] - self._began_s
        )  # for a first step, which takes longer than others
        if status.step > step:
            usual_s = (self._newest[1] - since_s) / (status.step - step)
        if (
            status.step
            and not status.has_children
            and waited_s > max(NO_STEP_S, NO_STEP_TIMES * usual_s)
        ):
            return f"no step for {clock(waited_s)}"
        return f"ETA {time_left(status.step, step, self._total, now_s - since_s)}"


def time_left(step: int, start_step: int, total: int, elapsed_s: float) -> str:
    """Hours, minutes and seconds, at the pace of the steps since `start_step`."""
    done = step - start_step
    return "--:--" if done <= 0 else clock(elapsed_s / done * max(0, total - step))


@contextlib.contextmanager
def _bar(console: Console, name: str, total: int) -> Iterator[Show]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}"),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=total, figures="starting", pace="ETA --:--")

        def show(status: RunStatus, pace: str, is_last: bool) -> None:
            figures = describe(status) or "starting"
            bar.update(task, completed=min(status.step, total), figures=figures, pace=pace)

        yield show


@contextlib.contextmanager
def _lines(console: Console, name: str, total: int) -> Iterator[Show]:
    shown_s = 0.0
    print_line(console, f"{name}: starting workers")

    def show(status: RunStatus, pace: str, is_last: bool) -> None:
        nonlocal shown_s
        if status.step and (is_last or time.monotonic() - shown_s > LINE_EVERY_S):
            shown_s = time.monotonic()
            figures = describe(status)
            what = f"step {status.step}/{total}, {pace}{', ' if figures else ''}{figures}"
            print_line(console, f"{name}: {what}")

    yield show
