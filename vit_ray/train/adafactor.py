"""Optimizers with small state: AdamW's first moment in bf16, and Adafactor of "Scaling ViT".

Both are as Zhai et al. (arXiv:2106.04560, section 3.5) have them, in torch's operations and not in
one fused kernel. As `StepGuard` asks, `found_inf` refuses a step without the host waiting for it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_ray.train.fragments import Fragment

Groups = list[dict[str, Any]]
FULL, ROWS, COLUMNS = "exp_avg_sq", "exp_avg_sq_rows", "exp_avg_sq_columns"
"""Kinds of second moment, as checkpoints name them."""
# Elements that are stepped at a time: temporary memory is 256 MB at most.
PIECE: Final = 1 << 24
# Of big_vision's `scale_by_adafactor`, with which "Scaling ViT" was trained.
LEAST_SIDE: Final = 32
DECAY_EXPONENT: Final = 0.8
TINY_SQUARE: Final = 1e-30


class _GuardedOptimizer(torch.optim.Optimizer, ABC):
    """Steps each tensor by itself; a refused step changes no weight, no moment and no count."""

    def __init__(self, groups: Groups, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas})
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply `grad` of each tensor that has state and a gradient; `closure` is not called."""
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
        """One step; `on` is 1, or 0 where nothing may change."""


class HalfMomentAdamW(_GuardedOptimizer):
    """AdamW that keeps its first moment in whatever precision its state has, and works in fp32."""

    def _apply(
        self, owner: Tensor, grad: Tensor, entry: dict[str, Any], group: dict[str, Any], on: Tensor
    ) -> None:
        beta1, beta2 = group["betas"]
        count, rate = entry["step"].clamp(min=1.0), group["lr"] * on
        whole = (owner, grad, entry["exp_avg"], entry["exp_avg_sq"])
        for weight, slope, first, second in zip(
            *(tensor.view(-1).split(PIECE) for tensor in whole), strict=True
        ):
            moved = _moved(first.float(), slope, (1.0 - beta1) * on)
            first.copy_(moved)
            second.copy_(_moved(second, slope.square(), (1.0 - beta2) * on))
            deviation = (second / (1.0 - beta2**count)).sqrt_().add_(1e-8)
            weight.mul_(1.0 - rate * group["weight_decay"])
            weight.sub_(moved.div_(deviation).mul_(rate / (1.0 - beta1**count)))


class Adafactor(_GuardedOptimizer):
    """A second moment of rows and columns for each matrix, and momentum over what it scales.

    As big_vision's `scale_by_adafactor`: no update clipping, no rate by the weights' size, and the
    second moment's decay grows as 1 - t^-0.8 up to `betas[1]`. A kernel is the matrix (outputs,
    everything else), queries, keys and values together one. What has a side below 32 keeps its
    whole second moment. Row and column sums of matrices that ZeRO has cut are added over ranks.
    """

    def __init__(self, groups: Groups, betas: tuple[float, float]) -> None:
        super().__init__(groups, betas)
        self._moments: dict[Tensor, _SecondMoments] = {}

    def attach(
        self,
        fragments: Iterable[Fragment],
        names: Sequence[tuple[Tensor, Sequence[str]]],
        shapes: Mapping[str, Sequence[int]],
        add_over_ranks: Callable[[Tensor], None],
    ) -> None:
        """Say what the tensors that are stepped consist of; until then steps do nothing.

        Args:
            fragments: all that this rank steps.
            names: the tensors, the same on all ranks, and each one's parameters on any rank.
            shapes: of the parameters.
            add_over_ranks: in place; called once for each tensor in a step.
        """
        parts: dict[int, list[Fragment]] = {}
        for fragment in fragments:
            parts.setdefault(id(fragment.owner), []).append(fragment)
        for owner, its_names in names:
            its_shapes = {name: shapes[name] for name in its_names}
            self._moments[owner] = _SecondMoments(
                parts.get(id(owner), []), its_shapes, owner.device, add_over_ranks
            )

    def second_moments(self) -> list[tuple[str, Fragment]]:
        """Kind and values of every parameter's second moment, the same on all ranks."""
        return [found for moments in self._moments.values() for found in moments.named()]

    def _apply(
        self, owner: Tensor, grad: Tensor, entry: dict[str, Any], group: dict[str, Any], on: Tensor
    ) -> None:
        moments = self._moments.get(owner)
        if moments is None:
            return
        beta1, most = group["betas"]
        decay = (1.0 - entry["step"].clamp(min=1.0) ** -DECAY_EXPONENT).clamp(max=most)
        moments.update(grad, (1.0 - decay) * on)
        rate = group["lr"] * on
        for fragment, scaled in moments.scaled(grad):
            kept = fragment.state(self.state, "exp_avg")
            momentum = _moved(kept.float(), scaled, (1.0 - beta1) * on)
            kept.copy_(momentum)
            fragment.weight.mul_(1.0 - rate * group["weight_decay"]).sub_(momentum.mul_(rate))


