"""Groups, steps and rates of optimizers, and averages: against torch, big_vision and TensorFlow."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.training.engine_runs import small_model
from vit_ray.config.training_sections import OptimConfig
from vit_ray.training import replicated
from vit_ray.training.optimizers import StepGuard, build_optimizer, state_types
from vit_ray.training.replicated import ReplicatedOptimizer
from vit_ray.training.steps import cooldown_start, lr_at
from vit_ray.training.training_state import Fragment, WeightAverage


def test_what_does_not_decay_has_no_weight_decay_and_the_rate_starts_at_zero():
    """So that a trial step moves nothing; `tests/models/test_catalog.py` has what decays."""
    model = small_model()
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1))
    decayed, rest = optimizer.param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim > 1 for p in decayed["params"])
    assert len(decayed["params"]) + len(rest["params"]) == len([*model.parameters()])
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_without_the_compiler_are_torchs_bit_for_bit(name):
    model, copy = small_model(), small_model()
    config = OptimConfig(name=name, weight_decay=0.1)
    ours = build_optimizer(model, config)
    copies = dict(zip(model.parameters(), copy.parameters(), strict=True))
    groups: list[dict[str, Any]] = []
    for group in ours.param_groups:
        weights = [copies[weight] for weight in group["params"]]
        groups.append({"params": weights, "weight_decay": group["weight_decay"]})
    theirs: torch.optim.Optimizer = torch.optim.SGD(groups, momentum=config.momentum, fused=True)
    if name == "adamw":
        theirs = torch.optim.AdamW(groups, betas=config.betas, fused=True)
    for step in range(5):
        for group in (*ours.param_groups, *theirs.param_groups):
            group["lr"] = 0.01 * (step + 1)
        for weight, same in copies.items():
            weight.grad = torch.randn_like(weight)
            same.grad = weight.grad.clone()
        ours.step()
        theirs.step()
    assert all(torch.equal(weight, same) for weight, same in copies.items())
    kept = theirs.state[same]
    assert {key: value.dtype for key, value in kept.items()} == state_types(config)


def test_a_weight_that_no_pass_reaches_decays_as_it_does_on_many_ranks(monkeypatch):
    monkeypatch.setattr(replicated.dist, "get_world_size", lambda: 1)
    reached, unreached = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    adamw = torch.optim.AdamW([reached, unreached], lr=0.1, weight_decay=0.5, fused=True)
    optimizer = ReplicatedOptimizer(
        [reached, unreached], adamw, StepGuard(adamw, torch.device("cpu")), clip_norm=0.0,
        bucket_elements=10, is_last_pass=lambda: True,
    )  # fmt: skip
    (2 * reached).sum().backward()
    optimizer.step()
    torch.testing.assert_close(unreached.detach(), torch.full((3,), 1 - 0.1 * 0.5))
    assert adamw.state[unreached]["step"] == adamw.state[reached]["step"] == 1


def average_of(
    values: list[float], factor: float, *, warms_up: bool, refused: tuple[int, ...] = ()
) -> float:
    """Of one weight that starts at 1 and has these values after its steps."""
    weight = torch.ones(1)
    fragment = Fragment("weight", 0, weight, 0, 1)
    average = WeightAverage([fragment], factor, warms_up=warms_up)
    applied = 0
    for step, value in enumerate(values):
        is_refused = step in refused
        applied += not is_refused
        fragment.weight.fill_(value)
        average.update(torch.tensor(float(is_refused)), torch.tensor(float(applied)))
    return average.values[0].item()


def tensorflow_average(values: list[float], factor: float) -> float:
    """`tf.train.ExponentialMovingAverage` with `num_updates`, as its documentation writes it."""
    average = 1.0
    for num_updates, value in enumerate(values, start=1):
        decay = min(factor, (1 + num_updates) / (10 + num_updates))
        average = decay * average + (1 - decay) * value
    return average


def test_a_warmed_up_average_is_tensorflows():
    values = [float(step % 7) for step in range(300)]
    for factor in (0.5, 0.9, 0.9999):
        expected = pytest.approx(tensorflow_average(values, factor), rel=1e-5)
        assert average_of(values, factor, warms_up=True) == expected


def test_the_papers_average_has_one_factor():
    # 0.9999^500 of the first weight, which is 1; all others are 0.
    assert average_of([0.0] * 500, 0.9999, warms_up=False) == pytest.approx(0.9512, abs=1e-4)
    assert average_of([0.0] * 500, 0.9999, warms_up=True) < 1e-9


def test_a_refused_step_moves_neither_the_average_nor_its_warm_up():
    with_refused = average_of([0.0, 5.0, 2.0], 0.9999, warms_up=True, refused=(1,))
    assert with_refused == average_of([0.0, 2.0], 0.9999, warms_up=True)


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


def test_until_its_cool_down_a_shorter_run_has_the_rates_of_a_longer_one():
    config = OptimConfig(learning_rate=PEAK, schedule="cooldown", warmup_steps=WARMUP)
    start = cooldown_start(config, 40)
    assert start == 32
    rates = [[lr_at(step, config, total) for step in range(40)] for total in (40, 200)]
    assert rates[0][: start + 1] == rates[1][: start + 1]
    assert rates[0][start + 1] < rates[1][start + 1]
    assert cooldown_start(config, 1) == 0


def test_steps_fall_by_default_at_30_60_and_90_percent_and_only_in_ascending_order():
    config = OptimConfig(learning_rate=1.0, schedule="steps")
    ours = [lr_at(step, config, 100) for step in (0, 29, 30, 59, 60, 89, 90, 99)]
    assert ours == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    with pytest.raises(ValueError, match="decay_at"):
        OptimConfig(decay_at=(0.6, 0.3))
