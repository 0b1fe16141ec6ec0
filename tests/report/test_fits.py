"""Power laws: known ones are found, SciPy finds the same, intervals hold what they promise."""

import statistics

import numpy as np
import pytest
from scipy.optimize import least_squares

from vit_ray.report.paper import TABLE_6, TABLE_7, table_5
from vit_ray.report.statistics.fits import (
    NoFitError,
    compare_at_equal_accuracy,
    fit_law,
    predict_held_out,
)

COMPUTE = np.geomspace(50, 5000, 8)
SCALE, EXPONENT, FLOOR = 0.6, 0.4, 0.1  # at one exaFLOP


def law(compute, scale=SCALE, exponent=EXPONENT, floor=FLOOR):
    return scale * np.asarray(compute) ** -exponent + floor


def noisy(seed, sigma=0.002, **parameters):
    noise = np.random.default_rng(seed).normal(0, sigma, len(COMPUTE))
    return 1 - law(COMPUTE, **parameters) - noise


@pytest.mark.parametrize("exponent", [0.1, 0.4, 1.5])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_a_law_without_noise_is_found(exponent, floor):
    fit = fit_law(COMPUTE, 1 - law(COMPUTE, exponent=exponent, floor=floor))
    assert fit.exponent.value == pytest.approx(exponent, rel=1e-3)
    assert fit.floor.value == pytest.approx(floor, abs=1e-3)
    expected = law(1e4, exponent=exponent, floor=floor)
    assert fit.error_at(np.array([1e4])) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("seed", range(8))
def test_the_fit_is_no_worse_than_scipys_from_many_starts(seed):
    accuracy = noisy(seed, sigma=0.01)

    def residuals(p):
        return law(COMPUTE, *p) - (1 - accuracy)

    bounds = ([0, 0.01, 0], [np.inf, 4, 1])
    starts = [(0.5, b, c) for b in (0.05, 0.2, 0.5, 1.0, 2.0) for c in (0.01, 0.1, 0.15)]
    others = [least_squares(residuals, s, bounds=bounds, xtol=1e-14, ftol=1e-14) for s in starts]
    best = min(others, key=lambda result: result.cost)
    fit = fit_law(COMPUTE, accuracy)
    squares = ((fit.error_at(COMPUTE) - fit.error) ** 2).sum()
    assert squares <= 2 * best.cost * (1 + 1e-6)
    assert fit.error_at(COMPUTE) == pytest.approx(law(COMPUTE, *best.x), abs=1e-4)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("num_points", [5, 8])
def test_intervals_hold_the_truth_as_often_as_they_promise(num_points):
    """Binomial: of 120 intervals of 95 %, fewer than 106 hold it once in 1,000."""
    compute = np.geomspace(50, 5000, num_points)
    names = ("exponent", "floor", "band", "next")
    held = dict.fromkeys(names, 0)
    for seed in range(120):
        rng = np.random.default_rng(seed)
        accuracy = 1 - law(compute) - rng.normal(0, 0.004, num_points)
        fit = fit_law(compute, accuracy, num_draws=200, seed=seed)
        low, high = fit.band(np.array([500.0]))
        further = fit.predicted(2e4)
        point = law(2e4) + rng.normal(0, 0.004)
        held["exponent"] += fit.exponent.low <= EXPONENT <= fit.exponent.high
        held["floor"] += fit.floor.low <= FLOOR <= fit.floor.high
        held["band"] += bool(low <= law(500.0) <= high)
        held["next"] += further.low <= point <= further.high
    assert all(count >= 106 for count in held.values()), held


def test_seeds_of_one_amount_of_compute_count_as_their_mean():
    accuracy = noisy(0)
    spread = np.concatenate([accuracy - 0.01, accuracy + 0.01])
    again = fit_law(np.tile(COMPUTE, 2), spread)
    assert again.error == pytest.approx(1 - accuracy)
    assert again.exponent.value == pytest.approx(fit_law(COMPUTE, accuracy).exponent.value)


def test_points_that_say_nothing_are_left_out():
    x = [*COMPUTE, 100.0, np.nan, np.inf, -5.0, 0.0, 70.0, 80.0]
    y = [*noisy(0), np.nan, 0.5, 0.5, 0.5, 0.5, 1.2, -0.1]
    assert fit_law(x, y).error == pytest.approx(fit_law(COMPUTE, noisy(0)).error)


