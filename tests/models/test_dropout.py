"""Dropout and stochastic depth by keys: each image has its mask in any batch, of good numbers."""

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.models.small import small_model, some_images
from vit_ray.models.build import recompute
from vit_ray.models.counter_random import numbered_keys, sample_keys
from vit_ray.models.layers import Dropout, StochasticDepth, keyed_dropout

SAMPLES = torch.tensor([7, 1, 300_000_000, 2**40])
KEYS = sample_keys(SAMPLES, 0, 0)
VITS: list[tuple[str, dict[str, Any]]] = [
    ("ViT", {"positions": "relative"}),
    ("ViT", {"positions": "learned_2d", "positions_at": "every_layer"}),
    ("Axial-ViT", {}),
    ("R+ViT", {}),
]


def masks(keys: Tensor, count: int, rate: float) -> Tensor:
    """1.0 where an element is kept, (B, count)."""
    return keyed_dropout(torch.ones(len(keys), count), keys, rate).sign()


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
def test_elements_are_dropped_at_the_rate_and_the_others_scaled_up(rate):
    count = 10_001  # no multiple of the four numbers in a word
    out = keyed_dropout(torch.ones(100, count), sample_keys(torch.arange(100), 0, 0), rate)
    dropped = int((out == 0).sum())
    assert stats.binomtest(dropped, 100 * count, rate).pvalue > 1e-3
    assert out.max() == pytest.approx(1 / (1 - rate), rel=1e-4)
    assert float(out.double().mean()) == pytest.approx(1.0, abs=5 * math.sqrt(rate / 1e6))


def test_a_rate_just_below_one_keeps_a_share_and_is_scaled_by_it():
    keys = sample_keys(torch.arange(500_000), 0, 0)
    for out in (
        keyed_dropout(torch.ones(100, 20_001), keys[:100], 0.999999),
        StochasticDepth(0.999999).train()(torch.ones(500_000, 1), keys),
    ):
        assert set(out.unique().tolist()) == {0.0, 2.0**16}


def test_masks_of_neighbouring_samples_steps_layers_and_seeds_are_independent():
    samples = torch.arange(1000)
    keys = sample_keys(samples, 0, 5)
    mine = masks(keys, 200, 0.5)
    other_keys = [
        sample_keys(samples, 0, 6),
        sample_keys(samples, 1, 5),
        numbered_keys(numbered_keys(keys, 0), 1),
        *(numbered_keys(keys, layer) for layer in range(12)),
    ]
    shifted = [mine.roll(1, 0), mine.roll(1, 1), mine.roll(4, 1)]
    drawn = [mine, *shifted, *(masks(each, 200, 0.5) for each in other_keys)]
    correlations = np.corrcoef([mask.flatten().numpy() for mask in drawn]) - np.eye(len(drawn))
    # 5 standard errors of the correlation of 200,000 independent pairs.
    assert np.abs(correlations).max() < 5 / math.sqrt(200_000)


def test_any_other_words_and_any_other_order_of_them_give_another_key():
    words = [w for count in (1, 2, 3) for w in itertools.product(range(16), repeat=count)]
    keys = torch.stack([sample_keys(SAMPLES, *w) for w in words])
    assert keys.unique().numel() == len(words) * len(SAMPLES)


def training_model(family: str, **options: Any) -> torch.nn.Module:
    return small_model(family, dropout=0.3, **options).double().train()


@pytest.mark.parametrize(("family", "options"), VITS)
def test_an_image_gets_its_mask_in_any_batch(family, options):
    size = (32, 48)  # rows and columns are not as many
    model = training_model(family, image_size=size, **options)
    images = some_images(4, size).double()
    whole = model(images, KEYS)
    torch.testing.assert_close(model(images, KEYS), whole, rtol=0, atol=0)
    one_by_one = [model(images[i : i + 1], KEYS[i : i + 1]) for i in (3, 1, 0, 2)]
    torch.testing.assert_close(torch.cat(one_by_one), whole[[3, 1, 0, 2]], rtol=1e-12, atol=1e-12)
    later = model(images, sample_keys(SAMPLES, 0, 1))
    assert (later - whole).abs().max() > 1e-3
    same_image = model(images[:1].expand(4, -1, -1, -1), KEYS)
    assert (same_image[0] - same_image[1]).abs().max() > 1e-3
    model.keep_all_tokens()  # also those of the last block on which no output depends
    torch.testing.assert_close(model(images, KEYS), whole, rtol=1e-12, atol=1e-12)


def test_every_place_that_drops_has_a_mask_of_its_own():
    model = training_model("ViT", stochastic_depth=0.5)
    seen: list[int] = []
    for module in model.modules():
        if isinstance(module, Dropout | StochasticDepth):
            module.register_forward_pre_hook(lambda m, args: seen.extend(args[1].tolist()))
    model(some_images(4).double(), KEYS)
    assert len(seen) == len(set(seen)) == 4 * (1 + (3 + 2) * 2)


@pytest.mark.parametrize(("family", "options"), VITS)
def test_recomputed_blocks_drop_the_same_units(family, options):
    images, gradients = some_images(4).double(), []
    for every in (0, 1):
        model = training_model(family, **options)
        recompute(model, every)
        model(images, KEYS).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


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
    # To the nearest of bfloat16's numbers.
    assert out.dtype == torch.bfloat16
    assert float(out.max()) == float(torch.tensor(1.5 / (1 - rate), dtype=torch.bfloat16))


def test_rates_rise_linearly_from_zero_as_in_the_paper():
    # Touvron et al. and timm: torch.linspace(0, rate, depth).
    model = small_model("ViT", depth=5, stochastic_depth=0.3)
    rates = [float(block.stochastic_depth.levels) / 2**16 for block in model.blocks]
    assert rates == pytest.approx(torch.linspace(0, 0.3, 5).tolist(), abs=1e-5)
    one_block = small_model("ViT", depth=1, stochastic_depth=0.9)
    assert not one_block.blocks[0].stochastic_depth.is_active


def test_a_dropped_branch_is_as_if_it_were_not_there_and_evaluation_drops_none():
    """Each image's output is one of the four models that lack branches of the last block."""
    model, images = small_model("ViT", stochastic_depth=0.5, pool="gap").train(), some_images(32)
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
    plain = small_model("ViT", pool="gap").eval()
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(model.eval()(images), plain(images))


def test_blocks_of_unlike_rates_compile_once():
    model: Any = small_model("ViT", depth=4, stochastic_depth=0.5).train()
    torch._dynamo.reset()
    counter = CompileCounter()
    keys = sample_keys(torch.arange(2), 0, 0)
    x = torch.randn(2, 17, 32)
    run = torch.compile(lambda block, x: block(x, keys), backend=counter)
    for block in list(model.blocks)[1:-1]:  # the last computes fewer tokens
        run(block, x)
    assert counter.frame_count == 1
