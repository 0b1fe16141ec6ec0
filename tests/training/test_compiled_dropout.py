"""Keyed random numbers compiled to machine code by inductor, which is on by default on GPUs.

All of it runs in processes of their own: code that writes out of bounds ends the process, or
changes what another test reads.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from tests.models.small import FAMILIES, small_model, some_images
from tests.training.ranks import run_ranks
from vit_ray.config.training_sections import TrainConfig
from vit_ray.models.build import recompute
from vit_ray.models.counter_random import line_keys, random_words, sample_keys
from vit_ray.models.layers import StochasticDepth, keyed_dropout
from vit_ray.models.masked import draw_corruption
from vit_ray.training.engine import compile_model
from vit_ray.training.objective import draw_mixing

NUM_CALLS = 200
# The product of a constant of 10 digits or more and a loop's variable, in either order.
FOLDED_PRODUCT = re.compile(r"\d{10,}L*\)*\s*\*\s*\(*[a-z]*x\d|x\d+\)*\s*\*\s*\(*-?\d{10,}")


def compiled_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="inductor")


def draws() -> dict[str, Callable[[Tensor], Any]]:
    """Everything that is drawn from keys, as a function of samples (B,)."""
    mixes = TrainConfig(mixup=0.8, cutmix=1.0)
    depth = StochasticDepth(0.5).train()
    return {
        "dropout": lambda s: keyed_dropout(torch.ones(len(s), 7, 151), sample_keys(s, 3), 0.1),
        "masked patches": lambda s: draw_corruption(s, 37, 0, 3),
        "words": lambda s: random_words(sample_keys(s, 3), 1001),
        "lines": lambda s: line_keys(sample_keys(s, 3), 37),
        "stochastic depth": lambda s: depth(torch.ones(len(s), 33), sample_keys(s, 3)),
        "mixing": lambda s: draw_mixing(s, (9, 11), mixes, 0, 3),
    }


def compiled_draws(rank: int, names: list[str]) -> dict[str, tuple[bool, list[str]]]:
    """By draw: whether all bits are those of eager code, and products folded into an index."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in names:
        draw = draws()[name]
        compiled = compiled_alone(draw)
        samples = torch.randint(2**40, (6,), generator=generator)
        _, code = run_and_get_code(compiled, samples)
        assert "cpp_fused" in "".join(code)
        equal = True
        for _ in range(NUM_CALLS):
            samples = torch.randint(2**40, (6,), generator=generator)
            pairs = zip(compiled(samples), draw(samples), strict=True)
            if name == "mixing":  # powers and cosines, which compiled code rounds elsewhere
                equal &= all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs)
            else:
                equal &= all(torch.equal(a, b) for a, b in pairs)
        found[name] = (equal, FOLDED_PRODUCT.findall("".join(code)))
    return found


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("names", [list(draws())[:2], list(draws())[2:]])
def test_compiled_draws_are_bit_for_bit_those_of_eager_code_and_fold_no_product(names):
    assert run_ranks(1, compiled_draws, names) == [dict.fromkeys(names, (True, []))]


def test_the_search_for_folded_products_finds_them():
    folded = "auto tmp1 = (-7046029254386353131L) + ((-7046029254386353131L)*x1);"
    assert FOLDED_PRODUCT.search(folded)
    assert FOLDED_PRODUCT.search("tmp0 = 7046029254386353131*x1")
    assert not FOLDED_PRODUCT.search("in_ptr0[static_cast<int64_t>(x1 + 37824L*x0)]")


def family_difference(rank: int, family: str) -> tuple[float, list[str]]:
    """Compiled as by default on a GPU, against eager: outputs and gradients; folded products."""
    rates = {"dropout": 0.1, "stochastic_depth": 0.1}
    takes = {"ViT": rates, "R+ViT": rates, "Axial-ViT": {"dropout": 0.1}}
    options = takes.get(family, {})
    keys = (sample_keys(torch.arange(4) * 300_000_000, 0, 0),) if options else ()
    images, found = some_images(4), []
    code: list[str] = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model = small_model(family, **options).train()
        if compiles:
            compile_model(model, "inductor", may_fail=False)
        recompute(model, int(family == "ViT"))
        model.zero_grad()

        def step(model: nn.Module = model) -> Tensor:
            logits: Tensor = model(images, *keys)
            logits.square().sum().backward()
            return logits

        logits, code = run_and_get_code(step)
        found.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(tensor.isfinite().all() for tensors in found for tensor in tensors)
    norms = [(float((a - b).norm()), float(b.norm())) for a, b in zip(*found, strict=True)]
    largest = max(difference / max(norm, 1e-6) for difference, norm in norms)
    assert "cpp_fused" in "".join(code)
    return largest, FOLDED_PRODUCT.findall("".join(code))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_compiled_as_it_does_by_default_on_a_gpu(family):
    ((largest, folded),) = run_ranks(1, family_difference, family)
    assert largest < 1e-3
    assert folded == []
