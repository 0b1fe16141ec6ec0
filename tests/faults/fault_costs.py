"""What each fault of the soak cost by the soak's clock, against the class that the run has it in.

    python -m tests.faults.fault_costs FOLDER

prints a row for each fault in `FOLDER/faults.jsonl`. A fault after which a driver was started cost
the time without one, from the fault until the new one began to work: `stopped`, and `ending` where
it was asked to stop. One that the run noticed as a failure cost the time until then: `lost`. Any
other may cost a pause, which the times of logged steps show: everything but `training`.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vit_ray.outcomes import EventKind

MOST_OFF_S: Final = 2.0
_WITHOUT_DRIVER: Final = ("stopped", "ending")
_PAUSED: Final = ("lost", "data_wait", "checkpoint", "place_wait")


@dataclass(frozen=True)
class FaultCost:
    """Of one fault, in seconds."""

    fault: str
    classes: tuple[str, ...]
    cost_s: float
    """By the soak's clock."""
    counted_s: float
    """By the run, in these classes."""

    @property
    def is_right(self) -> bool:
        """Whether the two agree."""
        return abs(self.cost_s - self.counted_s) <= MOST_OFF_S


def fault_costs(
    faults: Sequence[dict[str, Any]], spent: dict[str, float], records: Sequence[dict[str, Any]]
) -> list[FaultCost]:
    """A row for each fault.

    Args:
        faults: as the soak writes them, in their order.
        spent: seconds of the run by class, at its end.
        records: of the run's log, in their order.
    """
    found = []
    after = [*(fault["spent"] for fault in faults[1:]), spent]
    ends = [*(fault["struck_s"] for fault in faults[1:]), float("inf")]
    steps = [one["time_ms"] / 1e3 for one in records if "train/loss" in one.get("values", {})]
    usual_s = statistics.median(b - a for a, b in itertools.pairwise(steps))
    for fault, later, end_s in zip(faults, after, ends, strict=True):
        struck_s = fault["struck_s"]
        new = {kind: later[kind] - fault["spent"].get(kind, 0.0) for kind in later}
        began = [
            one["began_s"] for one in records
            if one["kind"] == "start" and struck_s < (one.get("began_s") or 0.0) < end_s
        ]  # fmt: skip
        noticed = [
            one["time_ms"] / 1e3 for one in records
            if one.get("event") == EventKind.WORKER_FAILED
            and struck_s < one["time_ms"] / 1e3 < end_s
        ]  # fmt: skip
        if began:
            classes, cost_s = _WITHOUT_DRIVER, began[0] - struck_s
        elif noticed:
            classes, cost_s = ("lost",), noticed[0] - struck_s
        else:
            times = [one for one in steps if struck_s - usual_s < one < end_s]
            gaps = [b - a for a, b in itertools.pairwise(times)]
            classes, cost_s = _PAUSED, sum(gap - usual_s for gap in gaps if gap > usual_s + 2)
        counted_s = sum(new.get(kind, 0.0) for kind in classes)
        found.append(FaultCost(fault["fault"], classes, cost_s, counted_s))
    return found


def read_costs(folder: Path) -> list[FaultCost]:
    """Of a soak's folder, as far as it is."""
    faults = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    logs = sorted((folder / "home").rglob("disturbed/metrics.jsonl"))
    records = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    done = folder / "spent.json"
    if done.exists():
        return fault_costs(faults, json.loads(done.read_text()), records)
    return fault_costs(faults[:-1], faults[-1]["spent"], records)


def main() -> int:
    """Print the table; 1 where a fault is counted wrongly."""
    folder = Path(sys.argv[1])
    costs = read_costs(folder)
    print("| fault | class | cost s | counted s | within 2 s |\n|---|---|---|---|---|")
    for one in costs:
        classes = " + ".join(one.classes)
        told = "yes" if one.is_right else "NO"
        print(f"| {one.fault} | {classes} | {one.cost_s:.1f} | {one.counted_s:.1f} | {told} |")
    return 0 if all(one.is_right for one in costs) else 1


if __name__ == "__main__":
    sys.exit(main())