def _moved(mean: Tensor, towards: Tensor, share: Tensor) -> Tensor:
    """mean + share x (towards - mean), for a `share` that only the device knows."""
    return torch.lerp(mean, towards, share)


@dataclass(frozen=True)
class _Matrix:
    """A parameter as a matrix, and where its second moment lies: in rows and columns, or whole."""

    height: int
    width: int
    rows: Tensor
    """(height,), or (height * width,) where it is whole."""
    columns: Tensor | None

    def lines_of(self, fragment: Fragment, values: Tensor) -> tuple[slice, slice, Tensor]:
        """Whole rows around a fragment's values (n,): which, where in them, and (rows, width)."""
        first, skip = divmod(fragment.start, self.width)
        padded = F.pad(values, (skip, -(skip + len(values)) % self.width)).view(-1, self.width)
        return slice(first, first + len(padded)), slice(skip, skip + len(values)), padded

    def add_squares(self, fragment: Fragment, gradient: Tensor) -> None:
        squares = gradient.square()
        if self.columns is None:
            self.rows[fragment.start : fragment.start + len(gradient)] += squares
            return
        rows, _, lines = self.lines_of(fragment, squares)
        self.rows[rows] += lines.sum(1)
        self.columns.add_(lines.sum(0))

    def scaled(self, fragment: Fragment, gradient: Tensor) -> Tensor:
        """The gradient over the root of its second moment."""
        if self.columns is None:
            whole = self.rows[fragment.start : fragment.start + len(gradient)]
            return gradient * whole.rsqrt()
        rows, inside, lines = self.lines_of(fragment, gradient)
        by_row = (self.rows[rows] / self.rows.mean()).rsqrt()
        return (lines * by_row[:, None] * self.columns.rsqrt()).view(-1)[inside]


class _SecondMoments:
    """Of the parameters in one tensor that is stepped, as one vector, so that one sum adds all."""

    def __init__(
        self,
        fragments: list[Fragment],
        shapes: Mapping[str, Sequence[int]],
        device: torch.device,
        add_over_ranks: Callable[[Tensor], None],
    ) -> None:
        sides = {name: matrix_sides(shape) for name, shape in shapes.items()}
        count = sum(h + w if is_factored(h, w) else h * w for h, w in sides.values())
        self._fragments, self._add_over_ranks = fragments, add_over_ranks
        # The first step that is applied replaces them; one that is refused divides by them.
        self._values = torch.full((count,), TINY_SQUARE, device=device)
        self._sums = torch.zeros_like(self._values)
        self._counts = torch.ones_like(self._values)
        self._kept = _laid_out(sides, self._values)
        self._summed = _laid_out(sides, self._sums)
        for matrix in _laid_out(sides, self._counts).values():
            if matrix.columns is not None:
                matrix.rows.fill_(matrix.width)
                matrix.columns.fill_(matrix.height)

    def update(self, gradient: Tensor, share: Tensor) -> None:
        """Move by `share` towards the mean squares of the gradient; each rank has a part of it."""
        self._sums.zero_()
        for fragment, part in self._parts(gradient):
            self._summed[fragment.name].add_squares(fragment, part)
        self._add_over_ranks(self._sums)
        means = self._sums.div_(self._counts).add_(TINY_SQUARE)
        self._values.copy_(_moved(self._values, means, share))

    def scaled(self, gradient: Tensor) -> Iterable[tuple[Fragment, Tensor]]:
        for fragment, part in self._parts(gradient):
            yield fragment, self._kept[fragment.name].scaled(fragment, part)

    def named(self) -> Iterable[tuple[str, Fragment]]:
        for name, matrix in self._kept.items():
            if matrix.columns is None:
                yield FULL, Fragment(name, 0, matrix.rows, matrix.rows, 0)
            else:
                yield ROWS, Fragment(name, 0, matrix.rows, matrix.rows, 0)
                yield COLUMNS, Fragment(name, 0, matrix.columns, matrix.columns, 0)

    def _parts(self, gradient: Tensor) -> Iterable[tuple[Fragment, Tensor]]:
        flat = gradient.reshape(-1)
        for fragment in self._fragments:
            yield fragment, flat.narrow(0, fragment.offset, fragment.weight.numel())


def _laid_out(sides: Mapping[str, tuple[int, int]], vector: Tensor) -> dict[str, _Matrix]:
    """Views of a vector, by parameter."""
    found, start = {}, 0
    for name, (height, width) in sides.items():
        sizes = [height, width] if is_factored(height, width) else [height * width]
        views = torch.split(vector[start : start + sum(sizes)], sizes)
        found[name] = _Matrix(height, width, views[0], views[1] if len(views) > 1 else None)
        start += sum(sizes)
    return found


def matrix_sides(shape: Sequence[int]) -> tuple[int, int]:
    """A parameter as a matrix: outputs, and all the rest."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def is_factored(height: int, width: int) -> bool:
    """Whether rows and columns stand for the whole second moment."""
    return min(height, width) >= LEAST_SIDE
