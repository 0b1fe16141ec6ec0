"""Muon (https://kellerjordan.github.io/posts/muon): momentum of each matrix, made orthogonal."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from vit_ray.train.engine.fragments import Fragment
from vit_ray.train.optim.guarded import Groups, HalfMomentAdamW, pieces, views_of

# The defaults of torch.optim.Muon.
MOMENTUM: Final = 0.95
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
ITERATIONS: Final = 5
LEAST_NORM: Final = 1e-7
# Elements that are gathered at a time: 256 MiB in fp32, and as much for the results.
GATHERED: Final = 1 << 26


class Matrices(NamedTuple):
    """A parameter that consists of one matrix or, in attention, of those of q, k and v."""

    name: str
    start: int
    """Its start in the gathered elements."""
    shape: tuple[int, int, int]
    """(matrices, outputs, inputs)."""

    @classmethod
    def of(cls, name: str, start: int, shape: Sequence[int]) -> "Matrices":
        """`shape`: (outputs, inputs), with axes for heads in attention."""
        # (3, heads, head width, inputs); (heads, head width, inputs); (outputs, heads, head width)
        count = shape[0] if len(shape) == 4 else 1
        inputs = math.prod(shape[1:]) if name.endswith(".out.weight") else shape[-1]
        return cls(name, start, (count, math.prod(shape) // count // inputs, inputs))

    @property
    def end(self) -> int:
        """Where the next one starts."""
        return self.start + math.prod(self.shape)

    @property
    def macs(self) -> int:
        """Multiply-adds of making each of them orthogonal."""
        count, *sides = self.shape
        short, long = sorted(sides)
        return count * ITERATIONS * short**2 * (2 * long + short)


def gathers(shapes: Mapping[str, Sequence[int]]) -> list[list[Matrices]]:
    """The matrices of one tensor that is stepped, by which are gathered together.

    Args:
        shapes: of its parameters in their order, with axes for heads in attention.
    """
    found: list[list[Matrices]] = []
    end = GATHERED
    for name, shape in shapes.items():
        if end + math.prod(shape) > GATHERED:
            found.append([])
            end = 0
        found[-1].append(Matrices.of(name, end, shape))
        end = found[-1][-1].end
    return found


def busiest_macs(gathered: Sequence[Matrices], num_ranks: int) -> int:
    """Multiply-adds of the rank that has the most in this gather; the others wait for it."""
    each = [m.macs // m.shape[0] for m in gathered for _ in range(m.shape[0])]
    return max(sum(each[rank::num_ranks]) for rank in range(num_ranks))


class Muon(HalfMomentAdamW):
    """`torch.optim.Muon` with `match_rms_adamw` on hidden matrices, AdamW on everything else.

    The step of a matrix (outputs, inputs) is 0.2 sqrt(max(outputs, inputs)) times an orthogonal
    one, so that AdamW's rates and decay can be used (Liu et al., arXiv:2502.16982). Queries, keys
    and values are separate matrices. If ZeRO has cut them, whole matrices are summed up from the
    ranks' parts, each is made orthogonal on one rank, and the results are summed in the same way.
    """

    def __init__(self, groups: Groups, betas: tuple[float, float], hidden: Collection[str]) -> None:
        """`hidden`: names of the matrices' parameters, which are in separate groups."""
        super().__init__(groups, betas)
        self._hidden = frozenset(hidden)
        self._parts: dict[Tensor, dict[str, Fragment]] = {}
        self._gathers: dict[Tensor, list[list[Matrices]]] = {}

    def take(
        self, owner: Tensor, parts: list[Fragment], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        if self._hidden.intersection(shapes):
            self._gathers[owner] = gathers(shapes)
            self._parts[owner] = {fragment.name: fragment for fragment in parts}

    def keeps(self, owner: Tensor, kind: str) -> bool:
        """Hidden matrices only have momentum."""
        return kind != "exp_avg_sq" or owner not in self._gathers

    def _apply(
        self, owner: Tensor, grad: Tensor, entry: dict[str, Any], group: dict[str, Any], on: Tensor
    ) -> None:
        if owner not in self._gathers:
            super()._apply(owner, grad, entry, group, on)
            return
        for slope, kept in pieces(grad, entry["exp_avg"]):
            moved = torch.lerp(kept.float(), slope, (1.0 - MOMENTUM) * on)
            kept.copy_(moved)
            slope.lerp_(moved, MOMENTUM)  # Nesterov's
        for gathered in self._gathers[owner]:
            self._make_orthogonal(gathered, self._parts[owner], grad)
        rate = group["lr"] * on
        for weight, update in pieces(owner, grad):
            weight.mul_(1.0 - rate * group["weight_decay"]).sub_(update.mul_(rate))

    def _make_orthogonal(
        self, gathered: Sequence[Matrices], parts: Mapping[str, Fragment], update: Tensor
    ) -> None:
        """In place, for this rank's elements of some parameters."""
        ranks = self.ranks
        whole = torch.zeros(gathered[-1].end, device=ranks.device)
        mine = [(m.start + parts[m.name].start, parts[m.name]) for m in gathered if m.name in parts]
        views = views_of([fragment for _, fragment in mine], update)
        for (start, _), view in zip(mine, views, strict=True):
            whole[start : start + len(view)].copy_(view)
        ranks.add(whole)
        done, number = torch.zeros_like(whole), 0
        for m in gathered:
            before, after = (values[m.start : m.end].view(m.shape) for values in (whole, done))
            for matrix, into in zip(before, after, strict=True):
                if number % ranks.size == ranks.rank:
                    into.copy_(orthogonal(matrix)).mul_(0.2 * math.sqrt(max(matrix.shape)))
                number += 1
        ranks.add(done)
        for (start, _), view in zip(mine, views, strict=True):
            view.copy_(done[start : start + len(view)])


def orthogonal(matrix: Tensor) -> Tensor:
    """Near U V^T of the matrix's U S V^T, in bf16: singular values between 0.5 and 1.5.

    By Newton and Schulz's iteration x -> a x + (b x x^T + c (x x^T)^2) x.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
