"""Power laws on the page: curves with bands, exponents, and compute at equal accuracy.

Fitted are the finished trainings on the most training images that any of the runs had, since at a
given compute fewer images cost accuracy; each family of models has a law of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from vit_ray.report.charts import Axis, Chart, Point, Series
from vit_ray.report.figures import (
    EXAFLOPS,
    FAMILIES,
    accuracies_of,
    accuracy_name,
    is_tested,
    title_of,
)
from vit_ray.report.fits import (
    EqualAccuracy,
    Estimate,
    Fit,
    HeldOut,
    NoFitError,
    compare_at_equal_accuracy,
    fit_law,
    predict_held_out,
)
from vit_ray.report.runs import RecordedRun
from vit_ray.report.tables import Column, Table, Value, number, percent

_CURVE_POINTS: Final = 60
_UNKNOWN: Final[list[Value]] = [None]
_COMPUTE: Final = "study/exaflops"
_IMAGES: Final = "study/train_images"
MIN_AMOUNTS: Final = 3
"""Different amounts of compute from which on a reader may expect laws: not of a sweep's trials."""
BASELINE: Final = "ViT"
"""The family that others are compared with, as in the paper."""


@dataclass(frozen=True)
class FamilyLaws:
    """The laws of every family for one accuracy."""

    key: str
    runs: dict[str, list[RecordedRun]]
    """Runs of each family that has any."""
    fits: dict[str, Fit]
    unfitted: dict[str, str]
    """Why the others have none."""

    @property
    def num_amounts(self) -> int:
        """Different amounts of compute of all families."""
        return len({run.metrics[_COMPUTE] for runs in self.runs.values() for run in runs})

    @property
    def name(self) -> str:
        """What a person calls the accuracy."""
        return title_of(self.key)

    @cached_property
    def compared(self) -> dict[str, EqualAccuracy | str]:
        """Compute of each other family over that of `BASELINE`, or why that is not known."""
        if BASELINE not in self.runs:
            return {}
        return {family: self._compared(family) for family in self.runs if family != BASELINE}

    def _compared(self, family: str) -> EqualAccuracy | str:
        for one in (BASELINE, family):
            if one not in self.fits:
                return f"{one} has no law"
        try:
            return compare_at_equal_accuracy(self.fits[BASELINE], self.fits[family])
        except NoFitError as error:
            return str(error)

    def held_out(self, family: str) -> HeldOut | str:
        """The most costly point of a family as its others predict it, or why they do not."""
        try:
            return predict_held_out(*_points(self.runs[family], self.key))
        except NoFitError as error:
            return str(error)


def laws_of(runs: Sequence[RecordedRun]) -> list[FamilyLaws]:
    """For few-shot accuracy, top-1 and the mean of transfers; none where compute hardly varies."""
    found = [_laws(runs, key) for key in accuracies_of(runs)[:3]]
    return [one for one in found if one.num_amounts >= MIN_AMOUNTS]


def fit_charts(laws: Sequence[FamilyLaws]) -> list[Chart]:
    """The law of each family with its band, and the compute at equal accuracy."""
    charts = [chart for one in laws if one.fits for chart in (_curves(one), _ratios(one))]
    return [chart for chart in charts if not chart.is_empty]


def fit_tables(laws: Sequence[FamilyLaws]) -> list[Table]:
    """Parameters of the laws, and compute at equal accuracy, as far as there is anything to say."""
    tables = [_parameter_table(laws), _ratio_table(laws)]
    return [table.used() for table in tables if table.rows]


def _parameter_table(laws: Sequence[FamilyLaws]) -> Table:
    """Exponents with intervals, and the most costly point as the others predict it."""
    columns = [
        Column("accuracy"), Column("family"), Column("points", number),
        Column("exponent b", number), Column("b from", number), Column("b to"),
        Column("error floor c %", percent), Column("c from %", percent), Column("c to %", percent),
        Column("held out: error %", percent), Column("predicted %", percent),
        Column("predicted from %", percent), Column("predicted to %", percent),
        Column("not known because"),
    ]  # fmt: skip
    rows = [_parameters(one, family) for one in laws for family in one.runs]
    return Table("Power laws: error = a C^-b + c, 95 % intervals", columns, rows)


def _ratio_table(laws: Sequence[FamilyLaws]) -> Table:
    columns = [
        Column("accuracy"), Column("family"), Column(f"compute / compute of {BASELINE}", number),
        Column("from"), Column("to"), Column("over accuracies from %", percent),
        Column("over accuracies to %", percent), Column("not known because"),
    ]  # fmt: skip
    rows = [
        [one.name, family, *_ratio_values(equal)]
        for one in laws
        for family, equal in one.compared.items()
    ]
    return Table(
        f"Compute at equal accuracy, over that of {BASELINE}: median over a range of accuracies, "
        "95 % intervals",
        columns,
        rows,
    )


