"""Intervals as scipy has them, when nothing can be said, and laws with known exponents."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from vit_ray.report.statistics import (
    Difference,
    FamilyLaw,
    Law,
    difference,
    equal_accuracy,
    fit_law,
    law_of,
    student,
    wilson,
)


def seeds(*values: float) -> dict[str, float]:
    return {str(number): value for number, value in enumerate(values)}


@pytest.mark.parametrize(("hits", "images"), [(0, 10), (8, 10), (276, 300), (10_000, 10_000)])
def test_wilsons_interval_contains_exactly_the_shares_that_a_score_test_accepts(hits, images):
    found = wilson(hits / images, images)
    z = stats.norm.ppf(0.975)
    for end in (found.low, found.high):
        if 0 < end < 1:  # at each end the observed share is z standard errors away
            error = math.sqrt(end * (1 - end) / images)
            assert abs(hits / images - end) / error == pytest.approx(z)
    same = stats.binomtest(hits, images).proportion_ci(method="wilson")
    assert found[1:] == pytest.approx((same.low, same.high))


def test_a_mean_has_students_interval_from_three_seeds_on():
    values = [0.9, 0.91, 0.895, 0.92]
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert student(values) == pytest.approx((np.mean(values), low, high))
    assert student(values[:2]) is None
    assert student([0.9, 0.9, 0.9]) is None


def test_equal_seeds_are_paired_as_scipy_does():
    a, b = seeds(0.50, 0.55, 0.60), seeds(0.52, 0.58, 0.61)
    theirs = stats.ttest_rel([*b.values()], [*a.values()])
    found, ends = difference(a, b), theirs.confidence_interval()
    assert found == pytest.approx(Difference(0.02, "", ends.low, ends.high, theirs.pvalue))
    # Seeds in another order are the same pairs.
    assert difference(a, dict(reversed(b.items()))) == pytest.approx(found)


def test_other_seeds_have_welchs_test_as_scipy_does():
    a, b = seeds(0.50, 0.55, 0.60), {"7": 0.70, "8": 0.72, "9": 0.71, "10": 0.73}
    theirs = stats.ttest_ind([*b.values()], [*a.values()], equal_var=False)
    found, ends = difference(a, b), theirs.confidence_interval()
    assert found[2:] == pytest.approx((ends.low, ends.high, theirs.pvalue))
    assert found.verdict.startswith("more than noise (95 %: ")
    assert difference(a, seeds(0.52, 0.53, 0.61)).verdict.startswith("no more than noise (95 %: ")


@pytest.mark.parametrize(
    ("a", "b", "images", "doubt"),
    [
        (seeds(0.5, 0.6), seeds(0.6, 0.7), None, "the interval has no width"),
        (seeds(0.5, 0.5, 0.5), {"8": 0.6, "9": 0.6}, None, "the interval has no width"),
        (seeds(0.5, 0.6), seeds(0.7, 0.81), None, "too few seeds"),
        (seeds(0.5), seeds(0.9), 100, "one seed"),
        (seeds(0.9, 0.901, 0.902), seeds(0.905, 0.9061, 0.9072), 1000, "less than the binomial"),
    ],
)
def test_what_cannot_be_said(a, b, images, doubt):
    found = difference(a, b, images)
    assert found.doubt.startswith(doubt)
    assert f"cannot be said ({found.doubt})" in found.verdict


def family(scale: float, floor: float = 0.05, num_seeds: int = 5) -> pd.DataFrame:
    cells = [(compute, seed) for compute in (0.01, 0.1, 1.0, 10.0) for seed in range(num_seeds)]
    table = pd.DataFrame(cells, columns=["exaflops", "seed"])
    table["group"] = table["exaflops"].astype(str)
    errors = scale * table["exaflops"] ** -0.3 * (1 + 0.01 * table["seed"]) + floor
    return table.assign(test=1 - errors, seed=table["seed"].astype(str))


def test_a_law_has_the_exponent_and_the_floor_of_its_points_in_each_seed():
    found = law_of(family(0.1), "test")
    assert found.law[:3] == pytest.approx((0.102, 0.3, 0.05), rel=1e-3)
    assert len(found.by_seed) == 5
    scales = [law.scale for law in found.by_seed.values()]
    assert scales == pytest.approx([0.1 * (1 + 0.01 * seed) for seed in range(5)], rel=1e-3)
    again = found.law.compute_at(found.law.error_at(np.array([0.5])))
    assert again == pytest.approx([0.5])


def test_compute_at_equal_accuracy_has_an_interval_over_three_seeds_or_more():
    found = equal_accuracy(law_of(family(0.1), "test"), law_of(family(0.12), "test"))
    assert found.ratio == pytest.approx(1.2 ** (1 / 0.3), rel=0.01)
    shifted = family(0.12).assign(test=lambda one: one["test"] - 0.001 * one["seed"].astype(int))
    spread = equal_accuracy(law_of(family(0.1), "test"), law_of(shifted, "test"))
    assert spread.interval.low < spread.ratio < spread.interval.high
    two = [law_of(family(scale, num_seeds=2), "test") for scale in (0.1, 0.12)]
    assert equal_accuracy(*two).interval is None


def test_without_a_law_or_a_shared_accuracy_there_is_no_ratio():
    assert fit_law(pd.Series([1.0, 1.01, 2.0]), pd.Series([0.3, 0.29, 0.2])) is None
    assert fit_law(pd.Series([1.0, 10.0, 100.0]), pd.Series([0.2, 0.25, 0.3])) is None
    good, bad = Law(0.1, 0.3, 0.0, 1.0, 2.0), Law(0.1, 0.3, 0.0, 0.01, 0.02)
    assert equal_accuracy(FamilyLaw(good, {}, 3), FamilyLaw(bad, {}, 3)) is None
    assert equal_accuracy(FamilyLaw(None, {}, 3), FamilyLaw(bad, {}, 3)) is None
