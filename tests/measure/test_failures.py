"""Expected goodput and intervals against Daly, an exact minimum, simulated runs and limits."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from vit_ray.config.command_sections import PlanConfig
from vit_ray.measure.failures import Interruptions, best_interval_s

HOUR_S, DAY_S = 3600.0, 86_400.0


def played_s(met: Interruptions, interval_s: float, work_s: float, seed: int) -> float:
    """Wall clock of one run, event by event; a checkpoint counts once it is whole."""
    draw, now_s, saved_s = random.Random(seed), 0.0, 0.0
    fails_s = draw.expovariate(1 / met.failure_s)
    while True:
        at_s, done_s, being_written = now_s, saved_s, []
        while done_s < work_s:
            step_s = min(interval_s, work_s - done_s)
            at_s, done_s = at_s + step_s, done_s + step_s
            if done_s < work_s:
                at_s += met.stall_s
                being_written.append((at_s + met.write_s, done_s))
            if at_s > fails_s:
                break
        if at_s <= fails_s:
            return at_s
        saved_s = max([saved_s, *(what for whole_s, what in being_written if whole_s <= fails_s)])
        now_s = fails_s
        while True:  # a restart may fail, too
            fails_s = now_s + draw.expovariate(1 / met.failure_s)
            if fails_s > now_s + met.restart_s:
                now_s += met.restart_s
                break
            now_s = fails_s


MET = (
    Interruptions(failure_s=3 * HOUR_S, restart_s=300, stall_s=5, write_s=60),
    Interruptions(failure_s=600, restart_s=200, stall_s=20, write_s=30),
    Interruptions(failure_s=2 * HOUR_S, restart_s=27, stall_s=2),
)


@pytest.mark.parametrize("met", MET, ids=("cluster", "hard times", "small"))
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_the_formula_is_the_mean_of_runs_that_are_played(met: Interruptions, factor: float) -> None:
    interval_s = factor * met.best_interval_s
    work_s = 25 * met.failure_s
    walls = [played_s(met, interval_s, work_s, seed) for seed in range(150)]
    error = np.std(walls) / np.mean(walls) / math.sqrt(len(walls))
    expected = work_s / met.goodput(interval_s)
    # The last stretch has no checkpoint, and an attempt has a beginning: below 2 % of 25 failures.
    assert np.mean(walls) == pytest.approx(expected, rel=0.02 + 4 * error)
    simulated = met.simulated_s(interval_s, work_s, 2000, np.random.default_rng(0))
    assert np.mean(simulated) == pytest.approx(np.mean(walls), rel=5 * error)
    for share in (0.05, 0.95):
        assert np.quantile(simulated, share) == pytest.approx(np.quantile(walls, share), rel=0.1)


@pytest.mark.parametrize("stall_s", [1e-3, 0.3, 5, 300, 3 * HOUR_S])
@pytest.mark.parametrize("failure_s", [600.0, 3 * HOUR_S, DAY_S, 1e9])
def test_the_interval_is_the_exact_minimum_of_the_waste(stall_s: float, failure_s: float) -> None:
    met = Interruptions(failure_s, restart_s=60, stall_s=stall_s)
    found = minimize_scalar(
        lambda log: -met.goodput(math.exp(log)), bounds=(-5, 30), method="bounded",
        options={"xatol": 1e-9},
    )  # fmt: skip
    ours = best_interval_s(stall_s, failure_s)
    assert met.goodput(ours) == pytest.approx(-found.fun, rel=0.04 if stall_s > failure_s else 1e-3)
    # Where the derivative is 0: x = M (1 + W(-e^(-1 - stall / M))).
    if 1e-9 < stall_s / failure_s < 0.1:
        exact_s = failure_s * (1 + lambertw(-math.exp(-1 - stall_s / failure_s)).real)
        assert ours == pytest.approx(exact_s, rel=5e-3)


def test_the_interval_is_youngs_where_failures_are_rare() -> None:
    # Young (CACM 17, 1974): the square root of twice the product.
    assert best_interval_s(2.0, 1e8) == pytest.approx(math.sqrt(2 * 2.0 * 1e8), rel=1e-3)
    # Daly (2006): sqrt(2 x 5 min x 24 h) = 120 min less the 5, and 20 x (1/3) x 2 + ... above it.
    minutes = best_interval_s(5.0, 24 * 60)
    assert minutes == pytest.approx(120 * (1 + 1 / 3 / 24 + 1 / 9 / 576) - 5)
    assert best_interval_s(100.0, 50.0) == 50.0


@given(st.floats(0.01, 1e3), st.floats(60, 1e9), st.floats(0, 1e4), st.floats(1, 1e5))
def test_limits(stall_s: float, failure_s: float, restart_s: float, interval_s: float) -> None:
    met = Interruptions(failure_s, restart_s, stall_s)
    without = replace(met, failure_s=math.inf)
    # Without failures only the stalls are lost; failures lose more; a free checkpoint is taken at
    # once, and then a failure costs its restart alone.
    assert without.goodput(interval_s) == interval_s / (interval_s + stall_s)
    assert 0 <= met.goodput(interval_s) <= without.goodput(interval_s)
    assert best_interval_s(0.0, failure_s) == 0.0
    free = replace(met, stall_s=0.0).goodput(1e-6 * failure_s)
    assert free == pytest.approx(math.exp(-restart_s / failure_s), rel=1e-5)


def test_a_run_that_never_saves_has_no_goodput_and_overflows_nothing() -> None:
    hopeless = Interruptions(failure_s=1e-300, restart_s=1e300, stall_s=1.0)
    assert hopeless.goodput(900.0) == 0.0
    assert Interruptions(1.0, 1e4, 1.0).goodput(1e4) == 0.0


def test_no_checkpoint_begins_before_the_last_one_is_whole() -> None:
    assert Interruptions(600, 60, 0.1, write_s=120).best_interval_s == 120


def test_the_rate_is_llama_3s_and_gives_the_share_that_it_reports() -> None:
    # 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, section 3.3.4).
    failure_s = PlanConfig().failure_s(16_384)
    assert failure_s == pytest.approx(54 * DAY_S / 419, rel=0.01)
    assert failure_s / HOUR_S == pytest.approx(3.08, abs=0.01)
    # "More than 90 % effective training time" leaves some 18 minutes for each failure.
    met = Interruptions(failure_s, restart_s=600, stall_s=2, write_s=60)
    assert 0.90 < met.goodput(met.best_interval_s) < 0.95
