"""Plain work items through Ray Data: one task each, results that are small."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray.data


@dataclass(frozen=True)
class _Run:
    work: Callable[[Any], Any]

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": self.work(row["item"]), "error": "", "is_storage": False}
        except (ValueError, OSError) as error:
            text = "; ".join([str(error), *getattr(error, "__notes__", ())])
            return {"result": None, "error": text, "is_storage": isinstance(error, OSError)}


def run_tasks(work: Callable[[Any], Any], items: Sequence[Any], num_cpus: float) -> list[Any]:
    """Do `work` on every item, as many at a time as the cluster has CPUs.

    Returns:
        The results, in the order in which they were ready.

    Raises:
        ValueError, OSError: as soon as `work` raises one; others go on no further.
    """
    if not items:
        return []
    rows = [{"item": item} for item in items]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    mapped = dataset.map(_Run(work), num_cpus=num_cpus)
    mapped.context.enable_progress_bars = False
    results = []
    for row in mapped.iter_rows():
        if row["error"]:
            raise (OSError if row["is_storage"] else ValueError)(row["error"])
        results.append(row["result"])
    return results
