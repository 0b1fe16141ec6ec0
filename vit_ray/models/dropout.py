"""Dropout whose mask is a function of the image, so that it does not depend on who trains it.

With `keys` from `counter_random.sample_keys`, each image keeps its mask in any batch, on any worker
and when its activations are made again for the backward pass. Without, torch's generator draws.
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
            keys: int64 (B,), unlike those of all other layers; None = torch's generator.
        """
        if keys is None or not self.training or self.p == 0.0:
            return super().forward(x)
        return keyed_dropout(x, keys, self.p)


def keyed_dropout(x: Tensor, keys: Tensor, rate: float) -> Tensor:
    """x (B, ...) with elements dropped and the others scaled up; element i by number i of its key.

    The rate is rounded to a multiple of 2^-16, and the scale is that of the rounded rate.
    """
    levels = round(rate * 2**16)
    numbers = random_uint16(keys, math.prod(x.shape[1:]))
    is_kept = (numbers >= levels - 2**15).reshape(x.shape)
    return torch.where(is_kept, x * (2**16 / (2**16 - levels)), 0.0)
