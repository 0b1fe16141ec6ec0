"""Learning rates against big_vision's formulas and torch's own schedulers."""

import numpy as np
import pytest
import torch

from vit_ray.config.training_sections import OptimConfig
from vit_ray.training.steps import cooldown_start, lr_at

TOTAL, WARMUP, PEAK = 50, 10, 0.3


@pytest.mark.parametrize("end", [0.0, 0.01])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "steps", "cooldown"])
def test_every_rate_is_by_big_visions_formula(schedule, end):
    """`create_learning_rate_schedule` of its utils.py: a decay, times warm-up, times cool-down."""
    step, ones, decay_at = np.arange(TOTAL), np.ones(TOTAL), (0.3, 0.62, 0.9)
    decayed = np.clip((step - WARMUP) / (TOTAL - WARMUP), 0, 1)
    decays = {
        "linear": 1 - decayed,
        "cosine": (1 + np.cos(np.pi * decayed)) / 2,
        "cooldown": np.minimum(1, (TOTAL - step) / (0.2 * TOTAL)),
    }
    # To the end rate instead of 0.
    rates = end + (PEAK - end) * decays.get(schedule, ones)
    if schedule == "steps":
        rates = PEAK * 0.1 ** np.searchsorted(np.array(decay_at) * TOTAL, step, side="right")
    expected = rates * np.minimum(1, step / WARMUP)
    config = OptimConfig(
        learning_rate=PEAK, schedule=schedule, warmup_steps=WARMUP, end_learning_rate=end,
        decay_at=decay_at, cooldown_fraction=0.2,
    )  # fmt: skip
    ours = [lr_at(int(number), config, TOTAL) for number in step]
    assert ours == pytest.approx(expected.tolist(), rel=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_equals_torchs(schedule):
    end = 0.01
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    decay: torch.optim.lr_scheduler.LRScheduler
    if schedule == "cosine":
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, TOTAL, eta_min=end)
    else:
        decay = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, end / PEAK, TOTAL)
    config = OptimConfig(
        learning_rate=PEAK, schedule=schedule, warmup_steps=0, end_learning_rate=end
    )
    for step in range(TOTAL):
        assert lr_at(step, config, TOTAL) == pytest.approx(decay.get_last_lr()[0], rel=1e-9)
        sgd.step()
        decay.step()


def test_until_its_cool_down_a_shorter_run_has_the_rates_of_a_longer_one():
    config = OptimConfig(learning_rate=PEAK, schedule="cooldown", warmup_steps=WARMUP)
    start = cooldown_start(config, 40)
    assert start == 32
    rates = [[lr_at(step, config, total) for step in range(40)] for total in (40, 200)]
    assert rates[0][: start + 1] == rates[1][: start + 1]
    assert rates[0][start + 1] < rates[1][start + 1]
    assert cooldown_start(config, 1) == 0


def test_steps_fall_to_a_tenth_at_30_60_and_90_percent_and_constant_stays_at_the_peak():
    config = OptimConfig(learning_rate=1.0, schedule="steps")
    ours = [lr_at(step, config, 100) for step in (0, 29, 30, 59, 60, 89, 90, 99)]
    assert ours == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    config = OptimConfig(learning_rate=2.0, schedule="constant", warmup_steps=4)
    assert [lr_at(step, config, 10) for step in (0, 2, 4, 9)] == [0.0, 1.0, 2.0, 2.0]
    with pytest.raises(ValueError, match=r"decay_at=\[0.6, 0.3\] is not in ascending order"):
        OptimConfig(decay_at=(0.6, 0.3))
