"""Which images cause a step's gradient: the share of each image, and the images that make a spike.

With g_i of image i and the step's g = mean of g_i, the share of image i is <g_i, g> / (B |g|^2).
Shares sum to 1; an average image has 1 / B, and one that pulls against the others less than 0, so
that the images with large shares, of either sign, are the unusual ones. The products <g_i, g> are
the derivative of the losses along g, so that one forward-mode pass gives all.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_ray.models.axial import LineAttention
from vit_ray.models.encoder import Attention
from vit_ray.train.objective import LossFunction

MOST_ROUNDS: Final = 8
"""Rounds of leaving images out; each costs a gradient of nearly the whole batch."""
SPIKE_FACTOR: Final = 3.0
"""Ratio of the gradient norm to that of the steps before and after, from which on it is a spike. In
20 ordinary batches of 128 the largest ratio was 2.2, with culprits the smallest was 9.4
(`benchmarks/results/explained_spikes_cpu_2026-11-26.md`)."""
NEAR: Final = 1.5
"""Multiple of the usual norm: the norm left after a round must not exceed it. Two neighbouring
steps do not determine it more precisely, and a lower limit would remove one ordinary image after
another."""
MOST_CULPRITS: Final = 0.25
"""Share of a batch; if more images would have to be left out, single ones are not the cause."""

Columns = tuple[Tensor, Tensor, Tensor]
"""Images uint8 (B, H, W, 3), labels int64 (B, L), samples int64 (B,)."""


class StepGradient(NamedTuple):
    """The gradient of a step's global batch with given weights."""

    losses: Tensor
    """float64 (B,)."""
    shares: Tensor
    """float64 (B,), of the gradient; they sum to 1."""
    norm: float
    """Before clipping."""
    by_name: dict[str, Tensor]
    """The gradient of each trained parameter, fp32."""
    largest_logit: float | None
    """Largest logit of attention before its softmax; None for a model without it, with attention
    along rows and columns, or with pooling by attention."""
    logit_layer: str
    """The layer with it; empty if there is none."""


def step_gradient(
    model: nn.Module,
    losses_of: LossFunction,
    columns: Columns,
    step: int,
    images_per_pass: int = 64,
) -> StepGradient:
    """Gradient, losses and shares of a batch, in fp32 whatever the training's precision.

    Args:
        model: with fp32 weights, in training mode.
        losses_of: as from `make_image_losses`, for a recipe in fp32.
        step: 0-based.
        images_per_pass: even if images are mixed, so that partners are together.
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    parts = list(zip(*(torch.split(column, images_per_pass) for column in columns), strict=True))
    size = len(columns[2])

    def losses(weights: Mapping[str, Tensor], part: Columns) -> Tensor:
        def module(*args: Any, **options: Any) -> Any:
            return torch.func.functional_call(model, dict(weights), args, options)

        return losses_of(module, *part, step)  # type: ignore[arg-type]

    gradient = {name: torch.zeros_like(weight) for name, weight in trained.items()}
    found, logits = [], dict[str, float]()
    with _noted_logits(model, logits):
        for part in parts:
            weights = {name: w.clone().requires_grad_() for name, w in trained.items()}
            its = losses(weights, part)
            found.append(its.detach().double())
            grads = torch.autograd.grad(its.sum() / size, list(weights.values()), allow_unused=True)
            for name, grad in zip(weights, grads, strict=True):
                if grad is not None:
                    gradient[name] += grad
    # The fused kernels of attention have no forward-mode derivative.
    with sdpa_kernel(SDPBackend.MATH):
        products = [
            torch.func.jvp(partial(losses, part=part), (trained,), (gradient,))[1].detach()
            for part in parts
        ]
    square = sum(float(grad.double().square().sum()) for grad in gradient.values())
    shares = torch.cat(products).double() / (size * square if square else 1.0)
    if any(isinstance(module, LineAttention) for module in model.modules()):
        logits.clear()  # these are not among them
    layer = max(logits, key=lambda name: logits[name], default="")
    return StepGradient(
        torch.cat(found), shares, math.sqrt(square), gradient, logits.get(layer), layer
    )


@contextlib.contextmanager
def _noted_logits(model: nn.Module, logits: dict[str, float]) -> Iterator[None]:
    """Inside the block, the largest attention logit of each layer is kept in `logits`."""

    @torch.no_grad()
    def note(name: str, of: Attention, _: nn.Module, __: Any, output: Sequence[Tensor]) -> None:
        q, k = (x.view(*x.shape[:-1], of.num_heads, -1).transpose(1, 2) for x in output[:2])
        found = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        if of.relative is not None:
            found = found + of.relative(q)
        logits[name] = max(logits.get(name, -math.inf), float(found.amax()))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                hook = module.qkv.register_forward_hook(partial(note, name, module))
                hooks.callback(hook.remove)
        yield


def find_culprits(
    measure: Callable[[list[int]], StepGradient],
    step: StepGradient,
    usual: float,
    unit: int = 1,
) -> list[int] | None:
    """The images without which the gradient of a step is not larger than usual.

    Works in rounds: each leaves out the fewest images, by their shares, without which the gradient
    would be small enough along its own direction, and measures the rest again. While one image
    dominates a gradient, the others cannot be judged.

    Args:
        measure: gives the gradient of the images at only some places of the batch.
        usual: norm of the gradient of the steps before and after, with the same weights.
        unit: images that belong together: 2 if they are mixed in pairs.

    Returns:
        Places in the batch, in the order found; empty if the step's norm is below `SPIKE_FACTOR`
        times the usual one; None if it is above, but more than a quarter of the batch, or more than
        `MOST_ROUNDS` rounds, would be needed.
    """
    found: list[int] = []
    if step.norm < SPIKE_FACTOR * usual:
        return found
    size, places, now = len(step.shares), list(range(len(step.shares))), step
    for _ in range(MOST_ROUNDS):
        shares = now.shares.view(-1, unit).sum(1)
        order, units = torch.argsort(shares, descending=True), len(shares)
        left = now.norm * (1.0 - shares[order].cumsum(0)[:-1])
        left *= units / (units - torch.arange(1, units))
        enough = torch.nonzero(left <= NEAR * usual)
        chosen = order[: int(enough[0]) + 1].tolist() if len(enough) else range(units)
        out = [places[one * unit + i] for one in chosen for i in range(unit)]
        found += out
        if len(found) > MOST_CULPRITS * size:
            return None
        places = [place for place in places if place not in out]
        now = measure(places)
        if now.norm <= NEAR * usual:
            return found
    return None


def second_moment_rms(
    gradient: Mapping[str, Tensor], second: Mapping[str, Tensor], scale: float
) -> dict[str, float]:
    """Root mean square of g / sqrt(v) of each parameter, the largest first.

    About 1 if Adam's second moment v is as large as the present squared gradients; far above 1, v
    is out of date, and the update too large (Wortsman et al., arXiv:2304.13013, saw loss spikes
    follow values above 2.3 at the patch embedding).

    Args:
        second: with bias correction.
        scale: of clipping.
    """
    found = {
        name: float(((scale * gradient[name]) ** 2 / v.clamp(min=1e-16)).mean().sqrt())
        for name, v in second.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))
