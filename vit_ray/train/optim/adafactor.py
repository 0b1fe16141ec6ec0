"""Adafactor of "Scaling ViT" (Zhai et al., arXiv:2106.04560, section 3.5)."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_ray.train.engine.fragments import Fragment
from vit_ray.train.optim.guarded import (
    PIECE,
    Groups,
    GuardedOptimizer,
    Ranks,
    pieces,
    views_of,
)

FULL, ROWS, COLUMNS = "exp_avg_sq", "exp_avg_sq_by_row", "exp_avg_sq_by_column"
"""Kinds of second moment, as checkpoints name them."""
OLD_ROWS: Final = "exp_avg_sq_rows"
"""Key in versions that treated a kernel as one matrix (outputs, everything else)."""
# From big_vision's `scale_by_adafactor`, with which "Scaling ViT" was trained.
LEAST_SIDE: Final = 32
DECAY_EXPONENT: Final = 0.8
TINY_SQUARE: Final = 1e-30


class Adafactor(GuardedOptimizer):
    """A second moment of rows and columns for each matrix, and momentum over the scaled gradient.

    Like big_vision's `scale_by_adafactor` on optax: no update clipping, no rate by the weights'
    size, and the second moment's decay grows as 1 - t^-0.8 up to `betas[1]`. The two largest axes
    of a parameter are rows and columns if the second largest has 32 elements or more; over other
    axes (heads, positions of a kernel) there is a matrix for each index. Other parameters keep
    their whole second moment. Row and column sums of parameters that ZeRO has cut are added over
    ranks.
    """

    def __init__(self, groups: Groups, betas: tuple[float, float]) -> None:
        super().__init__(groups, betas)
        self._moments: dict[Tensor, _SecondMoments] = {}

    def take(
        self, owner: Tensor, parts: list[Fragment], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self._moments[owner] = _SecondMoments(parts, shapes, owner.device, self.ranks)

    def second_moments(self) -> list[tuple[str, Fragment]]:
        """Kind and values of every parameter's second moment, the same on all ranks."""
        return [found for moments in self._moments.values() for found in moments.named]

    def _apply(
        self, owner: Tensor, grad: Tensor, entry: dict[str, Any], group: dict[str, Any], on: Tensor
    ) -> None:
        moments = self._moments[owner]
        beta1, most = group["betas"]
        decay = (1.0 - entry["step"].clamp(min=1.0) ** -DECAY_EXPONENT).clamp(max=most)
        moments.update(grad, (1.0 - decay) * on)
        moments.scale_(grad)
        rate = group["lr"] * on
        for weight, scaled, kept in pieces(owner, grad, entry["exp_avg"]):
            momentum = torch.lerp(kept.float(), scaled, (1.0 - beta1) * on)
            kept.copy_(momentum)
            weight.mul_(1.0 - rate * group["weight_decay"]).sub_(momentum.mul_(rate))


class Layout(NamedTuple):
    """A parameter in its order as (groups, rows, between, columns, within)."""

    groups: int
    rows: int
    between: int
    columns: int
    within: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Layout | None":
        """Rows and columns are the two largest axes; None if the moment is kept whole."""
        order = sorted(range(len(shape)), key=lambda axis: shape[axis])
        if len(shape) < 2 or shape[order[-2]] < LEAST_SIDE:
            return None
        i, j = sorted(order[-2:])
        products = [math.prod(shape[a:b]) for a, b in ((0, i), (i + 1, j), (j + 1, len(shape)))]
        return cls(products[0], shape[i], products[1], shape[j], products[2])

    @property
    def num_sums(self) -> tuple[int, int]:
        """Elements of the sums over columns, and of those over rows."""
        groups, rows, between, columns, within = self
        return groups * rows * between * within, groups * between * columns * within


class _Region(NamedTuple):
    """Whole rows, or whole groups if there are several, around a range of elements."""

    groups: slice
    rows: slice
    before: int
    """Elements of the region before the range."""
    after: int

    @classmethod
    def around(cls, start: int, count: int, layout: Layout) -> "_Region":
        line = math.prod(layout[2:])
        unit = line if layout.groups == 1 else layout.rows * line
        first, last = start // unit, -(-(start + count) // unit)
        before, after = start - first * unit, last * unit - start - count
        if layout.groups == 1:
            return cls(slice(0, 1), slice(first, last), before, after)
        return cls(slice(first, last), slice(0, layout.rows), before, after)


class _Sums(NamedTuple):
    """Squares, or their means, of the parameters of one layout."""

    of_rows: Tensor
    """(parameters, groups, rows, between, within)."""
    of_columns: Tensor
    """(parameters, groups, between, columns, within)."""


class _Work(NamedTuple):
    """Parts of parameters of one layout that are computed together."""

    layout: Layout
    slots: slice
    """Which of the layout's parameters."""
    region: _Region
    fragments: list[Fragment]


