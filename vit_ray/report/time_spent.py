"""How the time of trainings was spent, and what it cost: goodput on the page."""

from collections.abc import Sequence

from vit_ray.measure.goodput import SHOWN, UNPAID, TimeClass, loader_gain
from vit_ray.metric_names import COST_GPU_HOURS, RUN_GROUP, RUN_WALL_S
from vit_ray.report.document import Section
from vit_ray.report.runs import RecordedRun
from vit_ray.report.tables import Column, Table, duration, percent


def time_section(runs: Sequence[RecordedRun], price: float | None) -> Section:
    """Seconds of each class over all attempts and drivers of the runs; empty if there are none.

    Args:
        price: per GPU-hour.
    """
    known = [run for run in runs if run.recorded.get(RUN_WALL_S, 0.0) > 0]
    wall_s = sum(run.recorded[RUN_WALL_S] for run in known)
    rows: list[list[float | str | None]] = []
    totals = dict.fromkeys(SHOWN, 0.0)
    for kind, name in SHOWN.items():
        spent = [run.recorded.get(f"{RUN_GROUP}{kind}_s", 0.0) for run in known]
        totals[kind] = sum(spent)
        if totals[kind]:
            costs = [_cost(run, kind, s, price) for run, s in zip(known, spent, strict=True)]
            cost = None if None in costs else sum(filter(None, costs), 0.0)
            rows.append([name, totals[kind], totals[kind] / wall_s, cost])
    heads = [Column("spent on"), Column("time", duration), Column("% of the time", percent, True)]
    heads.append(Column("cost", "{:,.2f}".format))
    table = Table("Where the time went", heads, rows).used()
    texts = [f"{goodput_of(known).capitalize()} of {duration(wall_s)}."] if known else []
    if gain := loader_gain(totals[TimeClass.TRAINING], totals[TimeClass.DATA]):
        texts.append(f"{gain.capitalize()}.")
    priced = [cost for *_, cost in rows if isinstance(cost, float)]
    if rows and len(priced) == len(rows):
        texts.append(
            f"Total: {sum(priced):,.2f}, at {price:g} per GPU-hour: GPU time during start-up and "
            "stalls is included; waiting for free GPUs is not."
        )
    return Section("Where the time went", texts, tables=[table])


def goodput_of(runs: Sequence[RecordedRun]) -> str:
    """Share of the trainings' time that trained new steps; empty if unknown."""
    wall_s = sum(run.recorded.get(RUN_WALL_S, 0.0) for run in runs)
    trained_s = sum(run.recorded.get(f"{RUN_GROUP}{TimeClass.TRAINING}_s", 0.0) for run in runs)
    return f"goodput {100 * trained_s / wall_s:.1f} %" if wall_s > 0 else ""


def _cost(run: RecordedRun, kind: TimeClass, seconds: float, price: float | None) -> float | None:
    """Cost of this much of its time; None without a price, or without GPUs.

    If the number of GPUs changed, the hours are divided by time.
    """
    hours = run.recorded.get(COST_GPU_HOURS)
    if price is None or hours is None:
        return None
    held_s = sum(run.recorded.get(f"{RUN_GROUP}{k}_s", 0.0) for k in SHOWN if k not in UNPAID)
    return price * hours * seconds / held_s if held_s and kind not in UNPAID else 0.0
