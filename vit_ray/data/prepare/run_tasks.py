"""Work items as Ray tasks, one each, with small results."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import ray

from vit_ray.data.prepare.progress import TASK, Shown, TaskCount, shown_progress

_AHEAD: Final = 256
"""Most tasks that wait for a CPU: an autoscaler starts nodes for them, and each holds its item."""


def _run(
    work: Callable[..., Any], shared: list[Any], tally: Any, number: int, item: Any
) -> tuple[Any, str]:
    """What one task returns: its result, or a text and the kind of its error.

    Args:
        shared: references to what all tasks have in common.
        tally: actor that the task reports to; None if nothing is shown.
    """
    count = TaskCount(None if tally is None else lambda *done: tally.put.remote(number, *done))
    TASK.set(count)
    try:
        found = work(item, *ray.get(shared)), ""  # no limit: the driver has put it there before
    except (ValueError, OSError) as error:
        text = "; ".join([str(error), *getattr(error, "__notes__", ())])
        found = text, "storage" if isinstance(error, OSError) else "value"
    count.send()
    return found


def run_tasks(
    work: Callable[..., Any],
    items: Sequence[Any],
    num_cpus: float,
    *shared: Any,
    shown: Shown | None = None,
) -> list[Any]:
    """Do `work(item, *shared)` for every item, as many in parallel as the cluster has CPUs.

    Args:
        shown: what to show meanwhile; `work` calls `report_done`.

    Returns:
        The results, in the order in which they were ready.

    Raises:
        ValueError, OSError: as soon as `work` raises one; the other items are not processed.
    """
    if not items:
        return []
    results: list[Any] = []
    references = [ray.put(one) for one in shared]
    task: Any = ray.remote(num_cpus=num_cpus, scheduling_strategy="SPREAD")(_run)
    with shown_progress(shown, len(items), results.__len__) as tally:
        started = (task.remote(work, references, tally, *one) for one in enumerate(items))
        for found, error in _ended(started):
            if error:
                raise (OSError if error == "storage" else ValueError)(found)
            results.append(found)
    return results


def _ended(started: Iterator[Any]) -> Iterator[tuple[Any, str]]:
    """What tasks return, in the order in which they end; those that are left are cancelled."""
    pending: list[Any] = []
    try:
        while True:
            held = ray.cluster_resources()  # type: ignore[no-untyped-call]
            room = _AHEAD + int(held.get("CPU", 0.0))
            for reference in started:
                pending.append(reference)
                if len(pending) >= room:
                    break
            if not pending:
                return
            # no limit: a task takes as long as its item needs
            ready, pending = ray.wait(pending, num_returns=1)
            yield ray.get(ready[0])  # no limit: it is ready
    finally:
        for reference in pending:
            ray.cancel(reference)
