"""Power laws on the page: curves with bands, exponents, and compute at equal accuracy.

A law is for models of one family that differ only in size and length, trained and tested on the
same sets, with their own learning rate and warm-up. Laws are fitted to means over seeds of the
finished trainings on the largest number of training images among the runs, since at equal compute
fewer images cost accuracy. The page says which trainings are left out.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from vit_ray.config.resume_compatibility import LENGTH
from vit_ray.report.figures.chart_list import EXAFLOPS
from vit_ray.report.figures.charts import Axis, Chart, Point, Series
from vit_ray.report.runs import IMAGES_KEY, RecordedRun
from vit_ray.report.statistics.accuracies import (
    BASELINE,
    accuracies_of,
    accuracy_name,
    by_sets,
    cost_of,
    title_of,
)
from vit_ray.report.statistics.fits import (
    EqualAccuracy,
    Fit,
    NoFitError,
    amounts,
    compare_at_equal_accuracy,
    fit_law,
    predict_held_out,
)
from vit_ray.report.statistics.groups import EXAFLOPS as UNKNOWN_LENGTH
from vit_ray.report.statistics.groups import Group, differences
from vit_ray.report.statistics.seeds import by_group
from vit_ray.report.tables import Column, Table, Value, number, percent

LEVELS: Final = 5
"""Accuracies at which the table has a ratio of compute."""
_CURVE_POINTS: Final = 60
MIN_AMOUNTS: Final = 3
"""From this many amounts of compute on a reader may expect laws: not for a sweep's trials."""
UNKNOWN: Final = "not known"


SIZES: Final = (
    "model.name", "model.depth", "model.width", "model.mlp_dim", "model.num_heads",
    "model.patch_size", "model.stages", "model.width_factor",
)  # fmt: skip
"""Keys of a model's size, along which a law varies."""
_LENGTHS: Final = (*LENGTH, UNKNOWN_LENGTH)
_OWN: Final = ("optim.learning_rate", "optim.warmup_steps")
"""Keys that may have another value for each size or length."""


class Points(NamedTuple):
    """The points of a law: means over seeds, each for a model of one size and length."""

    compute: list[float]
    """exaFLOPs."""
    accuracy: list[float]
    sizes: list[str]
    """Name of each model's size."""


@dataclass(frozen=True)
class FamilyLaws:
    """The laws for one accuracy on one training and test set."""

    key: str
    whose: str
    """The sets, if there are laws for several."""
    runs: dict[str, list[RecordedRun]]
    """Runs of each law, by its name: the family, and how it differs from others of the family."""
    points: dict[str, Points]
    fits: dict[str, Fit]
    unfitted: dict[str, str]
    """Why the other families have none."""
    left_out: str
    """Trainings that no law includes; empty if none are left out."""

    @property
    def name(self) -> str:
        return title_of(self.key) + self.whose

    @cached_property
    def compared(self) -> dict[str, EqualAccuracy | str]:
        """Compute of each other family's laws over that of `BASELINE`, or why it is not known."""
        baselines = [law for law, runs in self.runs.items() if runs[0].family == BASELINE]
        fitted = [one for one in baselines if one in self.fits]
        found: dict[str, EqualAccuracy | str] = {}
        for law in self.runs.keys() - {*baselines} if baselines else ():
            if len(fitted) != 1:
                found[law] = f"{BASELINE} has {len(fitted) or 'no'} law{'s' * (len(fitted) > 1)}"
            elif law not in self.fits:
                found[law] = f"{law} has no law"
            else:
                try:
                    found[law] = compare_at_equal_accuracy(self.fits[fitted[0]], self.fits[law])
                except NoFitError as error:
                    found[law] = str(error)
        return {law: found[law] for law in self.runs if law in found}


def laws_of(runs: Sequence[RecordedRun]) -> list[FamilyLaws]:
    """For few-shot accuracy, top-1 and the mean of transfers; empty if compute hardly varies."""
    found = [
        _laws(members, key, whose)
        for key in accuracies_of(runs)[:3]
        for whose, members in by_sets(runs, key)
    ]
    return [
        one
        for one in found
        if len(amounts([c for law in one.points.values() for c in law.compute])) >= MIN_AMOUNTS
    ]


def fit_charts(laws: Sequence[FamilyLaws]) -> list[Chart]:
    """The law of each family with its band, and the compute at equal accuracy."""
    return [
        chart for one in laws if one.fits for chart in (_curves(one), _ratios(one)) if chart.rows
    ]


