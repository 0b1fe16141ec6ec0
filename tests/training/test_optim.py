"""Groups and steps of optimizers against torch's, averages of weights against TensorFlow's."""

from typing import Any

import pytest
import torch

from tests.training.engine_runs import small_model
from vit_ray.config.training_sections import OptimConfig
from vit_ray.training import replicated
from vit_ray.training.optimizers import StepGuard, build_optimizer, state_types
from vit_ray.training.replicated import ReplicatedOptimizer
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
    fragment = Fragment("weight", 0, weight, weight, 0)
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
