"""Work items as Ray tasks with small results, and the display of their progress."""

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError
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
ANSWER_S: Final = 10.0
"""Timeout of a request to an actor for a display, and of the last update."""
# The remaining time follows from the speed of this last time.
_SPEED_OVER_S: Final = 1800.0


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
    work: Callable[..., Any], shared: list[Any], number: int, item: Any
) -> tuple[int, Any, type[Exception] | None]:
    """Run one task. Returns its number, and its result or the text and class of its error.

    Args:
        shared: references to the arguments that all tasks have in common.
    """
    try:
        arguments = ray.get(shared)  # no limit: the driver put it there before
        return number, with_retries(lambda: work(item, *arguments), f"task {number}"), None
    except (ValueError, OSError) as error:
        text = "; ".join([str(error), *getattr(error, "__notes__", ())])
        return number, text, OSError if isinstance(error, OSError) else ValueError


def run_tasks(
    work: Callable[..., Any], items: Sequence[Any], *shared: Any, title: str = "running"
) -> list[Any]:
    """Call `work(item, *shared)` for every item, as many in parallel as the cluster has CPUs.

    A call is repeated while the server of a disk is away. The display counts ended calls.

    Args:
        title: of the display, such as `verifying data/train`.

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
    started = (task.remote(work, references, number, item) for number, item in enumerate(items))
    display = Display(title, len(items), _LINE_EVERY_S)

    def update(is_last: bool) -> None:
        display.show(len(results), [f"{len(results):,} of {len(items):,} parts"])

    with display.updated_by(update):
        try:
            while len(results) < len(items):
                pending += itertools.islice(started, _MOST - len(pending))
                # no limit: a task takes as long as its item needs
                ready, pending = ray.wait(pending, num_returns=1)
                number, result, error = ray.get(ready[0])  # no limit: it is ready
                if error is not None:
                    raise error(result)
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
