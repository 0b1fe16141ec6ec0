"""Power laws with saturation, error = a C^-b + c, for points of accuracy against compute C.

For a given exponent the law is linear in a and c, so the best exponent on a grid that is refined
around it needs no starting values and has no local optimum. A bootstrap gives the intervals: laws
fitted to points that scatter around the fitted one. The width of the scatter is itself drawn from
its distribution given n points (chi-squared, n - 3 degrees of freedom), which for a straight line
gives Student's intervals: those of a law with four points are as wide as necessary. The lengths of
one model scatter together, by as much as the residuals show: they count for less than as many
different models.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CONFIDENCE: Final = 0.95
NUM_PARAMETERS: Final = 3
MIN_POINTS: Final = NUM_PARAMETERS + 1
"""Different amounts of compute: three parameters fit any three points."""
NUM_DRAWS: Final = 1000
EXPONENTS: Final = (0.01, 4.0)
"""Range of exponents that is searched; published laws of vision models are between 0.05 and 1."""
NEAR: Final = 1.1
"""Amounts of compute whose ratio is below this count as one."""
_GRID: Final = 25
_ZOOMS: Final = 4


class NoFitError(ValueError):
    """The points allow no law; the message is a sentence for the reader of a report."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; an unknown end is 0 or infinite."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PowerLaws:
    """Laws of one unit of compute: error = scale (C / unit)^-exponent + floor."""

    unit: float
    """exaFLOPs."""
    scale: Array
    exponent: Array
    floor: Array

    def taken(self, which: NDArray[np.int64]) -> "PowerLaws":
        return PowerLaws(self.unit, self.scale[which], self.exponent[which], self.floor[which])

    def error_at(self, compute: Array) -> Array:
        """Error of every law at every compute: (laws, len(compute))."""
        fall = np.power.outer(self.unit / compute, self.exponent).T
        return self.scale[:, None] * fall + self.floor[:, None]

    def compute_at(self, error: float) -> Array:
        """Compute in exaFLOPs at which each law has this error; infinite if it never has."""
        above = error - self.floor
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            needed = self.unit * (self.scale / above) ** (1 / self.exponent)
        return np.where(above > 0, needed, np.inf)


@dataclass(frozen=True)
class Fit:
    """The law of a family of models."""

    compute: Array
    """exaFLOPs of the points, ascending, each once."""
    error: Array
    """1 - accuracy of each."""
    law: PowerLaws
    """The best law alone."""
    draws: PowerLaws
    """Laws of the bootstrap."""
    scatter: Array
    """Standard deviation of points around the law, one for each draw."""

    @property
    def exponent(self) -> Estimate:
        """b; 0 and infinity: the ends of the searched range, or an error that does not fall."""
        low, high = EXPONENTS
        draws = np.where(self.draws.scale > 0, self.draws.exponent, np.nan)
        draws = np.where(draws <= 1.001 * low, 0.0, np.where(draws >= high / 1.001, np.inf, draws))
        return _estimate(float(self.law.exponent[0]), draws)

    @property
    def floor(self) -> Estimate:
        """c, the error that no compute goes below."""
        return _estimate(float(self.law.floor[0]), self.draws.floor)

    def error_at(self, compute: Array) -> Array:
        return self.law.error_at(compute)[0]

    def band(self, compute: Array) -> tuple[Array, Array]:
        """Ends of the law's 95 % interval at every compute."""
        low, high = np.quantile(self.draws.error_at(compute), _ENDS, axis=0)
        return low, high

    def predicted(self, compute: float) -> Estimate:
        """Error of one more point: the law's interval, and the scatter around it.

        A point is a mean over as many seeds as those of the fit; a single further run scatters
        more.
        """
        at = np.array([compute])
        noise = np.random.default_rng(1).standard_normal(len(self.scatter))
        # No error is below 0, or above 1.
        draws = np.clip(self.draws.error_at(at)[:, 0] + self.scatter * noise, 0.0, 1.0)
        return _estimate(float(self.error_at(at)[0]), draws)


@dataclass(frozen=True)
class HeldOut:
    """The most costly point, predicted by the law of the others."""

    compute: float
    error: float
    predicted: Estimate


@dataclass(frozen=True)
class EqualAccuracy:
    """How many times the compute of one family another needs for the same accuracy."""

    accuracy: Array
    """Over the range that both laws reach at the compute of their points."""
    ratio: Array
    low: Array
    high: Array
    typical: Estimate
    """Median over the range: near its upper end a law may not reach an accuracy at all."""


