"""Work items as Ray tasks, one each, with small results."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError

from vit_ray.data.tasks import TASK, Shown, TaskCount, shown_progress

_MOST: Final = 4096
"""Most tasks that run or wait for a CPU: an autoscaler starts nodes for those that wait."""
_RETRIES: Final = 10
"""Of a task whose process or node dies; nodes of a long conversion may be taken back often."""


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
        found, kind = work(item, *ray.get(shared)), ""  # no limit: the driver put it there before
    except (ValueError, OSError) as error:
        text = "; ".join([str(error), *getattr(error, "__notes__", ())])
        found, kind = text, "storage" if isinstance(error, OSError) else "value"
    count.send()
    return number, found, kind


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
    references = [ray.put(one) for one in shared]
    task: Any = ray.remote(num_cpus=1, scheduling_strategy="SPREAD", max_retries=_RETRIES)(_run)
    with shown_progress(shown, len(items), results.__len__) as tally:
        started = (task.remote(work, references, tally, *one) for one in enumerate(items))
        with contextlib.closing(_ended(started)) as ended:
            for number, found, error in ended:
                if error:
                    raise (OSError if error == "storage" else ValueError)(found)
                results[number] = found
    return [results[number] for number in range(len(items))]


def _ended(started: Iterator[Any]) -> Generator[tuple[int, Any, str], None, None]:
    """What tasks return, in the order in which they end; those that are left are cancelled."""
    pending: list[Any] = []
    try:
        while True:
            pending += itertools.islice(started, _MOST - len(pending))
            if not pending:
                return
            # no limit: a task takes as long as its item needs
            ready, pending = ray.wait(pending, num_returns=1)
            try:
                found = ray.get(ready[0])  # no limit: it is ready
            except (NodeDiedError, OutOfMemoryError, WorkerCrashedError) as error:
                raise OSError(
                    f"a task died {_RETRIES + 1} times: {str(error).splitlines()[0]}; run the same "
                    "command again, which keeps what is done"
                ) from error
            yield found
    finally:
        for reference in pending:
            ray.cancel(reference)
