"""How the time of trainings was spent: goodput on the page."""

from collections.abc import Sequence

from vit_ray.measure.goodput import SHOWN, TimeClass
from vit_ray.metric_names import RUN_GROUP, RUN_WALL_S
from vit_ray.report.document import Section
from vit_ray.report.runs import RecordedRun
from vit_ray.report.tables import Column, Table, duration, percent


def time_section(runs: Sequence[RecordedRun]) -> Section:
    """Seconds of each class over all attempts and drivers of the runs; empty if there are none."""
    known = [run for run in runs if run.recorded.get(RUN_WALL_S, 0.0) > 0]
    wall_s = sum(run.recorded[RUN_WALL_S] for run in known)
    rows: list[list[float | str | None]] = []
    for kind, name in SHOWN.items():
        spent = [run.recorded.get(f"{RUN_GROUP}{kind}_s", 0.0) for run in known]
        if total_s := sum(spent):
            rows.append([name, total_s, total_s / wall_s])
    heads = [Column("spent on"), Column("time", duration), Column("% of the time", percent, True)]
    table = Table("Where the time went", heads, rows)
    texts = [f"{goodput_of(known).capitalize()} of {duration(wall_s)}."] if known else []
    return Section("Where the time went", texts, tables=[table])


def goodput_of(runs: Sequence[RecordedRun]) -> str:
    """Share of the trainings' time that trained new steps; empty if unknown."""
    wall_s = sum(run.recorded.get(RUN_WALL_S, 0.0) for run in runs)
    trained_s = sum(run.recorded.get(f"{RUN_GROUP}{TimeClass.TRAINING}_s", 0.0) for run in runs)
    return f"goodput {100 * trained_s / wall_s:.1f} %" if wall_s > 0 else ""
