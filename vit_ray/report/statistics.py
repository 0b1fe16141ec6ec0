"""95 % intervals and power laws by scipy, and when the data allow no statement."""

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
# Bounds of log scale, exponent and floor of a law.
_BOUNDS: Final = ([-30.0, 0.02, 0.0], [30.0, 3.0, 1.0])
# Differences of accuracies below this are rounding.
_EQUAL: Final = 1e-12

Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(accuracy: float, count: float) -> Interval:
    """Wilson's interval of an accuracy on this many test images."""
    test = stats.binomtest(round(accuracy * count), int(count))
    return Interval(accuracy, *map(float, test.proportion_ci(method="wilson")))


def student(values: Sequence[float]) -> Interval | None:
    """Student's interval of a mean over seeds; None for too few or equal values."""
    if len(values) - 1 < LEAST_FREEDOM or np.ptp(values) < _EQUAL:
        return None
    ends = stats.ttest_1samp(values, 0.0).confidence_interval()
    return Interval(float(np.mean(values)), float(ends.low), float(ends.high))


class Difference(NamedTuple):
    """Mean of B minus mean of A with its 95 % interval over seeds, or why there is no verdict."""

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
    a: Mapping[str, float], b: Mapping[str, float], num_images: float | None = None
) -> Difference:
    """The difference of two sets of accuracies by seed, B minus A.

    The test is Student's of pairs if the seeds are the same, else Welch's.

    Args:
        num_images: of the test set; None if unknown.
    """
    is_paired = a.keys() == b.keys()
    values_a = np.array([*a.values()])
    values_b = np.array([b[seed] for seed in (a if is_paired else b)])
    value = float(values_b.mean() - values_a.mean())
    if num_images and num_images > 0:
        interval = wilson(float(np.mean([*values_a, *values_b])), num_images)
        if abs(value) < (interval.high - interval.low) / 2:
            return Difference(value, "less than the binomial error of the test images")
    if min(len(values_a), len(values_b)) < 2:
        return Difference(value, "one seed")
    spread = np.ptp(values_b - values_a) if is_paired else np.ptp(values_a) + np.ptp(values_b)
    if spread < _EQUAL:
        return Difference(value, "the interval has no width")
    paired = stats.ttest_rel(values_b, values_a) if is_paired else None
    test = paired or stats.ttest_ind(values_b, values_a, equal_var=False)
    doubt = "too few seeds" if test.df < LEAST_FREEDOM else ""
    ends = test.confidence_interval()
    return Difference(value, doubt, float(ends.low), float(ends.high), float(test.pvalue))


class Law(NamedTuple):
    """error = scale x compute^-exponent + floor, with compute in exaFLOPs.

    Attributes:
        min_compute: of the fitted points.
        max_compute: of the fitted points.
    """

    scale: float
    exponent: float
    floor: float
    min_compute: float
    max_compute: float

    def error_at(self, compute: float | Array) -> Array:
        return np.asarray(self.scale * compute**-self.exponent + self.floor)

    def compute_at(self, error: Array) -> Array:
        return np.asarray(((error - self.floor) / self.scale) ** (-1 / self.exponent))


def fit_law(compute: "pd.Series[float]", errors: "pd.Series[float]") -> Law | None:
    """Least squares; None for too few amounts of compute, or if the error does not fall."""
    logs, y = np.log(compute.to_numpy(float)), errors.to_numpy(float)
    if len({*logs.round(1)}) < MIN_AMOUNTS or np.polyfit(logs, y, 1)[0] >= 0:
        return None
    middle = float(logs.mean())

    def residuals(law: Array) -> Array:
        return np.asarray(np.exp(law[0] - law[1] * (logs - middle)) + law[2] - y)

    fitted = least_squares(residuals, (np.log(y.mean()), 0.3, 0.0), bounds=_BOUNDS)
    height, exponent, floor = map(float, fitted.x)
    scale = float(np.exp(height + exponent * middle))
    return Law(scale, exponent, floor, float(compute.min()), float(compute.max()))


class EqualAccuracy(NamedTuple):
    """Compute of one family over that of another at the same accuracy.

    Attributes:
        ratio: the median over accuracies.
        low: the lowest of these accuracies.
        high: the highest.
        interval: of the ratio over seeds; None if the points do not determine it.
    """

    ratio: float
    low: float
    high: float
    interval: Interval | None


class FamilyLaw(NamedTuple):
    """The law of a family's means, and a law for each seed that all points of the family have.

    Attributes:
        equal: compute over that of the family that others are compared with.
    """

    law: Law | None
    by_seed: Mapping[str, Law]
    num_points: int
    equal: EqualAccuracy | None = None


def law_of(runs: pd.DataFrame, accuracy: str) -> FamilyLaw:
    """The laws of one family's runs, which differ in size, length and seed."""
    table = runs.assign(error=1 - runs[accuracy])
    means = table.groupby("group", sort=False)[["exaflops", "error"]].mean()
    seeds = {
        str(seed): fit_law(points["exaflops"], points["error"])
        for seed, points in table.groupby("seed", sort=False)
        if {*points["group"]} == {*means.index}
    }
    by_seed = {seed: law for seed, law in seeds.items() if law}
    return FamilyLaw(fit_law(means["exaflops"], means["error"]), by_seed, len(means))


def equal_accuracy(base: FamilyLaw, other: FamilyLaw) -> EqualAccuracy | None:
    """None if no accuracy lies in the range of both families' laws."""
    if base.law is None or other.law is None:
        return None
    laws = base.law, other.law
    worst = min(float(law.error_at(law.min_compute)) for law in laws)
    best = max(float(law.error_at(law.max_compute)) for law in laws)
    if best >= worst:
        return None
    errors = np.linspace(worst, best, 50)

    def log_ratio(law: Law, other_law: Law) -> float:
        with np.errstate(invalid="ignore", divide="ignore"):
            logs = np.log(other_law.compute_at(errors)) - np.log(law.compute_at(errors))
        return float(np.median(logs))

    seeds = [seed for seed in base.by_seed if seed in other.by_seed]
    log_ratios = [log_ratio(base.by_seed[seed], other.by_seed[seed]) for seed in seeds]
    log_interval = student(log_ratios) if np.isfinite(log_ratios).all() else None
    interval = Interval(*map(float, np.exp(log_interval))) if log_interval else None
    ratio = float(np.exp(log_ratio(base.law, other.law)))
    return EqualAccuracy(ratio, 1 - worst, 1 - best, interval)
