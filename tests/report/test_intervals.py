"""Intervals and tests against scipy's and published figures."""

import statistics

import numpy as np
import pytest
from scipy import stats

from vit_ray.report.statistics.intervals import of_difference, of_mean, of_share

A, B = [0.70, 0.72, 0.69, 0.75], [0.73, 0.76, 0.70, 0.80]


@pytest.mark.parametrize(("hits", "count"), [(81, 263), (0, 10), (10, 10), (9500, 10_000)])
def test_the_interval_of_a_share_is_wilsons(hits, count):
    known = stats.binomtest(hits, count).proportion_ci(method="wilson")
    found = of_share(hits / count, count)
    assert (found.low, found.high) == pytest.approx((known.low, known.high))


def test_the_interval_of_a_mean_is_students():
    known = stats.t.interval(0.95, 3, np.mean(A), stats.sem(A))
    found = of_mean(statistics.fmean(A), statistics.stdev(A), len(A))
    assert (found.low, found.high) == pytest.approx(known)


@pytest.mark.parametrize("is_paired", [True, False])
def test_differences_are_tested_as_scipy_does(is_paired):
    known = stats.ttest_rel(B, A) if is_paired else stats.ttest_ind(B, A, equal_var=False)
    found = of_difference(A, B, is_paired=is_paired)
    assert found.p == pytest.approx(known.pvalue)
    interval = known.confidence_interval(0.95)
    assert (found.estimate.low, found.estimate.high) == pytest.approx((interval.low, interval.high))


def test_the_interval_of_two_single_seeds_is_newcombes():
    """His example (method 10): 56 of 70 less 48 of 80 is 0.2, from 0.0524 to 0.3339."""
    found = of_difference([48 / 80], [56 / 70], counts=(80, 70))
    assert found.p is None
    assert (found.estimate.low, found.estimate.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_of_seeds_that_are_all_alike_the_difference_is_certain():
    assert of_difference([0.5, 0.5], [0.6, 0.6], is_paired=True).p == 0
    assert of_difference([0.5, 0.5], [0.5, 0.5], is_paired=True).p == 1


def test_without_seeds_or_test_images_nothing_is_known():
    assert of_difference([0.5], [0.6]) is None
    assert of_difference([0.5], [0.6, 0.7], counts=(100, 100)) is None