def fit_tables(laws: Sequence[FamilyLaws]) -> list[Table]:
    """Parameters of the laws, and compute at equal accuracy, if known."""
    parameters: list[list[Value]] = []
    ratios: list[list[Value]] = []
    levels: list[list[Value]] = []
    for one in laws:
        for law, points in one.points.items():
            values: list[Value] = [None] * 10
            why: str | None = one.unfitted.get(law)
            if fit := one.fits.get(law):
                b, c = fit.exponent, fit.floor
                values[:6] = b.value, b.low, _end(b.high), c.value, c.low, min(c.high, 1.0)
                try:
                    held = predict_held_out(*points)
                    guess = held.predicted
                    values[6:] = held.error, guess.value, guess.low, guess.high
                except NoFitError as error:
                    why = str(error)
            amount = float(len(amounts(points.compute)))
            parameters.append([one.name, law, amount, *values, why])
        for law, equal in one.compared.items():
            if isinstance(equal, str):
                ratios.append([one.name, law, *[None] * 5, equal])
            else:
                typical, ends = equal.typical, (float(equal.accuracy[0]), float(equal.accuracy[-1]))
                interval = _end(typical.low), _end(typical.high)
                ratios.append([one.name, law, typical.value, *interval, *ends, None])
                for at in np.linspace(0, len(equal.accuracy) - 1, LEVELS).round().astype(int):
                    low, high = float(equal.low[at]), float(equal.high[at])
                    shown = float(equal.accuracy[at]), float(equal.ratio[at])
                    levels.append([one.name, law, *shown, _end(low), _end(high)])
    of_laws = [
        Column("accuracy"), Column("family"), Column("points", number),
        Column("exponent b", number), Column("b from", number), Column("b to"),
        Column("error floor c %", percent), Column("c from %", percent), Column("c to %", percent),
        Column("held out: error %", percent), Column("predicted %", percent),
        Column("predicted from %", percent), Column("predicted to %", percent),
        Column("unknown because"),
    ]  # fmt: skip
    of_ratios = [
        Column("accuracy"), Column("family"), Column(f"compute / compute of {BASELINE}", number),
        Column("from"), Column("to"), Column("over accuracies from %", percent),
        Column("over accuracies to %", percent), Column("unknown because"),
    ]  # fmt: skip
    of_levels = [
        Column("accuracy"), Column("family"), Column("at %", percent),
        Column(f"compute / compute of {BASELINE}", number), Column("from"), Column("to"),
    ]  # fmt: skip
    title = f"Compute at equal accuracy, over that of {BASELINE}"
    tables = [
        Table("Power laws: error = a C^-b + c, 95 % intervals", of_laws, parameters),
        Table(f"{title}: median over a range of accuracies, 95 % intervals", of_ratios, ratios),
        Table(f"{title}: at some accuracies, 95 % intervals", of_levels, levels),
    ]
    return [table.used() for table in tables if table.rows]


def fit_sentences(laws: Sequence[FamilyLaws]) -> list[str]:
    """Sentences on what the laws show, and which trainings no law includes."""
    found = []
    for one in laws:
        for family, equal in one.compared.items():
            if isinstance(equal, EqualAccuracy):
                found.append(f"{one.name}: {_ratio_sentence(family, equal)}")
            elif family in one.fits:
                found.append(f"{one.name}, {family} against {BASELINE}: {equal}.")
        if one.left_out and one.fits:
            found.append(f"{one.name}: trainings left out of the laws: {one.left_out}.")
    return found


def _ratio_sentence(family: str, equal: EqualAccuracy) -> str:
    """In two digits; only the fitted laws if they have no interval."""
    low, high = (percent(end) for end in equal.accuracy[[0, -1]])
    first, last = (two_digits(end) for end in equal.ratio[[0, -1]])
    whole, median = f"{low} to {high} %", two_digits(equal.typical.value)
    if not math.isfinite(equal.typical.low + equal.typical.high):
        return (
            f"these points do not determine how much compute {family} needs for the same accuracy; "
            f"by the fitted laws it is {first} times that of {BASELINE} at {low} % and {last} "
            f"times at {high} %."
        )
    ends = f"{two_digits(equal.typical.low)} to {two_digits(equal.typical.high)}"
    return (
        f"for the same accuracy {family} needs {median} times the compute of {BASELINE} (95 %: "
        f"{ends}), in the median over {whole}: {first} times at {low} %, {last} at {high} %."
    )


def two_digits(value: float) -> str:
    """As many digits as a ratio of laws is known to."""
    return f"{float(f'{value:.2g}'):,.12g}"


