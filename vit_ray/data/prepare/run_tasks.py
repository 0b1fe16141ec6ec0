"""Plain work items through Ray Data: one task each, with small results."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.data

from vit_ray.data.prepare.progress import TASK, Shown, TaskCount, shown_progress


@dataclass(frozen=True)
class _Run:
    work: Callable[..., Any]
    shared: list[Any]
    tally: Any = None
    """Actor that the task reports to; None if nothing is shown."""

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        # no limit: the driver has put it there before the task started
        shared, tally = ray.get(self.shared), self.tally
        count = TaskCount(
            None if tally is None else lambda *done: tally.put.remote(row["number"], *done)
        )
        TASK.set(count)
        try:
            found, kind = self.work(row["item"], *shared), ""
        except (ValueError, OSError) as error:
            found = "; ".join([str(error), *getattr(error, "__notes__", ())])
            kind = "storage" if isinstance(error, OSError) else "value"
        count.send()
        return {"found": pickle.dumps(found), "error": kind}


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
    rows = [{"item": item, "number": number} for number, item in enumerate(items)]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    results: list[Any] = []
    with shown_progress(shown, len(items), results.__len__) as tally:
        run = _Run(work, [ray.put(one) for one in shared], tally)
        mapped = dataset.map(run, num_cpus=num_cpus)
        mapped.context.enable_progress_bars = False
        for row in mapped.iter_rows():
            found = pickle.loads(row["found"])  # noqa: S301  # written by our own task
            if row["error"]:
                raise (OSError if row["error"] == "storage" else ValueError)(found)
            results.append(found)
    return results
