"""Dropout whose mask depends only on the image, not on the worker that trains it.

With `keys` from `counter_random.sample_keys`, each image keeps its mask in any batch, on any worker
and when its activations are recomputed for the backward pass. Without keys, torch's generator
draws.
"""

import math

import torch
from torch import Tensor, nn

from vit_ray.models.counter_random import random_uint16


class Dropout(nn.Dropout):
    """Dropout of activations, one mask for each image."""

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Same shape as x (B, ...).

        Args:
            x: activations.
            keys: int64 (B,), different from those of all other layers; None = torch's generator.
        """
        if keys is None or not self.training or self.p == 0.0:
            return super().forward(x)
        return keyed_dropout(x, keys, self.p)


class StochasticDepth(nn.Module):
    """Drops a residual branch for whole images (Huang et al., arXiv:1603.09382).

    For the other images it is scaled up by 1 / (1 - rate), so that evaluation needs no change. The
    rate, rounded to a multiple of 2^-16 below 1, is data: blocks with different rates compile to
    one code.
    """

    levels: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        levels = _levels(rate)
        self.is_active = levels > 0
        self.register_buffer("levels", torch.tensor(levels), persistent=False)

    def forward(self, branch: Tensor, keys: Tensor | None = None) -> Tensor:
        """Same shape as `branch` (B, ...).

        Args:
            branch: what is to be added to the residual stream.
            keys: int64 (B,), as in `Dropout.forward`.
        """
        if not (self.training and self.is_active):
            return branch
        if keys is None:
            numbers = torch.randint(-(2**15), 2**15, branch.shape[:1], device=branch.device)
        else:
            numbers = random_uint16(keys, 1)[:, 0]
        scale = torch.where(numbers >= self.levels - 2**15, 2**16 / (2**16 - self.levels), 0.0)
        return (branch * scale.view(-1, *[1] * (branch.dim() - 1))).to(branch.dtype)


def keyed_dropout(x: Tensor, keys: Tensor, rate: float) -> Tensor:
    """x (B, ...) with elements dropped and the others scaled up; element i by number i of its key.

    The rate is rounded to a multiple of 2^-16 below 1, and the scale is that of the rounded rate.
    """
    levels = _levels(rate)
    numbers = random_uint16(keys, math.prod(x.shape[1:]))
    is_kept = (numbers >= levels - 2**15).reshape(x.shape)
    return torch.where(is_kept, x * (2**16 / (2**16 - levels)), 0.0)


def _levels(rate: float) -> int:
    """How many of 2^16 numbers drop: never all, because nothing would be left to scale up."""
    return min(round(rate * 2**16), 2**16 - 1)