def fit_law(
    compute: Sequence[float],
    accuracy: Sequence[float],
    sizes: Sequence[str] = (),
    *,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> Fit:
    """The law of error = 1 - accuracy, by least squares.

    Nearly equal amounts of compute become one point, their mean, with the weight of a single point.

    Args:
        compute: exaFLOPs.
        accuracy: in [0, 1]; a point that is not finite or is out of range is left out.
        sizes: model of each point; empty if each has another one.

    Raises:
        NoFitError: too few points are left, or their error does not fall with compute.
    """
    x, error, models = _usable(compute, accuracy, sizes)
    if len(x) < MIN_POINTS:
        raise NoFitError(
            f"too few points for a power law with saturation, which has {NUM_PARAMETERS} "
            f"parameters: {len(x)} with different amounts of compute, needed are {MIN_POINTS}"
        )
    unit = float(np.exp(np.log(x).mean()))
    law = _least_squares(x, error[None], unit)
    if not law.scale[0] > 0:
        raise NoFitError(f"the error of these {len(x)} points does not fall with compute")
    fitted = law.error_at(x)[0]
    rng = np.random.default_rng(seed)
    shared = _shared_part(error - fitted, models)
    counts = np.bincount(models)
    independent = len(x) / (1 + shared * ((counts**2).sum() / len(x) - 1))
    freedom = max(1.0, independent - NUM_PARAMETERS)
    # A law follows the models, too: their common scatter loses as many degrees of freedom.
    left = len(x) * max(1, len(counts) - NUM_PARAMETERS) / len(counts)
    expected = (1 - shared) * (len(x) - NUM_PARAMETERS) + shared * left
    variance = float(((error - fitted) ** 2).sum()) / expected
    scatter = np.sqrt(variance * freedom / rng.chisquare(freedom, num_draws))
    noise = rng.standard_normal((num_draws, len(x)))
    common = rng.standard_normal((num_draws, len(counts)))[:, models]
    noise = np.sqrt(1 - shared) * noise + np.sqrt(shared) * common
    drawn = fitted + scatter[:, None] * noise
    return Fit(x, error, law, _least_squares(x, drawn, unit), scatter)


def predict_held_out(
    compute: Sequence[float], accuracy: Sequence[float], sizes: Sequence[str] = ()
) -> HeldOut:
    """Fit without the most costly point, and predict it.

    Raises:
        NoFitError: as `fit_law`, for the other points.
    """
    x, error, models = _usable(compute, accuracy, sizes)
    if len(x) <= MIN_POINTS:
        raise NoFitError(
            f"{len(x)} points are too few to hold one out: a law needs {MIN_POINTS} others"
        )
    others = fit_law(list(x[:-1]), list(1 - error[:-1]), [str(model) for model in models[:-1]])
    return HeldOut(float(x[-1]), float(error[-1]), others.predicted(float(x[-1])))


def compare_at_equal_accuracy(fit: Fit, other: Fit, num_accuracies: int = 33) -> EqualAccuracy:
    """Compute of `other` divided by that of `fit`, where both have points.

    Raises:
        NoFitError: no accuracy is in the range of both.
    """
    ends = [one.error_at(one.compute[[0, -1]]) for one in (fit, other)]
    high, low = min(end[0] for end in ends), max(end[1] for end in ends)
    if not low < high:
        raise NoFitError("no accuracy lies in the range of both families' points")
    errors = np.linspace(high, low, num_accuracies)
    best = np.array([_log_ratio(fit.law, other.law, error)[0] for error in errors])
    # Fits with one seed have drawn the same random numbers; their draws are paired again.
    pairs = np.random.default_rng(2).integers(len(other.scatter), size=len(fit.scatter))
    drawn = other.draws.taken(pairs)
    draws = np.array([_log_ratio(fit.draws, drawn, error) for error in errors])
    each = [_estimate(float(b), d) for b, d in zip(np.exp(best), np.exp(draws), strict=True)]
    ratio, lows, highs = (
        np.array([getattr(e, end) for e in each]) for end in ("value", "low", "high")
    )
    typical = _estimate(float(np.exp(np.median(best))), np.exp(np.median(draws, axis=0)))
    return EqualAccuracy(1 - errors, ratio, lows, highs, typical)


_ENDS: Final = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)


