"""The optimizer's groups, and its steps against torch's."""

from typing import Any

import pytest
import torch

from tests.training.engine_runs import small_model
from vit_ray.config.training_sections import OptimConfig
from vit_ray.training.optimizers import build_optimizer, state_types, zero_state


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


def test_state_types_are_what_torch_keeps():
    for name in ("adamw", "sgd"):
        config = OptimConfig(name=name)
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        model = torch.nn.Module()
        model.weight = parameter
        optimizer = build_optimizer(model, config)
        parameter.grad = torch.ones(2, 2)
        optimizer.step()
        kept = optimizer.state[parameter]
        assert {key: value.dtype for key, value in kept.items()} == state_types(config)


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
    steps: list[int] = []
    ours.register_step_post_hook(lambda *_: steps.append(len(steps)))
    for step in range(5):
        for group in (*ours.param_groups, *theirs.param_groups):
            group["lr"] = 0.01 * (step + 1)
        for weight, same in copies.items():
            weight.grad = torch.randn_like(weight)
            same.grad = weight.grad.clone()
        ours.step()
        theirs.step()
    assert steps == [*range(5)]
    assert all(torch.equal(weight, same) for weight, same in copies.items())


def test_only_what_is_by_element_takes_memory_at_the_start(monkeypatch):
    made, zeros_like = list[torch.dtype](), torch.zeros_like

    def counted(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made.append(dtype)
        return zeros_like(weight, dtype=dtype)

    monkeypatch.setattr(torch, "zeros_like", counted)
    state = zero_state(torch.ones(2, 3), state_types(OptimConfig(name="adamw")))
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "exp_avg": (2, 3),
        "exp_avg_sq": (2, 3),
        "step": (),
    }
    assert made == [torch.float32] * 2
