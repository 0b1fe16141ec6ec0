"""LAMB (You et al., arXiv:1904.00962): Adam's step, as long as its tensor."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from vit_ray.train.engine.fragments import Fragment
from vit_ray.train.optim.guarded import (
    Groups,
    HalfMomentAdamW,
    pieces,
    scaled_momentum,
    views_of,
)

ADAPTS: Final = "adapts"
"""Key of a parameter group whose steps are scaled to the length of its tensors."""


class Lamb(HalfMomentAdamW):
    """As DeiT III (arXiv:2204.07118) trains with it.

    The ratio of the norms of a tensor and its step is not limited, and 1 if either is 0. As in the
    code that DeiT III uses, tensors without weight decay (biases, norms, tokens, positions) are not
    scaled. Squares of tensors that ZeRO has cut are added over ranks in float64.
    """

    def __init__(self, groups: Groups, betas: tuple[float, float]) -> None:
        super().__init__(groups, betas)
        self._parts: dict[Tensor, tuple[list[Fragment], list[str]]] = {}

    def take(
        self, owner: Tensor, parts: list[Fragment], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self._parts[owner] = parts, list(shapes)

    def _apply(
        self, owner: Tensor, grad: Tensor, entry: dict[str, Any], group: dict[str, Any], on: Tensor
    ) -> None:
        betas, count = group["betas"], entry["step"].clamp(min=1.0)
        for weight, slope, first, second in pieces(
            owner, grad, entry["exp_avg"], entry["exp_avg_sq"]
        ):
            moved = scaled_momentum(slope, first, second, betas, count, on)
            slope.copy_(moved.div_(1.0 - betas[0] ** count))
            slope.add_(weight, alpha=group["weight_decay"])
        if group[ADAPTS]:
            # Each tensor's step times the norm of the tensor over that of the step.
            fragments, names = self._parts[owner]
            updates = views_of(fragments, grad)
            squares = torch.zeros(2, len(names), dtype=torch.float64, device=grad.device)
            places = [names.index(fragment.name) for fragment in fragments]
            weights = [fragment.weight for fragment in fragments]
            for of_kind, tensors in zip(squares, (weights, updates), strict=True):
                if tensors:
                    norms = torch.stack(torch._foreach_norm(tensors))
                    of_kind[places] = norms.double().square_()
            self.ranks.add(squares)
            of_weights, of_updates = squares
            ratios = (of_weights / of_updates).sqrt()
            ratios = torch.where(squares.amin(0) > 0.0, ratios, 1.0).float()
            for run, place in zip(updates, places, strict=True):
                run.mul_(ratios[place])
        rate = group["lr"] * on
        for weight, update in pieces(owner, grad):
            weight.sub_(update.mul_(rate))