@pytest.mark.parametrize(
    ("compute", "accuracy", "told"),
    [
        ([], [], "too few points .*: 0 with different amounts"),
        ([10, 100], [0.5, 0.6], ": 2 with different amounts"),
        ([10, 100, 1000], [0.5, 0.6, 0.65], ": 3 with different amounts of compute, needed are 4"),
        ([10] * 6, [0.5, 0.6, 0.5, 0.6, 0.5, 0.6], ": 1 with different"),
        ([10, 100, 1000, np.nan], [0.5, 0.6, 0.7, 0.8], ": 3 with different"),
        ([10, 100, 1000, 10000], [0.5] * 4, "does not fall with compute"),
        ([10, 100, 1000, 10000], [0.8, 0.7, 0.6, 0.5], "does not fall with compute"),
        ([10, 100, 1000, 10000], [1.0] * 4, "does not fall with compute"),
    ],
)
def test_points_without_a_law_are_told(compute, accuracy, told):
    with pytest.raises(NoFitError, match=told):
        fit_law(compute, accuracy)


def test_accuracies_of_0_and_1_are_points_like_others():
    fit = fit_law([10, 100, 1000, 10000, 1e5], [0.0, 0.6, 0.9, 0.99, 1.0])
    assert np.isfinite(fit.error_at(COMPUTE)).all()
    assert fit.floor.value == pytest.approx(0, abs=0.02)


def test_an_exponent_that_four_scattered_points_leave_open_is_said_to_be_open():
    fit = fit_law([10, 100, 1000, 10000], [0.5, 0.62, 0.6, 0.7])
    assert fit.exponent.low == 0
    assert fit.exponent.high == np.inf


def test_the_most_costly_point_is_held_out_and_predicted():
    accuracy = noisy(3)
    held = predict_held_out(COMPUTE, accuracy)
    assert (held.compute, held.error) == (pytest.approx(5000), pytest.approx(1 - accuracy[-1]))
    assert held.predicted.low <= held.error <= held.predicted.high
    moved = predict_held_out(COMPUTE, [*accuracy[:-1], accuracy[-1] - 0.1])
    assert moved.predicted == held.predicted  # nothing of the point itself
    assert not moved.predicted.low <= moved.error <= moved.predicted.high
    with pytest.raises(NoFitError, match="4 points are too few to hold one out"):
        predict_held_out(COMPUTE[:4], accuracy[:4])


def test_compute_at_equal_accuracy_is_found_with_its_uncertainty():
    """A family that needs 3 times the compute for every error, by construction."""
    dear = 1 - law(COMPUTE / 3) - np.random.default_rng(9).normal(0, 0.002, len(COMPUTE))
    both = compare_at_equal_accuracy(fit_law(COMPUTE, noisy(1)), fit_law(COMPUTE, dear))
    assert both.typical.value == pytest.approx(3, rel=0.15)
    assert both.typical.low < 3 < both.typical.high < 4.5
    assert ((both.low < 3) & (both.high > 3)).mean() > 0.9
    other = compare_at_equal_accuracy(fit_law(COMPUTE, dear), fit_law(COMPUTE, noisy(1)))
    assert other.typical.value == pytest.approx(1 / both.typical.value)
    same = fit_law(COMPUTE, noisy(1))
    assert compare_at_equal_accuracy(same, same).typical.value == pytest.approx(1)


@pytest.mark.slow
def test_intervals_of_the_ratio_hold_the_truth_as_often_as_they_promise():
    held = 0
    for seed in range(80):
        dear = 1 - law(COMPUTE / 3) - np.random.default_rng(500 + seed).normal(0, 0.004, 8)
        fits = [fit_law(COMPUTE, y, num_draws=200, seed=seed) for y in (noisy(seed, 0.004), dear)]
        found = compare_at_equal_accuracy(*fits, num_accuracies=5).typical
        held += found.low <= 3 <= found.high
    assert held >= 69  # of 95 %, fewer once in 1,000


def test_families_without_a_common_accuracy_are_told():
    with pytest.raises(NoFitError, match="no accuracy lies in the range of both"):
        compare_at_equal_accuracy(
            fit_law(COMPUTE, noisy(0)), fit_law(COMPUTE, noisy(0, floor=0.0, scale=0.1))
        )


FIVE = ("cifar10", "cifar100", "imagenet", "flowers", "pets")
"""The tasks whose mean the paper's Table 7 has."""


