"""ZeRO stage 0 without DeepSpeed, on one rank; more ranks are those of `test_engine.py`."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vit_ray.config.training_sections import OptimConfig
from vit_ray.models import build_model
from vit_ray.train.engine import replicated
from vit_ray.train.engine.fragments import Fragment, create_state
from vit_ray.train.engine.replicated import ReplicatedOptimizer
from vit_ray.train.optim.guarded import HalfMomentAdamW, Ranks
from vit_ray.train.optim.optimizers import StepGuard, build_optimizer, shapes_by_head, state_types


def test_a_weight_that_no_pass_reaches_decays_as_it_does_on_many_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicated.dist, "get_world_size", lambda: 1)
    reached, unreached = (nn.Parameter(torch.ones(3)) for _ in range(2))
    adamw = torch.optim.AdamW([reached, unreached], lr=0.1, weight_decay=0.5, fused=True)
    optimizer = ReplicatedOptimizer(
        [reached, unreached],
        adamw,
        StepGuard(adamw, torch.device("cpu")),
        clip_norm=0.0,
        bucket_elements=10,
        is_last_pass=lambda: True,
    )
    (2 * reached).sum().backward()
    optimizer.step()
    torch.testing.assert_close(unreached.detach(), torch.full((3,), 1 - 0.1 * 0.5))
    assert adamw.state[unreached]["step"] == adamw.state[reached]["step"] == 1


class Operations(TorchDispatchMode):
    """Counts what is handed to the device, apart from views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def half_moment(parameters: list[nn.Parameter]) -> HalfMomentAdamW:
    groups = [
        {"params": [p for p in parameters if (p.ndim > 1) is is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = HalfMomentAdamW(groups, (0.9, 0.999))
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    return optimizer


def with_state(optimizer: torch.optim.Optimizer) -> None:
    owners = [p for group in optimizer.param_groups for p in group["params"]]
    types = state_types(OptimConfig(first_moment="bf16"))
    create_state(optimizer.state, owners, types, counts=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_one_tensor_are_those_of_each_weight_to_the_last_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated.dist, "get_world_size", lambda: 1)
    torch.manual_seed(0)
    shapes = [(7, 5), (5,), (3, 11), (1,), (64, 33)]
    weights = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    apart = [nn.Parameter(w.detach().float()) for w in weights]
    flat, plain = half_moment(weights), half_moment(apart)
    optimizer = ReplicatedOptimizer(
        weights,
        flat,
        StepGuard(flat, torch.device("cpu")),
        clip_norm=0.0,
        bucket_elements=10,
        is_last_pass=lambda: True,
    )
    with_state(flat)
    with_state(plain)
    for step in range(4):
        slopes = [torch.randn(shape).to(dtype) for shape in shapes]
        if step == 2:
            slopes[1][0] = math.nan
        for _ in range(2):  # passes
            sum((w * s).sum() for w, s in zip(weights, slopes, strict=True)).backward()  # type: ignore[union-attr]
        optimizer.step()
        for weight in weights:
            weight.grad = None  # as DeepSpeed does
        for parameter, slope in zip(apart, slopes, strict=True):
            parameter.grad = slope.float() + slope.float()
        if step != 2:
            plain.step()
    for weight, parameter in zip(weights, apart, strict=True):
        assert torch.equal(optimizer.masters[weight], parameter)
        assert torch.equal(weight, parameter.to(dtype))
        owner, start = optimizer.places[weight]
        assert optimizer.masters[weight].data_ptr() % 64 == owner.data_ptr() % 64
        for key in ("exp_avg", "exp_avg_sq"):
            kept = flat.state[owner][key][start : start + weight.numel()]
            assert torch.equal(kept, plain.state[parameter][key].flatten())


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_operations_of_a_step_do_not_grow_with_the_number_of_layers(
    name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated.dist, "get_world_size", lambda: 1)
    config, counts = OptimConfig(name=name, first_moment="bf16", weight_decay=0.1), []
    for depth in (2, 8):
        size = {"depth": depth, "width": 64, "mlp_dim": 96, "num_heads": 2, "patch_size": 4}
        model: Any = build_model("ViT", 40, 8, **size)
        plain: Any = build_optimizer(model, config)
        names = {p: n for n, p in model.named_parameters()}
        optimizer = ReplicatedOptimizer(
            list(names),
            plain,
            StepGuard(plain, torch.device("cpu")),
            clip_norm=1.0,
            bucket_elements=10,
            is_last_pass=lambda: True,
        )
        with_state(plain)
        if name == "adafactor":
            places = [(n, *optimizer.places[p], p.numel()) for p, n in names.items()]
            parts = [Fragment(n, 0, o[s : s + c], o, s) for n, o, s, c in places]
            shapes = {n: tuple(p.shape) for p, n in names.items()}
            owners = [o for group in plain.param_groups for o in group["params"]]
            of_owners = [(o, [n for n, owner, *_ in places if owner is o]) for o in owners]
            alone = Ranks(0, 1, torch.device("cpu"))
            plain.attach(parts, of_owners, shapes_by_head(model, shapes), alone)
        model(torch.zeros(1, 3, 8, 8)).square().sum().backward()
        with Operations() as operations:
            plain.step()
        counts.append(operations.count)
    assert counts[0] == counts[1] < 200
