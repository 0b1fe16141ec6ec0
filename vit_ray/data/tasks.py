"""Work items as Ray tasks with small results, and the display of their progress."""

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

# Most tasks that run or wait for a CPU: an autoscaler starts nodes for those that wait.
_MOST: Final = 4096
# Of a task whose process or node dies; nodes of a long conversion may be taken back often.
_RETRIES: Final = 10
LINE_EVERY_S: Final = 30.0
"""Seconds between lines in a log."""
_POLL_S: Final = 0.5
# Seconds between reports of a task.
_SENT_EVERY_S: Final = 1.0
ANSWER_S: Final = 10.0
"""Longest wait for the actor that counts, and for the last update."""
_SPEED_OVER_S: Final = 120.0


@dataclass(frozen=True)
class Shown:
    """What the display says about some tasks.

    Attributes:
        title: what they do, such as `converting data/train`.
        num_images: of all tasks; None if unknown, then parts are counted.
        noted: what the second number of `report_done` counts, such as `rejected`.
    """

    title: str
    num_images: int | None = None
    noted: str = ""


class Tally:
    """An actor: images that each task has done, and how many of them it noted."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[int, int]] = {}

    def put(self, task: int, images: int, noted: int) -> None:
        """A task's counts so far; replaces its earlier report."""
        self._done[task] = images, noted

    def sums(self) -> tuple[int, int]:
        return sum(n for n, _ in self._done.values()), sum(n for _, n in self._done.values())


@dataclass
class TaskCount:
    """A task's counts, which it sends once a second.

    Attributes:
        put: sends the images, and those noted; None if nothing is shown.
    """

    put: Callable[[int, int], object] | None = None
    done: tuple[int, int] = (0, 0)
    sent_s: float = 0.0

    def send(self) -> None:
        """What has been done so far."""
        if self.put is not None:
            self.sent_s = time.monotonic()
            self.put(*self.done)


TASK: Final[ContextVar[TaskCount]] = ContextVar("task", default=TaskCount())  # noqa: B039


def report_done(images: int, noted: int = 0) -> None:
    """Report how many images this task has done so far, and how many of them were noted.

    A task that is retried counts from 0.
    """
    task = TASK.get()
    task.done = images, noted
    if time.monotonic() - task.sent_s > _SENT_EVERY_S:
        task.send()


@contextlib.contextmanager
def shown_progress(
    shown: Shown | None, num_parts: int, num_ended: Callable[[], int]
) -> Iterator[Any]:
    """Show the progress of tasks while the block runs; yields the `Tally` that they report to.

    Args:
        shown: None shows nothing, and yields None.
        num_parts: tasks.
        num_ended: tasks that have ended, called by another thread.
    """
    if shown is None:
        yield None
        return
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    tally: Any = ray.remote(Tally).options(num_cpus=0, scheduling_strategy=here).remote()
    console = Console(file=sys.stderr)
    display, first = Display(shown, num_parts, console), tally.sums.remote()

    def update(is_last: bool) -> None:
        if ray.wait([first], timeout=0)[0]:  # short rounds do not wait for the actor's start
            images, noted = ray.get(tally.sums.remote(), timeout=ANSWER_S)
            display.update(num_ended(), images, noted)

    with display.bar if console.is_terminal else contextlib.nullcontext(), repeated(update):
        yield tally


@contextlib.contextmanager
def repeated(update: Callable[[bool], None]) -> Iterator[None]:
    """Call `update(False)` twice a second in a thread, and `update(True)` when the block has ended.

    An actor that is busy or has ended raises, which is ignored: nothing fails because of a display.
    """
    ended = threading.Event()

    def run() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(_POLL_S)
            with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
                update(is_last)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=ANSWER_S)


