"""The optimizers of the paper: AdamW and SGD with momentum, decay on matrices only."""

from __future__ import annotations

import torch
from torch import nn

from vit_ray.config.training_sections import OptimConfig
from vit_ray.models.build import decayed_parameters


def build_optimizer(model: nn.Module, config: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    """Optimizer over two groups: kernels, which decay, and everything else, which does not.

    The learning rate starts at 0: the loop sets `lr_at(step)` before each step, and an engine
    that takes a trial step to make its state must not move the weights.

    Args:
        fused: use torch's fused CUDA kernels.
    """
    decayed, rest = decayed_parameters(model)
    groups = [
        {
            "params": [p for _, p in parameters if p.requires_grad],
            "weight_decay": decay,
        }
        for parameters, decay in ((decayed, config.weight_decay), (rest, 0.0))
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=1e-8, fused=fused)
    return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum)


def state_names(config: OptimConfig) -> tuple[str, ...]:
    """Per-element state that the optimizer keeps, in torch's names."""
    return ("exp_avg", "exp_avg_sq") if config.name == "adamw" else ("momentum_buffer",)
