"""The optimizers of the papers: AdamW, Adafactor, SGD with momentum; decay on matrices only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vit_ray.config.training_sections import OptimConfig
from vit_ray.models.build import NamedParameters, decayed_parameters
from vit_ray.models.encoder import Attention, AttentionPool
from vit_ray.models.parameter_groups import layer_of
from vit_ray.train.adafactor import Adafactor, HalfMomentAdamW

RATE_FACTOR = "rate_factor"
"""Key of a parameter group: its share of the learning rate."""


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Optimizer over two groups: kernels, which decay, and everything else, which does not.

    With `layer_decay` there are two for each layer, which have a share of the rate.

    The learning rate starts at 0: the loop sets `lr_at(step)` before each step, and an engine
    that takes a trial step to make its state must not move the weights.

    torch's are fused, on a CPU too: one pass over the state, in all threads. Where it is offloaded,
    DeepSpeed's own for CPUs takes 0.87 to 0.95 of the time on one thread, 0.98 to 1.10 on two
    (`benchmarks/results/offload_step_cpu_2026-11-22.md`), and has to be compiled there for three
    minutes. All take a refusal as a number (`found_inf`).
    """
    decayed, rest = decayed_parameters(model)
    groups = [
        {"params": parameters, "weight_decay": decay, RATE_FACTOR: factor}
        for named, decay in ((decayed, config.weight_decay), (rest, 0.0))
        for factor, parameters in _by_rate(model, named, config.layer_decay).items()
    ]
    if config.name == "adafactor":
        return Adafactor(groups, config.betas)
    if config.name == "adamw" and config.first_moment == "bf16":
        return HalfMomentAdamW(groups, config.betas)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=1e-8, fused=True)
    return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum, fused=True)


def _by_rate(
    model: nn.Module, named: NamedParameters, layer_decay: float
) -> dict[float, list[nn.Parameter]]:
    """Parameters by the share of the rate that their layer has (arXiv:2106.08254, appendix)."""
    if layer_decay == 1.0:
        return {1.0: [p for _, p in named]} if named else {}
    transformer: Any = getattr(model, "model", model)
    depth: int = transformer.size.depth
    by_rate: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named:
        factor = layer_decay ** (depth + 1 - layer_of(name, depth))
        by_rate.setdefault(factor, []).append(parameter)
    return by_rate


def shapes_by_head(
    model: nn.Module, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Sequence[int]]:
    """Shapes of parameters by name, with an axis for the heads of attention, as big_vision has.

    Args:
        shapes: as the model has them without ZeRO.
    """
    found = dict(shapes)
    for prefix, module in model.named_modules():
        if not isinstance(module, Attention | AttentionPool):
            continue
        heads = module.num_heads
        for name, _ in module.named_parameters(prefix):
            layer = name.removeprefix(f"{prefix}.").partition(".")[0]
            if name not in shapes:
                continue
            width, *rest = shapes[name]
            if layer == "qkv":
                found[name] = (3, heads, width // 3 // heads, *rest)
            elif layer in ("query", "key", "value"):
                found[name] = (heads, width // heads, *rest)
            elif layer == "out" and rest:
                found[name] = (width, heads, rest[0] // heads)
    return found


class StepGuard:
    """Norm and refusal of the last step of an optimizer that takes `found_inf`.

    DeepSpeed 0.19.8 has the host ask for the gradient's norm in the middle of every step, while the
    device stands idle. torch's fused optimizers take the answer on the device, as a number
    (`found_inf`, made for gradient scaling): 1 leaves weights, moments and step counts as they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer: Any = optimizer
        self.norm = torch.zeros((), device=device)
        self.refused = torch.zeros((), device=device)
        """1 if the gradient was not finite, else 0."""
        self.refused_steps = torch.zeros((), device=device)
        """Of all steps so far."""

    def note_norm(self, norm: Tensor) -> None:
        """Before the optimizer steps: the norm before clipping, the same on all ranks."""
        self.norm = norm
        self.refused = self._optimizer.found_inf = (~torch.isfinite(norm)).float()
        self.refused_steps += self.refused


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group its share of a step's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group[RATE_FACTOR]


def state_types(config: OptimConfig) -> dict[str, torch.dtype]:
    """Per-element state that the optimizer keeps, in torch's names, and its precision."""
    first = torch.bfloat16 if config.first_moment == "bf16" else torch.float32
    if config.name == "sgd":
        return {"momentum_buffer": torch.float32}
    if config.name == "adafactor":
        return {"exp_avg": first}
    return {"exp_avg": first, "exp_avg_sq": torch.float32}


def bytes_per_element(config: OptimConfig) -> int:
    """Of the optimizer's state; Adafactor's row and column sums are next to nothing."""
    return sum(dtype.itemsize for dtype in state_types(config).values())
