"""Stochastic depth: whole branches of whole images, at rates that rise with the block."""

import copy
from typing import Any

import pytest
import torch
from scipy import stats
from torch._dynamo.testing import CompileCounter

from tests.models.small import TINY_VIT, some_images
from vit_ray.models import build_model
from vit_ray.models.counter_random import sample_keys
from vit_ray.models.layers import StochasticDepth


def vit(depth: int, rate: float, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**TINY_VIT, "depth": depth}
    model: Any = build_model("ViT", 5, 32, **sizes, stochastic_depth=rate, **options).train()
    torch.nn.init.normal_(model.head.weight)
    return model


@pytest.mark.parametrize(("rate", "is_keyed"), [(0.1, True), (0.5, True), (0.3, False)])
def test_images_are_dropped_at_the_rate_and_the_others_scaled_up(rate, is_keyed):
    layer, count = StochasticDepth(rate).train(), 20_000
    torch.manual_seed(3)
    keys = sample_keys(torch.arange(count), 0, 0) if is_keyed else None
    out = layer(torch.ones(count, 2, 3), keys).flatten(1)
    assert torch.equal(out, out[:, :1].expand_as(out))
    dropped = int((out[:, 0] == 0).sum())
    assert stats.binomtest(dropped, count, rate).pvalue > 1e-3
    assert float(out.max()) == pytest.approx(1 / (1 - rate), rel=1e-4)
    out = layer(torch.full((4096, 8), 1.5, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    # To the nearest of bfloat16's numbers.
    assert float(out.max()) == float(torch.tensor(1.5 / (1 - rate), dtype=torch.bfloat16))


def test_rates_rise_linearly_from_zero_as_in_the_paper():
    # Touvron et al. and timm: torch.linspace(0, rate, depth).
    rates = [float(b.stochastic_depth.levels) / 2**16 for b in vit(5, 0.3).blocks]
    assert rates == pytest.approx(torch.linspace(0, 0.3, 5).tolist(), abs=1e-5)
    assert not vit(1, 0.9).blocks[0].stochastic_depth.is_active


def test_a_dropped_branch_is_as_if_it_were_not_there():
    """Each image's output is one of the four models that lack branches of the last block."""
    model, images = vit(2, 0.5, pool="gap"), some_images(32)
    found = model(images, sample_keys(torch.arange(32), 0, 0))
    candidates = []
    for attention, mlp in ((2, 2), (2, 0), (0, 2), (0, 0)):  # kept branches count twice
        other = copy.deepcopy(model).eval()
        with torch.no_grad():
            for layer, factor in (
                (other.blocks[1].attention.out, attention),
                (other.blocks[1].mlp.contract, mlp),
            ):
                layer.weight.mul_(factor)
                layer.bias.mul_(factor)
            candidates.append(other(images))
    distances = torch.stack([(found - c).abs().amax(1) for c in candidates])
    assert float(distances.amin(0).max()) < 1e-5
    # The two branches are dropped independently: all four occur.
    assert set(distances.argmin(0).tolist()) == {0, 1, 2, 3}


def test_evaluation_and_state_dict_are_those_of_a_model_without():
    model, images = vit(2, 0.5).eval(), some_images()
    plain = vit(2, 0.0).eval()
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(model(images), plain(images))


def test_blocks_of_unlike_rates_compile_once():
    model = vit(4, 0.5)
    torch._dynamo.reset()
    counter = CompileCounter()
    keys = sample_keys(torch.arange(2), 0, 0)
    x = torch.randn(2, 17, 32)
    run = torch.compile(lambda block, x: block(x, keys), backend=counter)
    for block in list(model.blocks)[1:-1]:  # the last computes fewer tokens
        run(block, x)
    assert counter.frame_count == 1
