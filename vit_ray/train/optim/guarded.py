"""What this project's own optimizers have in common, and AdamW with a first moment in bf16.

They use torch's operations, not one fused kernel. As `StepGuard` needs, `found_inf` refuses a step
without a host-device sync.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from vit_ray.train.engine.fragments import Fragment
from vit_ray.train.optim.uncompiled import UncompiledOptimizer

Groups = list[dict[str, Any]]
# Elements that are stepped at a time: temporary memory is 256 MB at most.
PIECE: Final = 1 << 24


@dataclass(frozen=True)
class Ranks:
    """Ranks that the tensors are cut over; one if each rank has all of them."""

    rank: int
    size: int
    device: torch.device
    """Where the ranks compute; offloaded tensors are elsewhere."""

    def add(self, values: Tensor) -> None:
        """Sum over the ranks, called by all, in place."""
        if self.size > 1:
            on_device = values.to(self.device)
            torch.distributed.all_reduce(on_device)
            values.copy_(on_device)


class GuardedOptimizer(UncompiledOptimizer, ABC):
    """Steps each tensor by itself; a refused step changes no weight, no moment and no count."""

    def __init__(self, groups: Groups, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas})
        self.found_inf: Tensor | None = None

    def attach(
        self,
        fragments: Sequence[Fragment],
        names: Sequence[tuple[Tensor, Sequence[str]]],
        shapes: Mapping[str, Sequence[int]],
        ranks: Ranks,
    ) -> None:
        """Take the parameters that the stepped tensors consist of; all ranks call it.

        Steps do nothing before: only then do the tensors get their state.

        Args:
            fragments: all that this rank steps.
            names: the tensors, the same on all ranks, and each one's parameters on any rank.
            shapes: of the parameters, with an axis for heads if there are any.
        """
        self.ranks = ranks
        for owner, its_names in names:
            parts = [fragment for fragment in fragments if fragment.owner is owner]
            self.take(owner, parts, {name: shapes[name] for name in its_names})

    def take(
        self, owner: Tensor, parts: list[Fragment], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        """Take a tensor that is stepped, with this rank's parts of it, for `attach`."""

    def keeps(self, owner: Tensor, kind: str) -> bool:
        """Whether a tensor has such state; known once `attach` was called."""
        return True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply `grad` of each tensor that has state and a gradient; `closure` is not called.

        Gradients are overwritten.
        """
        for group in self.param_groups:
            for owner in group["params"]:
                entry = self.state[owner]
                if owner.grad is None or "step" not in entry:
                    continue
                applied = torch.ones_like(entry["step"])
                if self.found_inf is not None:
                    refused = self.found_inf.to(owner.device)
                    applied -= refused
                    owner.grad.masked_fill_(refused.bool(), 0.0)  # NaN would spread to the moments
                entry["step"] += applied
                self._apply(owner, owner.grad, entry, group, applied)

    @abstractmethod
    def _apply(
        self, owner: Tensor, grad: Tensor, entry: dict[str, Any], group: dict[str, Any], on: Tensor
    ) -> None:
        """One step; `on` is 1, or 0 if nothing may change."""


class HalfMomentAdamW(GuardedOptimizer):
    """AdamW that keeps its first moment in the precision of its state, and computes in fp32."""

    def _apply(
        self, owner: Tensor, grad: Tensor, entry: dict[str, Any], group: dict[str, Any], on: Tensor
    ) -> None:
        beta1, _ = group["betas"]
        count, rate = entry["step"].clamp(min=1.0), group["lr"] * on
        for weight, slope, first, second in pieces(
            owner, grad, entry["exp_avg"], entry["exp_avg_sq"]
        ):
            moved = scaled_momentum(slope, first, second, group["betas"], count, on)
            weight.mul_(1.0 - rate * group["weight_decay"])
            weight.sub_(moved.mul_(rate / (1.0 - beta1**count)))


def scaled_momentum(
    slope: Tensor,
    first: Tensor,
    second: Tensor,
    betas: tuple[float, float],
    count: Tensor,
    on: Tensor,
) -> Tensor:
    """Adam's moments, updated in place; returns the first over the root of the corrected second
    (n,).

    Args:
        count: steps, including this one.
        on: 1, or 0 if nothing may change.
    """
    beta1, beta2 = betas
    moved = torch.lerp(first.float(), slope, (1.0 - beta1) * on)
    first.copy_(moved)
    second.copy_(torch.lerp(second, slope.square(), (1.0 - beta2) * on))
    deviation = (second / (1.0 - beta2**count)).sqrt_().add_(1e-8)
    return moved.div_(deviation)


def pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Flat views of tensors of one size, `PIECE` elements at a time."""
    return zip(*(torch.split(tensor.view(-1), PIECE) for tensor in tensors), strict=True)


def views_of(fragments: Iterable[Fragment], flat: Tensor) -> list[Tensor]:
    """Each fragment's elements (n,) of a flat tensor, as views."""
    return [flat.view(-1).narrow(0, f.offset, f.weight.numel()) for f in fragments]
