"""Every family takes a training step in each precision, recomputed or not, compiled or not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.small import FAMILIES, POSITION_VARIANTS, small_model, some_images

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("ViT", {"representation": True, "pool": "gap"}),
    *(
        ("ViT", {"positions": positions, "positions_at": positions_at})
        for positions, positions_at in POSITION_VARIANTS
        if (positions, positions_at) != ("learned_1d", "stem")
    ),
]
LABELS = torch.tensor([1, 3])


def step(model: nn.Module, forward: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by name of one batch."""
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
def test_every_parameter_takes_part_in_a_step(family: str, options: dict[str, Any]) -> None:
    model = small_model(family, **options)
    loss, gradients = step(model)
    assert torch.isfinite(loss)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert all(torch.isfinite(g).all() and g.any() for g in gradients.values())


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_checkpointing_changes_no_bit_of_a_step(family: str, options: dict[str, Any]) -> None:
    dropout = {"dropout": 0.3} if "ViT" in family else {}
    model = small_model(family, **options, **dropout).train()
    steps = []
    for every in (0, 1, 2):
        model.set_activation_checkpointing(every)
        torch.manual_seed(5)
        steps.append(step(model))
    # The same kernels run twice, and dropout drops the same units.
    assert_same_step(steps[1], steps[0], rtol=0)
    assert_same_step(steps[2], steps[0], rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_runs_every_nth_block_again(family: str) -> None:
    model = small_model(family)
    blocks = model.blocks if "ViT" in family else model.units
    calls: list[int] = []
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda m, i, index=index: calls.append(index))
    for every, again in [(0, []), (1, list(range(len(blocks)))), (2, [1])]:
        model.set_activation_checkpointing(every)
        calls.clear()
        step(model)
        assert sorted(calls) == sorted([*range(len(blocks)), *again])
    model.set_activation_checkpointing(1)
    calls.clear()
    with torch.no_grad():
        model(some_images())
    assert calls == list(range(len(blocks)))


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_bfloat16_follows_float32(family: str, options: dict[str, Any]) -> None:
    if "stages" in FAMILIES[family]:
        options = {**options, "stages": (1,)}  # few convolutions: they are slow in it on a CPU
    reference = step(small_model(family, **options))
    model = small_model(family, **options).bfloat16()
    assert model(some_images()).dtype == torch.float32
    loss, gradients = step(model)
    # bfloat16 keeps 8 bits, an error of 0.4 % an operation, over some ten operations.
    assert loss.item() == pytest.approx(reference[0].item(), rel=0.05)
    ours = torch.cat([gradients[name].float().flatten() for name in reference[1]])
    theirs = torch.cat([gradient.flatten() for gradient in reference[1].values()])
    assert F.cosine_similarity(ours, theirs, dim=0) > 0.99


def test_a_step_under_autocast_follows_float32() -> None:
    model = small_model("ViT")
    reference = step(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(some_images())
    assert logits.dtype == torch.float32
    assert F.cross_entropy(logits, LABELS).item() == pytest.approx(reference[0].item(), rel=0.05)


# Every family, and the ViT options that change the graph, at the smallest size that has all parts.
COMPILED: list[tuple[str, dict[str, Any]]] = [
    ("ViT", {"depth": 1, "representation": True}),
    ("ViT", {"depth": 1, "positions": "relative", "pool": "gap"}),
    ("ViT", {"positions": "learned_2d", "positions_at": "every_layer"}),
    ("ResNet", {"stages": (1,)}),
    ("R+ViT", {"depth": 1, "stages": (1,)}),
    ("Axial-ViT", {"depth": 1}),
    ("AxialResNet", {"stages": (1,)}),
]


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize(("family", "options"), COMPILED)
def test_a_compiled_step_equals_an_eager_one(
    family: str, options: dict[str, Any], every: int, dtype: torch.dtype
) -> None:
    model = small_model(family, **options).to(dtype)
    reference = step(model)
    model.set_activation_checkpointing(every)
    torch._dynamo.reset()
    # Captured as one graph without a break, forwards and backwards; no machine code is made of it.
    compiled = step(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    # Captured operations are taken apart, and in bfloat16 the parts are rounded on the way.
    assert_same_step(compiled, reference, rtol=1e-3 if dtype == torch.float32 else 0.1)


@pytest.mark.slow
def test_a_step_in_machine_code_equals_an_eager_one() -> None:
    model = small_model("ViT", depth=1, representation=True)
    reference = step(model)
    torch._dynamo.reset()
    # Fused kernels add up in another order; norms amplify that.
    compiled = step(model, torch.compile(model, fullgraph=True))
    assert_same_step(compiled, reference, rtol=1e-3)


def test_the_heads_bias_is_not_lost_in_bfloat16() -> None:
    model = small_model("ViT").bfloat16()
    with torch.no_grad():
        model.head.bias.fill_(-10)
        model.head.weight.mul_(0.01)
    logits = model(some_images())
    # Neighbours of -10 in bfloat16 are 1/16 apart; these differences are smaller and kept.
    spread = (logits - logits.mean()).abs().max()
    assert 0 < spread < 1 / 16
    assert len(logits.unique()) > 5
