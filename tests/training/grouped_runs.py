"""How far fp32 runs of one recipe part on other numbers of workers and passes, by rounding alone.

Real process groups and the engine under ZeRO 2, on the runs of `golden_runs`; by hand, minutes:
    python -m tests.training.grouped_runs [STEPS]
"""

from __future__ import annotations

import itertools
import sys

from tests.training.golden_runs import BATCH, RUNS, loss_curves
from tests.training.ranks import run_ranks

# Workers and passes that a batch of 32 images is cut into, to be held against 1 and 1.
GROUPS = {"1 x 2": (1, 2), "2 x 1": (2, 1), "2 x 2": (2, 2)}
SHOWN = (1, 10, 20, 40, 60, 100, 160)


def apart(names: list[str], steps: int) -> dict[str, dict[str, list[float]]]:
    """By run and group: the largest relative difference of a loss up to each step."""
    reference = _curves(names, steps, 1, 1)
    grouped = {group: _curves(names, steps, *cut) for group, cut in GROUPS.items()}
    return {
        name: {group: _growth(curves[name], reference[name]) for group, curves in grouped.items()}
        for name in names
    }


def _curves(names: list[str], steps: int, workers: int, passes: int) -> dict[str, list[float]]:
    micro = BATCH // (workers * passes)
    found: dict[str, list[float]] = run_ranks(workers, loss_curves, None, names, micro, steps)[0]
    return found


def _growth(losses: list[float], reference: list[float]) -> list[float]:
    pairs = zip(losses, reference, strict=True)
    return list(itertools.accumulate((abs(a - b) / abs(b) for a, b in pairs), max))


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else SHOWN[-1]
    shown = [step for step in SHOWN if step <= steps]
    print("| run | workers x passes |", " | ".join(f"{step} steps" for step in shown), "|")
    print("|" + "---|" * (2 + len(shown)))
    for name in RUNS:
        for group, growth in apart([name], steps)[name].items():
            cells = " | ".join(f"{growth[step - 1]:.1e}" for step in shown)
            print(f"| {name} | {group} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
