"""Means over seeds: of runs of one group, each seed once."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vit_ray.report.groups import Group
from vit_ray.report.runs import RecordedRun
from vit_ray.report.tables import percent


@dataclass(frozen=True)
class Mean:
    """Of an accuracy over seeds."""

    value: float
    deviation: float | None
    """None of a single seed."""
    count: int

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" +- {percent(self.deviation)}"
        return f"{percent(self.value)}{spread}"


def mean_of(values: Sequence[float]) -> Mean | None:
    """None of nothing."""
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Mean(statistics.fmean(values), deviation, len(values))


def rank(run: RecordedRun) -> tuple[bool, bool, int]:
    """Of records of one training the greatest counts: finished, a cell of a study, the newest."""
    is_cell = run.kind == "study_cell"
    return run.status == "FINISHED", is_cell, run.run.info.start_time or 0


def by_group(runs: Iterable[RecordedRun]) -> dict[Group, list[RecordedRun]]:
    """Runs that differ in the seed alone, in their order; a seed that is recorded twice once."""
    found: dict[Group, dict[tuple[str, ...], RecordedRun]] = {}
    for run in runs:
        seeds = found.setdefault(run.group, {})
        if run.seed not in seeds or rank(run) > rank(seeds[run.seed]):
            seeds[run.seed] = run
    return {group: [*seeds.values()] for group, seeds in found.items()}


def without_copies(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """One record of each training."""
    kept = {run.run_id for seeds in by_group(runs).values() for run in seeds}
    return [run for run in runs if run.run_id in kept]
