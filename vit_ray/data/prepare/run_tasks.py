"""Plain work items through Ray Data: one task each, results that are small."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.data


@dataclass(frozen=True)
class _Run:
    work: Callable[..., Any]
    shared: list[Any]

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        # no limit: the driver has put it there before the task began
        shared = ray.get(self.shared)
        try:
            found, kind = self.work(row["item"], *shared), ""
        except (ValueError, OSError) as error:
            found = "; ".join([str(error), *getattr(error, "__notes__", ())])
            kind = "storage" if isinstance(error, OSError) else "value"
        return {"found": pickle.dumps(found), "error": kind}


def run_tasks(
    work: Callable[..., Any], items: Sequence[Any], num_cpus: float, *shared: Any
) -> list[Any]:
    """Do `work(item, *shared)` for every item, as many at a time as the cluster has CPUs.

    Returns:
        The results, in the order in which they were ready.

    Raises:
        ValueError, OSError: as soon as `work` raises one; the other items are not worked on.
    """
    if not items:
        return []
    rows = [{"item": item} for item in items]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    mapped = dataset.map(_Run(work, [ray.put(one) for one in shared]), num_cpus=num_cpus)
    mapped.context.enable_progress_bars = False
    results = []
    for row in mapped.iter_rows():
        found = pickle.loads(row["found"])  # noqa: S301  # written by our own task
        if row["error"]:
            raise (OSError if row["error"] == "storage" else ValueError)(found)
        results.append(found)
    return results
