"""95 % intervals and power laws by scipy, and when nothing can be said."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import least_squares

# Fewest degrees of freedom of an interval: three seeds.
LEAST_FREEDOM: Final = 2.0
CANNOT_SAY: Final = "cannot be said"
# Amounts of compute that a law with three parameters needs.
MIN_AMOUNTS: Final = 3
# Of log scale, exponent and floor of a law.
_BOUNDS: Final = ([-30.0, 0.02, 0.0], [30.0, 3.0, 1.0])
# Differences of accuracies below this are rounding.
_EQUAL: Final = 1e-12

Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(share: float, count: float) -> Interval:
    """Wilson's interval of an accuracy on this many test images."""
    tested = stats.binomtest(round(share * count), int(count))
    return Interval(share, *map(float, tested.proportion_ci(method="wilson")))


def student(values: Sequence[float]) -> Interval | None:
    """Student's interval of a mean over seeds; None if it cannot be said."""
    if len(values) - 1 < LEAST_FREEDOM or np.ptp(values) < _EQUAL:
        return None
    ends = stats.ttest_1samp(values, 0.0).confidence_interval()
    return Interval(float(np.mean(values)), float(ends.low), float(ends.high))


class Difference(NamedTuple):
    """Mean of B minus mean of A, with its 95 % interval over seeds, or why nothing can be said."""

    value: float
    doubt: str = ""
    low: float = np.nan
    high: float = np.nan
    p: float = np.nan

    @property
    def verdict(self) -> str:
        """Whether the difference is more than noise, in words."""
        if self.doubt:
            return f"whether that is more than noise {CANNOT_SAY} ({self.doubt})"
        word = "no more than noise" if self.low <= 0 <= self.high else "more than noise"
        return f"{word} (95 %: {100 * self.low:.2f} to {100 * self.high:.2f}, p = {self.p:.2g})"


def difference(
    a: Mapping[str, float],
    b: Mapping[str, float],
    num_images: float | None = None,
    *,
    level: float | None = None,
    is_paired: bool = True,
) -> Difference:
    """Of values by seed: Student's test of the pairs if the seeds are the same, else Welch's.

    Args:
        num_images: of the test set; None if it is not known.
        level: the accuracy that has the binomial error; None = the mean of the values.
        is_paired: one seed has drawn the same on both sides, as with one model.
    """
    is_paired = is_paired and a.keys() == b.keys()
    before = np.array([*a.values()])
    after = np.array([b[seed] for seed in (a if is_paired else b)])
    value = float(after.mean() - before.mean())
    if num_images and num_images > 0:
        mean = float(np.mean([*before, *after])) if level is None else level
        tested = wilson(mean, num_images)
        if abs(value) < (tested.high - tested.low) / 2:
            return Difference(value, "less than the binomial error of the test images")
    if min(len(before), len(after)) < 2:
        return Difference(value, "one seed")
    spread = np.ptp(after - before) if is_paired else np.ptp(before) + np.ptp(after)
    if spread < _EQUAL:
        return Difference(value, "the interval has no width")
    test = stats.ttest_rel(after, before) if is_paired else None
    found = test or stats.ttest_ind(after, before, equal_var=False)
    doubt = "too few seeds" if found.df < LEAST_FREEDOM else ""
    ends = found.confidence_interval()
    return Difference(value, doubt, float(ends.low), float(ends.high), float(found.pvalue))


class Law(NamedTuple):
    """error = scale x compute^-exponent + floor, with compute in exaFLOPs; the best and the worst
    error are those at the most and the least compute of its points.
    """

    scale: float
    exponent: float
    floor: float
    best: float
    worst: float

    def error_at(self, compute: Array) -> Array:
        return np.asarray(self.scale * compute**-self.exponent + self.floor)

    def compute_at(self, error: Array) -> Array:
        return np.asarray(((error - self.floor) / self.scale) ** (-1 / self.exponent))


def fit_law(compute: "pd.Series[float]", errors: "pd.Series[float]") -> Law | None:
    """Least squares; None if there are too few amounts of compute, or the error does not fall."""
    logs, y = np.log(compute.to_numpy(float)), errors.to_numpy(float)
    if len({*logs.round(1)}) < MIN_AMOUNTS or np.polyfit(logs, y, 1)[0] >= 0:
        return None
    middle = float(logs.mean())

    def missed(law: Array) -> Array:
        return np.asarray(np.exp(law[0] - law[1] * (logs - middle)) + law[2] - y)

    fitted = least_squares(missed, (np.log(y.mean()), 0.3, 0.0), bounds=_BOUNDS)
    height, exponent, floor = map(float, fitted.x)
    best, worst = y[logs.argmax()], y[logs.argmin()]
    law = Law(float(np.exp(height + exponent * middle)), exponent, floor, best, worst)
    ends = law.error_at(np.exp([logs.max(), logs.min()]))
    return law._replace(best=float(ends[0]), worst=float(ends[1]))


class FamilyLaw(NamedTuple):
    """The law of a family's means, and one for each seed that all of its points have."""

    law: Law | None
    by_seed: Mapping[str, Law]
    num_points: int


def law_of(runs: pd.DataFrame, accuracy: str) -> FamilyLaw:
    """Of the runs of one family that differ in size, length and seed."""
    table = runs.assign(error=1 - runs[accuracy])
    means = table.groupby("group", sort=False)[["exaflops", "error"]].mean()
    seeds = {
        str(seed): fit_law(mine["exaflops"], mine["error"])
        for seed, mine in table.groupby("seed", sort=False)
        if {*mine["group"]} == {*means.index}
    }
    known = {seed: law for seed, law in seeds.items() if law}
    return FamilyLaw(fit_law(means["exaflops"], means["error"]), known, len(means))


class EqualAccuracy(NamedTuple):
    """Compute of one family over that of another at the same accuracy: the median over a range of
    accuracies, with its interval over seeds, if the points determine it.
    """

    ratio: float
    low: float
    high: float
    interval: Interval | None


def equal_accuracy(base: FamilyLaw, other: FamilyLaw) -> EqualAccuracy | None:
    """None if no accuracy lies in the range of both families' laws."""
    if base.law is None or other.law is None:
        return None
    worst = min(base.law.worst, other.law.worst)
    best = max(base.law.best, other.law.best)
    if best >= worst:
        return None
    errors = np.linspace(worst, best, 50)

    def logs(one: Law, two: Law) -> Array:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.log(two.compute_at(errors)) - np.log(one.compute_at(errors))

    seeds = [seed for seed in base.by_seed if seed in other.by_seed]
    over = [float(np.median(logs(base.by_seed[one], other.by_seed[one]))) for one in seeds]
    found = student(over) if np.isfinite(over).all() else None
    ratio = float(np.exp(np.median(logs(base.law, other.law))))
    interval = Interval(*map(float, np.exp(found))) if found else None
    return EqualAccuracy(ratio, 1 - worst, 1 - best, interval)
