"""Every family takes a training step in each precision, recomputed or not, compiled or not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.small import FAMILIES, small_model, some_images
from vit_ray.models.build import chains, recompute

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("ViT", {"representation": True, "pool": "gap"}),
    ("ViT", {"positions": "learned_2d", "positions_at": "every_layer"}),
    ("ViT", {"positions": "relative"}),
]
LABELS = torch.tensor([1, 3])


def step(model: nn.Module, forward: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = F.cross_entropy((model if forward is None else forward)(some_images()), LABELS)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def assert_same_step(
    ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]], rtol: float
) -> None:
    """Losses within `rtol`; gradients within `rtol` of the largest entry of each tensor."""
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=rtol)
    assert set(ours[1]) == set(theirs[1])
    largest = max(gradient.abs().max().item() for gradient in theirs[1].values())
    for name, gradient in ours[1].items():
        expected = theirs[1][name].float()
        # Gradients that cancel to rounding errors (of a key's bias) are held to the largest.
        scale = max(expected.abs().max().item(), 0.01 * largest)
        assert (gradient.float() - expected).abs().max().item() <= rtol * scale, name


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_every_parameter_takes_part_in_a_step(family, options):
    model = small_model(family, **options)
    loss, gradients = step(model)
    assert torch.isfinite(loss)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert all(torch.isfinite(g).all() and g.any() for g in gradients.values())


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_checkpointing_changes_no_bit_of_a_step(family, options):
    dropout = {"dropout": 0.3} if "ViT" in family else {}
    steps = []
    for every in (0, 1, 2):
        model = small_model(family, **options, **dropout).train()
        recompute(model, every)
        torch.manual_seed(5)
        steps.append(step(model))
    # The same kernels run twice, and dropout drops the same units.
    assert_same_step(steps[1], steps[0], rtol=0)
    assert_same_step(steps[2], steps[0], rtol=0)


def test_checkpointing_is_wrapped_around_blocks_that_do_not_know_of_it():
    """Of torch's own encoder; a position table or a stem of convolutions is no block."""
    runs: list[int] = []
    found = []
    for every in (0, 1, 2):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.3, batch_first=True)
        model = nn.Sequential(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.TransformerEncoder(layer, 4)
        )
        assert [len(chain) for chain in chains(model)] == [4]
        recompute(model, every)
        for block in model[1].layers:
            block.linear1.register_forward_hook(lambda *_: runs.append(1))
        torch.manual_seed(5)
        runs.clear()
        model(torch.ones(2, 3, 16)).square().sum().backward()
        assert len(runs) == 4 + {0: 0, 1: 4, 2: 2}[every]
        found.append([p.grad for p in model.parameters()])
    for plain, *again in zip(*found, strict=True):
        assert all(torch.equal(plain, gradient) for gradient in again)
    assert not any(chains(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_follows_float32(family):
    # Few convolutions: they are slow in it on a CPU.
    options = {"stages": (1,)} if "stages" in FAMILIES[family] else {}
    reference = step(small_model(family, **options))
    model = small_model(family, **options).bfloat16()
    assert model(some_images()).dtype == torch.float32
    loss, gradients = step(model)
    # bfloat16 keeps 8 bits, an error of 0.4 % an operation, over some ten operations.
    assert loss.item() == pytest.approx(reference[0].item(), rel=0.05)
    ours = torch.cat([gradients[name].float().flatten() for name in reference[1]])
    theirs = torch.cat([gradient.flatten() for gradient in reference[1].values()])
    assert F.cosine_similarity(ours, theirs, dim=0) > 0.99


# At the smallest size that has all parts.
COMPILED: list[tuple[str, dict[str, Any]]] = [
    ("ViT", {"depth": 1, "representation": True}),
    ("R+ViT", {"depth": 1, "stages": (1,)}),
    ("Axial-ViT", {"depth": 1}),
]


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("family", "options"), COMPILED)
def test_a_compiled_step_equals_an_eager_one(family, options):
    model = small_model(family, **options)
    reference = step(model)
    recompute(model, 1)
    torch._dynamo.reset()
    # Captured as one graph without a break, forwards and backwards; no machine code is made of it.
    compiled = step(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert_same_step(compiled, reference, rtol=1e-3)  # captured operations are taken apart