class _SecondMoments:
    """Of the parameters in one tensor that is stepped, as one vector, so that one sum adds all."""

    def __init__(
        self,
        fragments: list[Fragment],
        shapes: Mapping[str, Sequence[int]],
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        by_layout: dict[Layout | None, list[str]] = defaultdict(list)
        for name, shape in shapes.items():
            by_layout[Layout.of(shape)].append(name)
        whole = {name: math.prod(shapes[name]) for name in by_layout.pop(None, [])}
        layouts = {layout: names for layout, names in by_layout.items() if layout is not None}
        num_sums = [len(names) * sum(layout.num_sums) for layout, names in layouts.items()]
        # The first step that is applied replaces them; a step that is refused divides by them.
        self._values = torch.full((sum(whole.values(), sum(num_sums)),), TINY_SQUARE, device=device)
        self._sums = torch.zeros_like(self._values)
        self._counts = torch.ones_like(self._values)
        self._ranks = ranks
        self._kept, full = _laid_out(self._values, layouts, whole)
        self._summed, full_sums = _laid_out(self._sums, layouts, whole)
        for layout, counts in _laid_out(self._counts, layouts, whole)[0].items():
            counts.of_rows.fill_(layout.columns)
            counts.of_columns.fill_(layout.rows)
        self.named = [(FULL, Fragment(name, 0, v, v, 0)) for name, v in full.items()]
        for layout, names in layouts.items():
            for kind, sums in zip((ROWS, COLUMNS), self._kept[layout], strict=True):
                parts = zip(names, sums.flatten(1), strict=True)
                self.named += [(kind, Fragment(name, 0, v, v, 0)) for name, v in parts]
        self._fragments = [f for f in fragments if f.name in full]
        ends = [(f.start, f.start + len(f.weight)) for f in self._fragments]
        pairs = list(zip(self._fragments, ends, strict=True))
        self._full = [full[f.name][first:last] for f, (first, last) in pairs]
        self._full_sums = [full_sums[f.name][first:last] for f, (first, last) in pairs]
        mine = {f.name: f for f in fragments if f.name not in full}
        self._work = [
            work for layout, names in layouts.items() for work in _work(layout, names, mine)
        ]

    def update(self, gradient: Tensor, share: Tensor) -> None:
        """Move by `share` towards the mean squares of the gradient; each rank has a part of it."""
        flat = gradient.view(-1)
        self._sums.zero_()
        for work in self._work:
            squares = _stacked(work, flat).square_()
            sums = self._summed[work.layout]
            sums.of_rows[work.slots, work.region.groups, work.region.rows] += squares.sum(4)
            sums.of_columns[work.slots, work.region.groups] += squares.sum(2)
        if self._full:
            slopes = views_of(self._fragments, flat)
            torch._foreach_addcmul_(self._full_sums, slopes, slopes)
        self._ranks.add(self._sums)
        means = self._sums.div_(self._counts).add_(TINY_SQUARE)
        self._values.copy_(torch.lerp(self._values, means, share))

    def scale_(self, gradient: Tensor) -> None:
        """Divide the gradient by the root of its second moment."""
        flat = gradient.view(-1)
        for work in self._work:
            region, kept = work.region, self._kept[work.layout]
            of_rows = kept.of_rows[work.slots, region.groups]
            by_row = (of_rows / of_rows.mean(2, keepdim=True)).rsqrt_()[:, :, region.rows]
            by_column = kept.of_columns[work.slots, region.groups].rsqrt()
            scaled = _stacked(work, flat).mul_(by_row.unsqueeze(4)).mul_(by_column.unsqueeze(2))
            runs = views_of(work.fragments, flat)
            ends = region.before + runs[0].numel()
            torch._foreach_copy_(runs, list(scaled.flatten(1)[:, region.before : ends]))
        if self._full:
            torch._foreach_mul_(views_of(self._fragments, flat), torch._foreach_rsqrt(self._full))


def _laid_out(
    vector: Tensor, layouts: Mapping[Layout, Sequence[str]], whole: Mapping[str, int]
) -> tuple[dict[Layout, _Sums], dict[str, Tensor]]:
    """Views of a vector: by layout, and by name for parameters that are kept whole."""
    sizes = [len(names) * size for layout, names in layouts.items() for size in layout.num_sums]
    parts = iter(torch.split(vector, [*sizes, *whole.values()]))
    found = {}
    for layout, names in layouts.items():
        groups, rows, between, columns, within = layout
        of_rows = next(parts).view(len(names), groups, rows, between, within)
        of_columns = next(parts).view(len(names), groups, between, columns, within)
        found[layout] = _Sums(of_rows, of_columns)
    return found, dict(zip(whole, parts, strict=True))


def _work(
    layout: Layout, names: Sequence[str], fragments: Mapping[str, Fragment]
) -> Iterator[_Work]:
    """The rank's fragments: whole neighbours together, up to `PIECE`, others alone."""
    size = math.prod(layout)
    most = max(1, PIECE // size)
    run: list[Fragment] = []
    for slot, name in enumerate([*names, ""]):
        fragment = fragments.get(name)
        is_whole = fragment is not None and len(fragment.weight) == size
        if run and (not is_whole or len(run) == most):
            region = _Region.around(0, size, layout)
            yield _Work(layout, slice(slot - len(run), slot), region, run)
            run = []
        if fragment is not None and is_whole:
            run.append(fragment)
        elif fragment is not None:
            region = _Region.around(fragment.start, len(fragment.weight), layout)
            yield _Work(layout, slice(slot, slot + 1), region, [fragment])


def _stacked(work: _Work, flat: Tensor) -> Tensor:
    """A copy (parameters, groups, rows, between, columns, within) of a region, padded with 0."""
    region, layout = work.region, work.layout
    runs = torch.stack(views_of(work.fragments, flat))
    if region.before or region.after:
        runs = F.pad(runs, (region.before, region.after))
    num_groups, num_rows = (s.stop - s.start for s in (region.groups, region.rows))
    return runs.view(len(work.fragments), num_groups, num_rows, *layout[2:])
