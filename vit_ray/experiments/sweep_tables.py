"""A sweep's trials as its own run keeps them: a table, and accuracy against the rate."""

import math
from dataclasses import dataclass

from vit_ray.experiments.search_space import RATE, Point, point_text
from vit_ray.experiments.trials import Outcome
from vit_ray.outcomes import TrialState
from vit_ray.report.figures import charts
from vit_ray.report.figures.charts import Axis, Chart, Series
from vit_ray.report.tables import Column, Table, Value


@dataclass(frozen=True)
class Row:
    """A trial or a retraining, and the point that it stands for."""

    point: Point
    outcome: Outcome


def sweep_files(rows: list[Row], chosen: Row) -> dict[str, str]:
    """Texts by name: `trials.csv`, and `dev_accuracy.svg` if rates were varied."""
    keys = list(dict.fromkeys(key for row in rows for key in row.point))
    of_trial = ("dev_top1", "last_dev_top1", "steps", "state", "chosen", "checkpoint", "error")
    lines: list[list[Value]] = []
    for row in rows:
        values, outcome = [row.point.get(key) for key in keys], row.outcome
        texts = [value if isinstance(value, (int, float, str)) else str(value) for value in values]
        top1 = None if math.isnan(outcome.top1) else outcome.top1
        found = [top1, outcome.last_top1, outcome.step or None, outcome.state]
        note = "yes" if row is chosen else ""
        lines.append([*texts, *found, note, outcome.checkpoint, outcome.error])
    table = Table("Trials", list(map(Column, (*keys, *of_trial))), lines)
    files = {"trials.csv": table.csv()}
    series = [_series(rows, TrialState.FINISHED), _series(rows, TrialState.STOPPED_EARLY)]
    if series := [one for one in series if one.points]:
        chart = Chart(
            "Dev accuracy against the learning rate",
            Axis("learning rate (log scale)", is_log=True),
            Axis("top-1 on the dev split", is_percent=True),
            series,
        )
        files["dev_accuracy.svg"] = charts.svg(chart)
    return files


def _series(rows: list[Row], state: TrialState) -> Series:
    is_cut = state is TrialState.STOPPED_EARLY
    points = [
        charts.Point(
            float(row.point[RATE]),
            row.outcome.top1,
            point_text({key: value for key, value in row.point.items() if key != RATE}),
            state=str(state) if is_cut else "",
        )
        for row in rows
        if RATE in row.point and not math.isnan(row.outcome.top1) and row.outcome.state is state
    ]
    has_line = len({point.label for point in points}) == 1 and not is_cut
    name = str(state) if is_cut else "trials"
    return Series(name, sorted(points, key=lambda point: point.x), has_line=has_line)
