"""Learning rates against torch's own schedulers, and big_vision's formulas."""

import numpy as np
import pytest
import torch

from vit_ray.config.training_sections import OptimConfig
from vit_ray.training.steps import cooldown_start, lr_at

TOTAL, WARMUP, PEAK = 50, 10, 0.3


def torch_rates(
    decay: torch.optim.lr_scheduler.LRScheduler, optimizer: torch.optim.SGD
) -> list[float]:
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / WARMUP)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [WARMUP])
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        both.step()
    return rates


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_after_the_warm_up_equals_torchs(schedule):
    sgd, end = optimizer(), 0.01
    decay: torch.optim.lr_scheduler.LRScheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        sgd, TOTAL - WARMUP, eta_min=end
    )
    if schedule == "linear":
        sgd = optimizer()
        decay = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, end / PEAK, TOTAL - WARMUP)
    config = OptimConfig(
        learning_rate=PEAK, schedule=schedule, warmup_steps=WARMUP, end_learning_rate=end
    )
    ours = [lr_at(step, config, TOTAL) for step in range(TOTAL)]
    assert ours == pytest.approx(torch_rates(decay, sgd), rel=1e-9)


def test_a_cool_down_equals_torchs_constant_and_then_linear_rate():
    end, sgd = 1e-3, optimizer()
    constant = torch.optim.lr_scheduler.ConstantLR(sgd, factor=1.0)
    flat = torch_rates(constant, sgd)[: TOTAL - 15]
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK - end)
    fall = torch.optim.lr_scheduler.PolynomialLR(sgd, total_iters=15, power=1.0)
    falling = []
    for _ in range(15):
        falling.append(sgd.param_groups[0]["lr"] + end)
        sgd.step()
        fall.step()
    rates = {"learning_rate": PEAK, "end_learning_rate": end, "warmup_steps": WARMUP}
    config = OptimConfig(schedule="cooldown", cooldown_fraction=0.3, **rates)
    ours = [lr_at(step, config, TOTAL) for step in range(TOTAL)]
    assert ours == pytest.approx(flat + falling, rel=1e-9)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "steps", "cooldown"])
def test_every_rate_is_by_big_visions_formula(schedule):
    """`create_learning_rate_schedule` of its utils.py: a decay, times warm-up, times cool-down."""
    step, ones, decay_at = np.arange(TOTAL), np.ones(TOTAL), (0.3, 0.62, 0.9)
    decayed = np.clip((step - WARMUP) / (TOTAL - WARMUP), 0, 1)
    end = 0.01 if schedule == "linear" else 0.0
    decays = {
        "linear": end / PEAK + (1 - end / PEAK) * (1 - decayed),
        "cosine": (1 + np.cos(np.pi * decayed)) / 2,
        "steps": 0.1 ** np.searchsorted(np.array(decay_at) * TOTAL, step, side="right"),
        "cooldown": np.minimum(1, (TOTAL - step) / (0.2 * TOTAL)),
    }
    expected = PEAK * decays.get(schedule, ones) * np.minimum(1, step / WARMUP)
    config = OptimConfig(
        learning_rate=PEAK, schedule=schedule, warmup_steps=WARMUP, end_learning_rate=end,
        decay_at=decay_at, cooldown_fraction=0.2,
    )  # fmt: skip
    ours = [lr_at(int(number), config, TOTAL) for number in step]
    assert ours == pytest.approx(expected.tolist(), rel=1e-9)


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


def test_steps_fall_where_decay_at_says():
    # BiT on JFT (arXiv:1912.11370, 3.1): epochs 10, 23, 30 and 37 of 40.
    config = OptimConfig(
        learning_rate=1.0, schedule="steps", decay_at=tuple(e / 40 for e in (10, 23, 30, 37))
    )
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [100, 230, 300, 370])
    for step in range(400):
        assert lr_at(step, config, 400) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step()
