"""Loss curves as they were when they were kept; `golden_runs.py` says how to renew them."""

import json

import pytest

from tests.training.golden_runs import FILE, RUNS, STEPS, WORKERS, loss_curves
from tests.training.ranks import run_ranks

# Relative. Without AVX-512, and without AVX2 too (`make test-processors`), losses of smooth models
# moved by at most 7.4e-8 and those of models with ReLU and max pool, where a rounding error may
# choose another branch, by 1.8e-6 (AMD EPYC, 2026-11-21). Small changes of the algorithm move one
# or more curves past their tolerance, (smooth, with ReLU) by: second moment of 0.998 for 0.999
# (4e-5, 1.6e-5); decay 10 % smaller (5e-6, -); momentum of 0.89 for 0.9 (-, 1.2e-4); epsilon of
# 1e-7 for 1e-8 (5e-6, 1.5e-5); no bias correction (0.3, 0.1); the schedule one step ahead
# (2e-2, 2e-2); gradients 10 % too large (3e-4, 6e-4).
TOLERANCE = {name: 1e-5 if "ResNet" in name or "hybrid" in name else 1e-6 for name in RUNS}


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_has_the_losses_that_were_kept(name: str) -> None:
    curves = run_ranks(WORKERS, loss_curves, None, [name])[0]
    golden = json.loads(FILE.read_text())
    assert set(golden) == set(RUNS)
    assert len(golden[name]) == STEPS
    assert curves[name] == pytest.approx(golden[name], rel=TOLERANCE[name], abs=0)
    # The rate of the first step is 0, so that both of the first losses are those of the start.
    assert sum(golden[name][-2:]) < sum(golden[name][:2])
