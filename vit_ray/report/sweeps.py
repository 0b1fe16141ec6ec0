"""Sweeps over learning rates: rate against accuracy, the trials, and the result on the test set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vit_ray.report.accuracies import decided_key, decided_top1
from vit_ray.report.charts import Axis, Chart
from vit_ray.report.figures import SWEEP_STAGES, Line, line_of_means
from vit_ray.report.groups import Group, differences
from vit_ray.report.runs import RecordedRun
from vit_ray.report.seeds import by_group, mean_of
from vit_ray.report.tables import Column, Table, number, percent

RATE = "optim.learning_rate"


def sweep_table(runs: Sequence[RecordedRun]) -> Table:
    """Learning rate by seed, as trials of a sweep recorded them; best first."""
    columns = [
        Column("learning rate", number), Column("seed", number), Column("measured on"),
        Column("averaged top-1 %", percent), Column("top-1 %", percent),
        Column("eval loss", number), Column("status"), Column("run"),
    ]  # fmt: skip
    keys = ("eval/averaged_top1", "eval/top1", "eval/loss")
    rows = [
        [run.number(RATE), run.number("seed"), stage, *map(run.metrics.get, keys),
         run.status.lower(), run.name]
        for run in runs
        if (stage := _stage(run))
    ]  # fmt: skip

    def order(row: Sequence[Any]) -> tuple[str, float, str]:
        top1 = row[3] or row[4]
        return row[2], float("inf") if top1 is None else -top1, row[-1]

    return Table("Trials of the learning-rate sweep", columns, sorted(rows, key=order)).used()


def sweep_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Rate against accuracy: a line for what differs in the rate alone."""
    lines: dict[str, dict[Group, Line]] = {}
    measured = [run for run in runs if _stage(run) and decided_top1(run) is not None]
    for group, members in by_group(measured).items():
        if (rate := members[0].number(RATE)) is not None:
            alike = lines.setdefault(f"{_sweep_name(members[0])}, {_stage(members[0])}", {})
            alike.setdefault(group.without(RATE), []).append((rate, members))
    series = []
    for name, alike in lines.items():
        for group, rest in differences([*alike]).items():
            key = decided_key([run for _, some in alike[group] for run in some], "eval/top1")
            title = name + (f", differs in {rest}" if rest else "")
            series.append(line_of_means(title, alike[group], key))
    accuracy = Axis("top-1 accuracy", is_percent=True)
    rate_axis = Axis("learning rate (log scale)", is_log=True)
    return [Chart("Learning rate against accuracy", rate_axis, accuracy, series)] if series else []


def sweep_summary(runs: Sequence[RecordedRun]) -> list[str]:
    """Mean and deviation over seeds of the finished runs with a sweep's chosen rate."""
    sweeps = by_group(
        run
        for run in runs
        if run.tags.get("vit_ray.sweep_stage") == "finetune"
        if run.status == "FINISHED" and decided_top1(run) is not None
    )
    sentences = []
    for group, chosen in sweeps.items():
        mean = mean_of([value for run in chosen if (value := decided_top1(run)) is not None])
        name = _sweep_name(chosen[0])
        alike = [one.without(RATE) for one, (run, *_) in sweeps.items() if _sweep_name(run) == name]
        rest = differences(alike)[group.without(RATE)]
        seeds = f"{len(chosen)} seeds" if len(chosen) > 1 else "one seed"
        whose = f"{name}: test" if len(sweeps) > 1 else "Test"
        rate = f"learning rate {chosen[0].params.get(RATE, '?')}"
        differs = f", differs in {rest}" if rest else ""
        sentences.append(f"{whose} top-1 {mean} % over {seeds}, {rate}{differs}.")
    return sentences


def _stage(run: RecordedRun) -> str:
    """What a run of a sweep was measured on; empty for others."""
    return SWEEP_STAGES.get(run.tags.get("vit_ray.sweep_stage", ""), "")


def _sweep_name(run: RecordedRun) -> str:
    """The trial's own name without what differs between trials."""
    return re.sub(r"-(lr|seed)[\w.-]*$", "", run.name)
