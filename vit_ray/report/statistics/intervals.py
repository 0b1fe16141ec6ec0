"""95 % intervals of accuracies and of their differences."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scipy.special import stdtr, stdtrit

from vit_ray.report.statistics.fits import Estimate

_Z: Final = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Tested:
    """A difference with its interval, and the two-sided p-value of a t test."""

    estimate: Estimate
    p: float | None
    """None for a single seed, whose interval only covers the test set."""
    error: float | None = None
    """Standard error, from the spread over seeds; None for a single seed."""


def of_share(share: float, count: int) -> Estimate:
    """Wilson's score interval (1927) of a share of this many test images."""
    z = _Z**2 / count
    middle = (share + z / 2) / (1 + z)
    half = _Z / (1 + z) * math.sqrt(share * (1 - share) / count + z / (4 * count))
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def of_mean(mean: float, deviation: float, count: int) -> Estimate:
    """Student's interval of a mean over at least two seeds with a known deviation."""
    half = float(stdtrit(count - 1, 0.975)) * deviation / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half)


def of_difference(
    a: Sequence[float],
    b: Sequence[float],
    *,
    is_paired: bool = False,
    counts: tuple[int | None, int | None] = (None, None),
) -> Tested | None:
    """Mean of B minus mean of A; None if its spread is unknown.

    Paired seeds use Student's test of their differences, others Welch's. With a single seed on a
    side the interval is that of two shares, Newcombe's (1998): it is for independent test images,
    and wider than necessary if both were tested on the same ones.

    Args:
        counts: test images of either side, if the values are shares of them.
    """
    mean = statistics.fmean(b) - statistics.fmean(a)
    if min(len(a), len(b)) < 2:
        if None in counts or max(len(a), len(b)) > 1:
            return None
        (one, other) = (of_share(v[0], count or 1) for v, count in zip((a, b), counts, strict=True))
        low = math.hypot(other.value - other.low, one.high - one.value)
        high = math.hypot(other.high - other.value, one.value - one.low)
        return Tested(Estimate(mean, mean - low, mean + high), None)
    if is_paired:
        each = [y - x for x, y in zip(a, b, strict=True)]
        error, freedom = statistics.stdev(each) / math.sqrt(len(each)), len(each) - 1.0
    else:
        parts = [statistics.variance(v) / len(v) for v in (a, b)]
        error = math.sqrt(sum(parts))
        below = sum(part**2 / (len(v) - 1) for part, v in zip(parts, (a, b), strict=True))
        freedom = sum(parts) ** 2 / below if below else 1.0
    half = stdtrit(freedom, 0.975) * error
    p = 2 * stdtr(freedom, -abs(mean) / error) if error else float(mean == 0)
    return Tested(Estimate(mean, mean - half, mean + half), float(p), error)