def fit_sentences(laws: Sequence[FamilyLaws]) -> list[str]:
    """What the laws say, and why a family has none."""
    told = []
    for one in laws:
        for family, equal in one.compared.items():
            if isinstance(equal, EqualAccuracy):
                told.append(
                    f"{one.name}: for the same accuracy {family} needs {_times(equal.typical)} the "
                    f"compute of {BASELINE} (median over {percent(equal.accuracy[0])} to "
                    f"{percent(equal.accuracy[-1])} %)."
                )
            elif {family, BASELINE} <= one.fits.keys():
                told.append(f"{one.name}, {family} against {BASELINE}: {equal}.")
        told += [f"{one.name}, {family}: {why}." for family, why in one.unfitted.items()]
    return told


def _laws(runs: Sequence[RecordedRun], key: str) -> FamilyLaws:
    held = [
        run
        for run in runs
        if {key, _COMPUTE} <= run.metrics.keys()
        and run.status == "FINISHED"
        and is_tested(run, key)
    ]
    most = max((run.metrics.get(_IMAGES, 0.0) for run in held), default=0.0)
    by_family: dict[str, list[RecordedRun]] = {}
    for run in held:
        if run.metrics.get(_IMAGES, 0.0) == most:
            by_family.setdefault(run.family, []).append(run)
    fits, unfitted = {}, {}
    for family, members in by_family.items():
        try:
            fits[family] = fit_law(*_points(members, key))
        except NoFitError as error:
            unfitted[family] = str(error)
    return FamilyLaws(key, by_family, fits, unfitted)


def _points(runs: Sequence[RecordedRun], key: str) -> tuple[list[float], list[float]]:
    return [run.metrics[_COMPUTE] for run in runs], [run.metrics[key] for run in runs]


def _curves(one: FamilyLaws) -> Chart:
    accuracy = Axis(accuracy_name(one.key), is_percent=True)
    series = []
    for family, runs in one.runs.items():
        marks = [Point(run.metrics[_COMPUTE], run.metrics[one.key], run.name) for run in runs]
        series.append(Series(family, marks, has_line=False))
        if family in one.fits:
            series.append(_curve(family, one.fits[family]))
    note = "Lines: error = a C^-b + c, fitted to each family; bands: 95 % by bootstrap."
    return Chart(f"{one.name}: fitted power laws", EXAFLOPS, accuracy, series, note, FAMILIES)


def _curve(family: str, fit: Fit) -> Series:
    compute = np.geomspace(fit.compute[0], 2 * fit.compute[-1], _CURVE_POINTS)
    low, high = fit.band(compute)
    rows = zip(compute, fit.error_at(compute), high, low, strict=True)
    points = [
        Point(float(c), float(1 - e), f"{family}, fitted", float(1 - above), float(1 - below))
        for c, e, above, below in rows
    ]
    return Series(f"{family}, fitted", points, group=family, has_markers=False)


def _ratios(one: FamilyLaws) -> Chart:
    series = []
    for family, equal in one.compared.items():
        if isinstance(equal, str):
            continue
        rows = zip(equal.accuracy, equal.ratio, equal.low, equal.high, strict=True)
        points = [
            Point(float(x), float(ratio), low=float(low), high=float(high))
            for x, ratio, low, high in rows
            if math.isfinite(ratio + high) and low > 0
        ]
        series.append(Series(family, points, has_markers=False))
    note = (
        f"Above 1, {BASELINE} needs less. The bands are 95 % by bootstrap of both laws; where an "
        "end of one is not known, nothing is drawn."
    )
    return Chart(
        f"{one.name}: compute at equal accuracy, over that of {BASELINE}",
        Axis(accuracy_name(one.key), is_percent=True),
        Axis(f"compute / compute of {BASELINE} (log scale)", is_log=True),
        series,
        note,
        FAMILIES,
    )


def _parameters(one: FamilyLaws, family: str) -> list[Value]:
    amounts = float(len({run.metrics[_COMPUTE] for run in one.runs[family]}))
    if family in one.unfitted:
        return [one.name, family, amounts, *_UNKNOWN * 10, one.unfitted[family]]
    fit, held = one.fits[family], one.held_out(family)
    b, c = fit.exponent, fit.floor
    law: list[Value] = [b.value, b.low, _high(b), c.value, c.low, min(c.high, 1.0)]
    if isinstance(held, str):
        return [one.name, family, amounts, *law, *_UNKNOWN * 4, held]
    told = held.predicted
    return [one.name, family, amounts, *law, held.error, told.value, told.low, told.high, None]


def _ratio_values(equal: EqualAccuracy | str) -> list[Value]:
    if isinstance(equal, str):
        return [*_UNKNOWN * 5, equal]
    ratio = equal.typical
    low = number(ratio.low) if ratio.low > 0 else "not known"
    ends = float(equal.accuracy[0]), float(equal.accuracy[-1])
    return [ratio.value, low, _high(ratio), *ends, None]


def _high(known: Estimate) -> str:
    return number(known.high) if math.isfinite(known.high) else "not known"


def _times(ratio: Estimate) -> str:
    low = number(ratio.low) if ratio.low > 0 else "any number"
    high = number(ratio.high) if math.isfinite(ratio.high) else "any number"
    return f"{number(ratio.value)} times (95 %: {low} to {high})"
