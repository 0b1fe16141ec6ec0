"""A sweep's trials as its own run keeps them: a table, and accuracy against the rate."""

from vit_ray.experiments.search_space import RATE, point_text
from vit_ray.experiments.training import Outcome
from vit_ray.outcomes import TrialState
from vit_ray.report.figures import charts
from vit_ray.report.figures.charts import Axis, Chart, Series
from vit_ray.report.tables import Column, Table, Value


def sweep_files(rows: list[Outcome], chosen: Outcome) -> dict[str, str]:
    """Texts by name: `trials.csv`, and `dev_accuracy.svg` if rates were varied."""
    keys = list(dict.fromkeys(key for row in rows for key in row.point))
    of_trial = ("dev_top1", "last_dev_top1", "steps", "state", "chosen", "checkpoint", "error")
    lines: list[list[Value]] = []
    for row in rows:
        values = [row.point.get(key) for key in keys]
        texts = [value if isinstance(value, (int, float, str)) else str(value) for value in values]
        accuracies, note = [row.top1, row.last_top1], "yes" if row is chosen else ""
        lines.append([*texts, *accuracies, row.steps, row.state, note, row.checkpoint, row.error])
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


def _series(rows: list[Outcome], state: TrialState) -> Series:
    is_cut = state is TrialState.STOPPED_EARLY
    points = [
        charts.Point(
            float(row.point[RATE]),
            row.top1,
            point_text({key: value for key, value in row.point.items() if key != RATE}),
            state=str(state) if is_cut else "",
        )
        for row in rows
        if RATE in row.point and row.top1 is not None and row.state is state
    ]
    has_line = len({point.label for point in points}) == 1 and not is_cut
    name = str(state) if is_cut else "trials"
    return Series(name, sorted(points, key=lambda point: point.x), has_line=has_line)