class Display:
    """The bar, and the lines of a log.

    Attributes:
        bar: shown by who enters it.
    """

    def __init__(self, shown: Shown, num_parts: int, console: Console) -> None:
        self._shown, self._console, self._line_s = shown, console, time.monotonic()
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}")
        self.bar = Progress(
            *columns,
            console=console,
            transient=True,
            get_time=time.monotonic,
            speed_estimate_period=_SPEED_OVER_S,
        )
        total = num_parts if shown.num_images is None else shown.num_images
        self.bar.add_task(shown.title, total=total, text="starting")
        (self._task,) = self.bar.tasks

    def update(self, ended: int, images: int, noted: int) -> None:
        """Take over counts, and print a line if it is time for one."""
        shown, task, now_s = self._shown, self._task, time.monotonic()
        counts_images = shown.num_images is not None
        self.bar.update(task.id, completed=images if counts_images else ended)
        total = f"{task.total:,.0f}"
        text = [f"{images:,} of {total} images" if counts_images else f"{ended:,} of {total} parts"]
        if not counts_images and images:
            text.append(f"{images:,} images")
        if counts_images and task.speed:
            text.append(f"{task.speed:,.0f} images/s")
        if shown.noted:
            text.append(f"{noted:,} {shown.noted}")
        left_s = task.time_remaining
        text.append(f"ETA {'--:--' if left_s is None else clock(left_s)}")
        self.bar.update(task.id, text=", ".join(text))
        if not self._console.is_terminal and now_s - self._line_s >= LINE_EVERY_S:
            self._line_s = now_s
            print_line(self._console, f"{shown.title}: {', '.join(text)}")


def print_line(console: Console, line: str) -> None:
    """A line of a log, as it is: not coloured, not wrapped."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _run(
    work: Callable[..., Any], shared: list[Any], tally: Any, number: int, item: Any
) -> tuple[int, Any, str]:
    """What one task returns: its number, and its result, or a text and the kind of its error.

    Args:
        shared: references to what all tasks have in common.
        tally: actor that the task reports to; None if nothing is shown.
    """
    count = TaskCount(None if tally is None else lambda *done: tally.put.remote(number, *done))
    TASK.set(count)
    try:
        result, kind = work(item, *ray.get(shared)), ""  # no limit: the driver put it there before
    except (ValueError, OSError) as error:
        result = "; ".join([str(error), *getattr(error, "__notes__", ())])
        kind = "storage" if isinstance(error, OSError) else "value"
    count.send()
    return number, result, kind


def run_tasks(
    work: Callable[..., Any],
    items: Sequence[Any],
    *shared: Any,
    shown: Shown | None = None,
) -> list[Any]:
    """Do `work(item, *shared)` for every item, as many in parallel as the cluster has CPUs.

    Args:
        shown: what to show meanwhile; `work` calls `report_done`.

    Returns:
        The results, in the order of the items.

    Raises:
        ValueError, OSError: as soon as `work` raises one, or the process of a task has died
            `_RETRIES` times and once more; the other items are not processed.
    """
    if not items:
        return []
    results: dict[int, Any] = {}
    pending: list[Any] = []
    references = [ray.put(one) for one in shared]
    task: Any = ray.remote(num_cpus=1, scheduling_strategy="SPREAD", max_retries=_RETRIES)(_run)
    with shown_progress(shown, len(items), results.__len__) as tally:
        started = (task.remote(work, references, tally, *one) for one in enumerate(items))
        try:
            while len(results) < len(items):
                pending += itertools.islice(started, _MOST - len(pending))
                # no limit: a task takes as long as its item needs
                ready, pending = ray.wait(pending, num_returns=1)
                number, result, error = ray.get(ready[0])  # no limit: it is ready
                if error:
                    raise (OSError if error == "storage" else ValueError)(result)
                results[number] = result
        except (NodeDiedError, OutOfMemoryError, WorkerCrashedError) as error:
            raise OSError(
                f"a task died {_RETRIES + 1} times: {str(error).splitlines()[0]}; run the same "
                "command again, which keeps what is done"
            ) from error
        finally:
            for reference in pending:
                ray.cancel(reference)
    return [results[number] for number in range(len(items))]
