"""Work items as Ray tasks with small results, and the display of their progress."""

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from vit_ray.storage import with_retries

# Maximum number of submitted tasks; an autoscaler starts nodes for those that wait for a CPU.
_MOST: Final = 4096
# Of a task whose process or node dies: a long conversion may lose spot nodes many times.
_RETRIES: Final = 10
# Seconds between lines in a log.
_LINE_EVERY_S: Final = 30.0
_POLL_S: Final = 0.5
# Seconds between reports of a task.
_SENT_EVERY_S: Final = 1.0
ANSWER_S: Final = 10.0
"""Timeout of a request to an actor for a display, and of the last update."""
# The remaining time follows from the speed of this last time.
_SPEED_OVER_S: Final = 1800.0


@dataclass(frozen=True)
class Shown:
    """How the progress of some tasks is displayed.

    Attributes:
        title: such as `converting data/train`.
        num_images: images of all tasks; None if unknown: then ended tasks are counted, as parts.
        noted: name of the second number of `report_done`, such as `rejected`; empty for none.
    """

    title: str
    num_images: int | None = None
    noted: str = ""


class Tally:
    """An actor that holds, for each task, the counts of its last `report_done`."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[int, int]] = {}

    def put(self, task: int, images: int, noted: int) -> None:
        self._done[task] = images, noted

    def sums(self) -> tuple[int, int]:
        return sum(n for n, _ in self._done.values()), sum(n for _, n in self._done.values())


@dataclass
class TaskCount:
    """The counts of the task that this process runs; sent to the `Tally` once a second.

    Attributes:
        put: sends (images, noted); None if nothing is displayed.
        done: the last (images, noted).
    """

    put: Callable[[int, int], object] | None = None
    done: tuple[int, int] = (0, 0)
    sent_s: float = 0.0

    def send(self) -> None:
        if self.put is not None:
            self.sent_s = time.monotonic()
            self.put(*self.done)


_TASK: Final[ContextVar[TaskCount]] = ContextVar("task", default=TaskCount())  # noqa: B039


def report_done(images: int, noted: int = 0) -> None:
    """Report how many images this task has done so far, and how many of them were noted.

    A task that is retried counts from 0.
    """
    count = _TASK.get()
    count.done = images, noted
    if time.monotonic() - count.sent_s > _SENT_EVERY_S:
        count.send()


@contextlib.contextmanager
def shown_progress(
    shown: Shown | None, num_parts: int, num_ended: Callable[[], int]
) -> Iterator[Any]:
    """Show the progress of tasks while the block runs; yields the `Tally` that they report to.

    Args:
        shown: None displays nothing, and yields None.
        num_parts: number of tasks.
        num_ended: returns the number of ended tasks; called by another thread.
    """
    if shown is None:
        yield None
        return
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    tally: Any = ray.remote(Tally).options(num_cpus=0, scheduling_strategy=here).remote()
    total = num_parts if shown.num_images is None else shown.num_images
    display, first = Display(shown.title, total, _LINE_EVERY_S), tally.sums.remote()

    def update(is_last: bool) -> None:
        if not ray.wait([first], timeout=0)[0]:  # do not wait until the actor has started
            return
        images, noted = ray.get(tally.sums.remote(), timeout=ANSWER_S)
        done = images if shown.num_images is not None else num_ended()
        words = [f"{done:,} of {total:,} {'parts' if shown.num_images is None else 'images'}"]
        if shown.num_images is None and images:
            words.append(f"{images:,} images")
        if shown.noted:
            words.append(f"{noted:,} {shown.noted}")
        display.show(done, words)

    with display.updated_by(update):
        yield tally


@contextlib.contextmanager
def repeated(update: Callable[[bool], None]) -> Iterator[None]:
    """Call `update(False)` twice a second in a thread, and `update(True)` after the block.

    Errors of Ray, such as timeouts, and RuntimeErrors are ignored: a display must not fail a run.
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
    """A progress bar on a terminal, or lines in a log, with the remaining time."""

    def __init__(self, title: str, total: int, every_s: float) -> None:
        """`every_s`: interval of the lines in a log."""
        self._console = Console(file=sys.stderr)
        self._title, self._every_s, self._line_s = title, every_s, time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            transient=True,
            get_time=time.monotonic,
            speed_estimate_period=_SPEED_OVER_S,
        )
        self._bar.add_task(title, total=total, text="starting")
        (self._task,) = self._bar.tasks

    @contextlib.contextmanager
    def updated_by(self, update: Callable[[bool], None]) -> Iterator[None]:
        """Display what `update` shows, as in `repeated`, while the block runs."""
        with self._bar if self._console.is_terminal else contextlib.nullcontext(), repeated(update):
            yield

    def show(self, completed: int, words: Iterable[str], is_last: bool = False) -> None:
        """Display a new state: how much is completed, and what else is to be said."""
        self._bar.update(self._task.id, completed=completed)
        left_s, now_s = self._task.time_remaining, time.monotonic()
        text = ", ".join([*words, f"ETA {'--:--' if left_s is None else clock(left_s)}"])
        self._bar.update(self._task.id, text=text)
        is_due = is_last or now_s - self._line_s >= self._every_s
        if is_due and not self._console.is_terminal:
            self._line_s = now_s
            self.line(f"{self._title}: {text}")

    def line(self, text: str) -> None:
        """Print a line, in a log without colours and wrapping."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """A duration as hours:minutes:seconds, such as `0:01:10`."""
    total_s = round(seconds)
    return f"{total_s // 3600}:{total_s // 60 % 60:02d}:{total_s % 60:02d}"


def _run(
    work: Callable[..., Any], shared: list[Any], tally: Any, number: int, item: Any
) -> tuple[int, Any, str]:
    """Run one task. Returns its number, and its result or the text and kind of its error.

    Args:
        shared: references to the arguments that all tasks have in common.
        tally: actor that the task reports to; None if nothing is displayed.
    """
    count = TaskCount(None if tally is None else lambda *done: tally.put.remote(number, *done))
    _TASK.set(count)
    try:
        arguments = ray.get(shared)  # no limit: the driver put it there before
        result, kind = with_retries(lambda: work(item, *arguments), f"task {number}"), ""
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
    """Call `work(item, *shared)` for every item, as many in parallel as the cluster has CPUs.

    A call is repeated while the server of a disk is away.

    Args:
        shown: how to display progress; `work` calls `report_done`. None displays nothing.

    Returns:
        The results, in the order of the items.

    Raises:
        ValueError, OSError: as soon as `work` raises one, or the process of a task has died
            more than `_RETRIES` times; tasks that have not ended are cancelled.
    """
    if not items:
        return []
    results: dict[int, Any] = {}
    pending: list[Any] = []
    references = [ray.put(argument) for argument in shared]
    task: Any = ray.remote(num_cpus=1, scheduling_strategy="SPREAD", max_retries=_RETRIES)(_run)
    with shown_progress(shown, len(items), results.__len__) as tally:
        started = (
            task.remote(work, references, tally, number, item) for number, item in enumerate(items)
        )
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
                "command again; finished shards are kept"
            ) from error
        finally:
            for reference in pending:
                ray.cancel(reference)
    return [results[number] for number in range(len(items))]