def papers_vits():
    """ExaFLOPs and mean over the five tasks of the ViTs of Table 5 on JFT-300M.

    Table 5 does not say the length of each: it is that of the row of Table 6 with its ImageNet
    accuracy, which two training runs of one row differ in by less than 0.1.
    """
    rows = [row for row in TABLE_6 if row.family == "ViT"]
    points = {}
    for name in {row.name for row in rows}:
        by_task = {task: table_5(name, "jft300m", task) for task in FIVE}
        near = [r for r in rows if r.name == name and abs(r.imagenet - by_task["imagenet"]) < 1e-3]
        (row,) = near
        points[row.exaflops] = statistics.fmean(by_task.values())
    return points


def test_vit_needs_two_to_four_times_less_compute_than_resnet_as_the_paper_says():
    """R152x2 is the ResNet whose mean over five tasks the paper prints, in its Table 7."""
    points = papers_vits()
    assert len(points) == 5
    vit = fit_law([*points], [*points.values()])
    mean = {name: adam / 100 for name, adam, _ in TABLE_7}["R152x2"]
    spent = next(r.exaflops for r in TABLE_6 if (r.name, r.epochs) == ("R152x2", 7))
    ratio = spent / vit.law.compute_at(1 - mean)[0]
    low, high = spent / np.quantile(vit.draws.compute_at(1 - mean), [0.975, 0.025])
    assert 2 < ratio < 4
    assert 1 < low < ratio < high < 8


def test_on_imagenet_alone_the_papers_points_give_a_smaller_advantage():
    families = {
        family: [row for row in TABLE_6 if row.family == family] for family in ("ViT", "ResNet")
    }
    fits = {
        family: fit_law([row.exaflops for row in rows], [row.imagenet for row in rows])
        for family, rows in families.items()
    }
    assert 1.2 < compare_at_equal_accuracy(fits["ViT"], fits["ResNet"]).typical.value < 3


def by_sizes(seed, num_sizes=6, num_lengths=3, sigma_of_sizes=0.006, sigma=0.002):
    """Points of lengths of models, each of which lies off the law by an amount of its own."""
    rng = np.random.default_rng(seed)
    points = []
    for size in range(num_sizes):
        off = rng.normal(0, sigma_of_sizes)
        for length in range(num_lengths):
            compute = 50 * 4**size * 2.2**length
            points.append((compute, 1 - law(compute) - off - rng.normal(0, sigma), str(size)))
    return tuple(zip(*points, strict=True))


def test_intervals_take_the_scatter_of_sizes():
    """Lengths of one model are no independent points: without their sizes 7 in 10 hold the law."""
    held = {True: 0, False: 0}
    for seed in range(80):
        compute, accuracy, sizes = by_sizes(seed)
        middle = (compute[0] * compute[-1]) ** 0.5
        for knows_sizes in held:
            fit = fit_law(compute, accuracy, sizes if knows_sizes else (), num_draws=200, seed=seed)
            low, high = fit.band(np.array([middle]))
            held[knows_sizes] += bool(low <= law(middle) <= high)
    assert held[True] >= 67  # of 80 at 0.9, fewer two times in 100
    assert held[False] <= 63


def test_sizes_that_scatter_no_more_than_their_lengths_change_little():
    compute, accuracy, sizes = by_sizes(1, sigma_of_sizes=0.0)
    known, alone = fit_law(compute, accuracy, sizes), fit_law(compute, accuracy)
    assert known.exponent.value == alone.exponent.value
    width, plain = (one.exponent.high - one.exponent.low for one in (known, alone))
    assert width == pytest.approx(plain, rel=0.3)


def test_amounts_within_a_tenth_are_one_point():
    x = [*COMPUTE, COMPUTE[0] * 1.05, COMPUTE[0] * 1.2]
    y = [*noisy(0), 0.3, 0.4]
    fit = fit_law(x, y)
    assert len(fit.compute) == len(COMPUTE) + 1
    assert fit.compute[0] == pytest.approx(COMPUTE[0] * 1.05**0.5)
    assert fit.error[:2] == pytest.approx([1 - (y[0] + 0.3) / 2, 0.6])
    four = [10, 10.5, 100, 101, 1000, 1001]
    with pytest.raises(NoFitError, match=": 3 with different amounts"):
        fit_law(four, [0.5, 0.5, 0.6, 0.6, 0.7, 0.7])