def _laws(runs: Sequence[RecordedRun], key: str, whose: str) -> FamilyLaws:
    known = [run for run in runs if cost_of(run, key) is not None]
    whole = [run for run in known if run.status == "FINISHED" and run.is_tested(key)]
    most = max((run.metrics.get(IMAGES_KEY, 0.0) for run in whole), default=0.0)
    held = [run for run in whole if run.metrics.get(IMAGES_KEY, 0.0) == most]
    members, points, fits, unfitted = {}, {}, {}, {}
    for law, groups in _by_law(held).items():
        members[law] = [run for one in groups for run in one]
        points[law] = Points(
            [statistics.fmean(c for run in one if (c := cost_of(run, key))) for one in groups],
            [statistics.fmean(run.metrics[key] for run in one) for one in groups],
            [repr(sorted(one[0].group.only(SIZES.__contains__).items)) for one in groups],
        )
        try:
            fits[law] = fit_law(*points[law])
        except NoFitError as error:
            unfitted[law] = str(error)
    reasons = {
        f"trained on fewer than {number(most)} images": len(whole) - len(held),
        "not finished": sum(run.status != "FINISHED" for run in known),
        "measured on held-out images": sum(not run.is_tested(key) for run in known),
        "of unknown compute": len(runs) - len(known),
    }
    found = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    return FamilyLaws(key, whose, members, points, fits, unfitted, found)


def _by_law(runs: Sequence[RecordedRun]) -> dict[str, list[list[RecordedRun]]]:
    """Groups of each law by its name: no two in a law have the same size and length."""
    laws: dict[tuple[str, Group], dict[Group, list[RecordedRun]]] = {}
    for group, members in by_group(runs).items():
        law = members[0].family, group.without(*SIZES, *_LENGTHS, *_OWN)
        laws.setdefault(law, {})[group] = members
    apart: dict[tuple[str, Group], list[list[RecordedRun]]] = {}
    for (family, _), groups in laws.items():
        is_one = len({group.without(*_OWN) for group in groups}) == len(groups)
        kept = (*SIZES, *_LENGTHS, *(_OWN if is_one else ()))
        for group, members in groups.items():
            apart.setdefault((family, group.without(*kept)), []).append(members)
    named: dict[str, list[list[RecordedRun]]] = {}
    families = {family for family, _ in apart}
    others = {its: differences([one for f, one in apart if f == its]) for its in families}
    for (family, rest), all_members in apart.items():
        other = others[family][rest]
        named[f"{family}, differs in {other}" if other else family] = all_members
    return named


def _curves(one: FamilyLaws) -> Chart:
    accuracy = Axis(accuracy_name(one.key), is_percent=True)
    series = []
    for law, runs in one.runs.items():
        marks = [
            Point(cost, run.metrics[one.key], run.name, details={"seed": " of ".join(run.seed)})
            for run in runs
            if (cost := cost_of(run, one.key)) is not None
        ]
        series.append(Series(law, marks, runs[0].family, has_line=False))
        if fit := one.fits.get(law):
            compute = np.geomspace(fit.compute[0], 2 * fit.compute[-1], _CURVE_POINTS)
            errors = np.stack([compute, fit.error_at(compute), *fit.band(compute)], axis=1)
            name = f"{law}, fitted"
            points = [
                Point(c, 1 - error, name, max(0.0, 1 - high), min(1.0, 1 - low))
                for c, error, low, high in errors.tolist()
            ]
            series.append(Series(name, points, runs[0].family, has_markers=False))
    note = "Lines: error = a C^-b + c, fitted to each family; bands: 95 % by bootstrap."
    return Chart(f"{one.name}: fitted power laws", EXAFLOPS, accuracy, series, note)


def _ratios(one: FamilyLaws) -> Chart:
    series = []
    for law, equal in one.compared.items():
        if isinstance(equal, EqualAccuracy):
            rows = np.stack([equal.accuracy, equal.ratio, equal.low, equal.high], axis=1).tolist()
            points = [
                Point(accuracy, ratio, low=low, high=high)
                for accuracy, ratio, low, high in rows
                if math.isfinite(ratio + high) and low > 0
            ]
            series.append(Series(law, points, one.runs[law][0].family, has_markers=False))
    note = (
        f"Above 1, {BASELINE} needs less. The bands are 95 % by bootstrap of both laws; no band is "
        "drawn where one end is unknown."
    )
    return Chart(
        f"{one.name}: compute at equal accuracy, over that of {BASELINE}",
        Axis(accuracy_name(one.key), is_percent=True),
        Axis(f"compute / compute of {BASELINE} (log scale)", is_log=True),
        series,
        note,
    )


def _end(value: float) -> str:
    """An end of an interval as text."""
    return number(value) if 0 < value < math.inf else UNKNOWN
