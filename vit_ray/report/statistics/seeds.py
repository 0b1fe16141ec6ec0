"""Means over seeds: of runs in one group, each seed once."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from vit_ray.report.runs import TRAININGS, RecordedRun
from vit_ray.report.statistics.groups import Group
from vit_ray.report.tables import percent

CELL_KINDS: Final = ("study_cell", "sweep_trial")


@dataclass(frozen=True)
class Mean:
    """Of an accuracy over seeds."""

    value: float
    deviation: float | None
    """None for a single seed."""
    count: int

    def text(self, form: Callable[[float], str] = percent) -> str:
        """`MEAN +- DEVIATION`, each in this form."""
        spread = "" if self.deviation is None else f" +- {form(self.deviation)}"
        return f"{form(self.value)}{spread}"

    __str__ = text


def mean_of(values: Sequence[float]) -> Mean | None:
    """None without values."""
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Mean(statistics.fmean(values), deviation, len(values))


def rank(run: RecordedRun) -> tuple[bool, bool, int]:
    """Rank among records of one training: finished ones, cells of a study, newer ones first."""
    is_cell = run.kind == "study_cell"
    return run.status == "FINISHED", is_cell, run.run.info.start_time or 0


def by_group(runs: Iterable[RecordedRun]) -> dict[Group, list[RecordedRun]]:
    """Runs that differ only in the seed, in order; each seed counts once."""
    found: dict[Group, dict[tuple[str, ...], RecordedRun]] = {}
    for run in runs:
        seeds = found.setdefault(run.group, {})
        seeds[run.seed] = max(seeds[run.seed], run, key=rank) if run.seed in seeds else run
    return {group: [*seeds.values()] for group, seeds in found.items()}


def one_run_a_cell(runs: Iterable[RecordedRun]) -> tuple[list[RecordedRun], list[RecordedRun]]:
    """Runs to show, and hidden ones: other runs of the same cell, or second records of a training.

    A cell of a study and a trial have their own name under their parent; any other training is
    identified by its group and its seed. Of several the newest finished one is shown, or if none
    has finished, the newest.
    """
    runs = list(runs)
    best: dict[tuple[str | None, str], RecordedRun] = {}
    for run in runs:
        if run.kind in CELL_KINDS:
            cell = run.parent_id, run.name
            best[cell] = max(best.get(cell, run), run, key=rank)
    cells = {run.run_id for run in best.values()}
    kept = [run for run in runs if run.kind not in CELL_KINDS or run.run_id in cells]
    shown = {run.run_id for run in kept if run.kind not in TRAININGS}
    for seeds in by_group(run for run in kept if run.kind in TRAININGS).values():
        shown |= {run.run_id for run in seeds}
    return [r for r in runs if r.run_id in shown], [r for r in runs if r.run_id not in shown]
