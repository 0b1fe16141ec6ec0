"""Polyak averaging of the weights, sharded like the optimizer state.

Each rank averages only the fragments that it owns (arXiv:2010.11929, B.1.1: factor 0.9999), so the
average costs 4 bytes per element over all ranks together, under every ZeRO stage.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vit_ray.training.training_state import Fragment, exchange_weights, weights_by_name


class WeightAverage:
    """Running average of the fp32 master weights, started at their first values.

    Args:
        factor: of the average, in each step.
        warms_up: step t averages by (1 + t) / (10 + t) if that is less, as TensorFlow's
            `ExponentialMovingAverage` with `num_updates`: otherwise a short run's average is mostly
            its initial weights.
    """

    def __init__(self, fragments: list[Fragment], factor: float, *, warms_up: bool) -> None:
        self.fragments = fragments
        self.factor = factor
        self.warms_up = warms_up
        self.values: list[Tensor] = [f.weight.detach().clone() for f in fragments]

    def restart(self) -> None:
        for value, fragment in zip(self.values, self.fragments, strict=True):
            value.copy_(fragment.weight)

    @torch.no_grad()
    def update(self, refused: Tensor, applied_steps: Tensor) -> None:
        """After an optimizer step: average = factor x average + (1 - factor) x weight.

        Args:
            refused: scalar; 1 if the step was not applied, which leaves the average unchanged too,
                else 0.
            applied_steps: scalar; steps that moved the weights so far, including this one.
        """
        share = torch.full_like(refused, 1.0 - self.factor)
        if self.warms_up:
            # With offload the averages are on the CPU, and the count of steps is on the GPU.
            share = torch.maximum(share, 9.0 / (10.0 + applied_steps.to(share.device)))
        share = share * (1.0 - refused)
        for value, fragment in zip(self.values, self.fragments, strict=True):
            value.lerp_(fragment.weight, share)

    def by_name(self) -> dict[str, list[tuple[int, Tensor]]]:
        """Parameter name -> list of (start, averaged values (n,)) on this rank."""
        return weights_by_name(self.fragments, self.values)

    @contextmanager
    def applied(self, engine: Any, names: dict[nn.Parameter, str]) -> Iterator[None]:
        """The module computes with the averaged weights inside this block; all ranks enter it.

        After an error the masters are not restored: that takes all ranks, which may not have
        failed.
        """
        # Without ZeRO and in fp32 the module's weights are the masters: keep a copy.
        masters = [f.weight.detach().clone() for f in self.fragments]
        exchange_weights(engine, names, self.by_name())
        yield
        exchange_weights(engine, names, weights_by_name(self.fragments, masters))