def _estimate(value: float, draws: Array) -> Estimate:
    """By percentiles; an undetermined draw counts as below one end and above the other."""
    is_silent = np.isnan(draws)
    low = np.quantile(np.where(is_silent, 0.0, draws), _ENDS[0], method="nearest")
    high = np.quantile(np.where(is_silent, np.inf, draws), _ENDS[1], method="nearest")
    return Estimate(value, float(low), float(high))


def _log_ratio(laws: PowerLaws, others: PowerLaws, error: float) -> Array:
    """Not a number if neither family ever has this error."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.log(others.compute_at(error)) - np.log(laws.compute_at(error)))


def amounts(compute: Sequence[float]) -> list[list[int]]:
    """Indices of nearly equal amounts of compute together, ascending."""
    found: list[list[int]] = []
    for index in sorted(range(len(compute)), key=lambda one: compute[one]):
        if found and compute[index] < NEAR * compute[found[-1][0]]:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def _usable(
    compute: Sequence[float], accuracy: Sequence[float], sizes: Sequence[str]
) -> tuple[Array, Array, NDArray[np.int64]]:
    """Amounts of compute, ascending, mean error and number of the model for each.

    A point of several models has its own number.
    """
    known = sizes or [str(index) for index in range(len(compute))]
    points = [
        (c, 1 - a, size)
        for c, a, size in zip(compute, accuracy, known, strict=True)
        if math.isfinite(c) and c > 0 and 0 <= a <= 1  # comparisons reject NaN
    ]
    merged = [[points[i] for i in near] for near in amounts([c for c, _, _ in points])]
    models = [" and ".join(sorted({size for _, _, size in near})) for near in merged]
    return (
        np.array([np.exp(np.mean(np.log([c for c, _, _ in near]))) for near in merged]),
        np.array([np.mean([error for _, error, _ in near]) for near in merged]),
        np.unique(models, return_inverse=True)[1] if models else np.array([], np.int64),
    )


def _shared_part(residuals: Array, models: NDArray[np.int64]) -> float:
    """Part of the variance that points of one model share (analysis of variance)."""
    counts = np.bincount(models)
    between, within = len(counts) - 1, len(residuals) - len(counts)
    if not between or not within:
        return 0.0
    means = np.bincount(models, residuals) / counts
    of_models = float((counts * (means - residuals.mean()) ** 2).sum()) / between
    of_points = float(((residuals - means[models]) ** 2).sum()) / within
    size = (len(residuals) - (counts**2).sum() / len(residuals)) / between
    total = of_models + (size - 1) * of_points
    return float(np.clip((of_models - of_points) / total, 0, 1)) if total > 0 else 0.0


def _least_squares(compute: Array, errors: Array, unit: float) -> PowerLaws:
    """The best law for each row of errors (laws, points), with scale and floor not below zero."""
    logs = np.log(compute / unit)
    ends = np.log(np.broadcast_to(EXPONENTS, (len(errors), 2)))
    for _ in range(_ZOOMS + 1):
        grid = np.linspace(ends[:, 0], ends[:, 1], _GRID, axis=1)
        squares, scale, floor = _linear_parts(np.exp(-np.exp(grid)[..., None] * logs), errors)
        best = squares.argmin(axis=1)
        rows = np.arange(len(errors))
        neighbors = np.clip([best - 1, best + 1], 0, _GRID - 1)
        chosen = grid[rows, best], scale[rows, best], floor[rows, best]
        ends = np.stack([grid[rows, neighbors[0]], grid[rows, neighbors[1]]], axis=1)
    return PowerLaws(unit, scale=chosen[1], exponent=np.exp(chosen[0]), floor=chosen[2])


def _linear_parts(falls: Array, errors: Array) -> tuple[Array, Array, Array]:
    """Squares, scale and floor (laws, exponents) for `falls` (laws, exponents, points)."""
    y = errors[:, None, :]
    fall_mean, mean = falls.mean(axis=-1), y.mean(axis=-1)
    spread = ((falls - fall_mean[..., None]) ** 2).sum(axis=-1)
    scale = ((falls - fall_mean[..., None]) * y).sum(axis=-1) / spread
    floor = mean - scale * fall_mean
    through_zero = (falls * y).sum(axis=-1) / (falls**2).sum(axis=-1)
    scale, floor = np.where(floor < 0, through_zero, scale), np.maximum(floor, 0)
    rises = scale <= 0
    scale, floor = np.where(rises, 0, scale), np.where(rises, np.maximum(mean, 0), floor)
    squares = ((y - scale[..., None] * falls - floor[..., None]) ** 2).sum(axis=-1)
    return squares, scale, floor
