"""Initial values tensor by tensor, against the reference code's distributions."""

import math

import pytest
import torch
from torch import Tensor, nn

from vit_ray.models import build_model

WIDTH, MLP = 192, 768


@pytest.fixture(scope="module")
def fresh() -> dict[str, Tensor]:
    """Parameters of a new ViT wide enough for statistics, by name."""
    torch.manual_seed(0)
    model = build_model(
        "ViT",
        num_classes=10,
        image_size=64,
        depth=2,
        width=WIDTH,
        mlp_dim=MLP,
        num_heads=3,
        patch_size=16,
        representation=True,
        head_bias=-10.0,
    )
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_uniform(values: Tensor, limit: float) -> None:
    """Within the limit, reaching for it, and of a uniform distribution's deviation."""
    assert limit * 0.999 < values.abs().max() <= limit
    assert values.std() == pytest.approx(limit / math.sqrt(3), rel=0.02)
    assert abs(values.mean()) < 5 * limit / math.sqrt(3 * values.numel())


def assert_truncated_normal(values: Tensor, std: float) -> None:
    """Of the deviation after truncation, and cut at two deviations of the normal before it."""
    cut = 2 * std / 0.87962566103423978
    assert cut * 0.98 < values.abs().max() <= cut
    assert values.std() == pytest.approx(std, rel=0.02)


def test_each_attention_kernel_is_xavier_uniform_by_itself(fresh: dict[str, Tensor]) -> None:
    for block in (0, 1):
        # sqrt(6 / 2D) of a D x D kernel; one draw of (3D, D) would stop at sqrt(6 / 4D).
        for kernel in fresh[f"blocks.{block}.attention.qkv.weight"].chunk(3):
            assert_uniform(kernel, math.sqrt(6 / (2 * WIDTH)))
        assert_uniform(fresh[f"blocks.{block}.attention.out.weight"], math.sqrt(6 / (2 * WIDTH)))
        assert not fresh[f"blocks.{block}.attention.qkv.bias"].any()
        assert not fresh[f"blocks.{block}.attention.out.bias"].any()


def test_the_published_limit_of_vit_b_is_reached() -> None:
    torch.manual_seed(0)
    model = build_model("ViT", 1, 16, depth=1, width=768, mlp_dim=8, num_heads=12, patch_size=16)
    assert_uniform(model.blocks[0].attention.qkv.weight.detach()[:768], 0.0625)


def test_mlp_kernels_are_xavier_and_their_biases_tiny(fresh: dict[str, Tensor]) -> None:
    for layer in ("expand", "contract"):
        assert_uniform(fresh[f"blocks.0.mlp.{layer}.weight"], math.sqrt(6 / (WIDTH + MLP)))
        assert fresh[f"blocks.0.mlp.{layer}.bias"].std() == pytest.approx(1e-6, rel=0.2)


def test_patch_and_representation_kernels_are_lecun_normal(fresh: dict[str, Tensor]) -> None:
    assert_truncated_normal(fresh["embedding.projection.weight"], math.sqrt(1 / (3 * 16 * 16)))
    assert_truncated_normal(fresh["representation.weight"], math.sqrt(1 / WIDTH))
    assert not fresh["embedding.projection.bias"].any()
    assert not fresh["representation.bias"].any()


def test_class_token_is_zero_and_positions_have_berts_deviation(fresh: dict[str, Tensor]) -> None:
    assert not fresh["class_token.token"].any()
    assert fresh["positions.0.table"].shape == (1, 17, WIDTH)
    assert fresh["positions.0.table"].std() == pytest.approx(0.02, rel=0.05)


def test_the_head_is_zero_with_a_constant_bias(fresh: dict[str, Tensor]) -> None:
    assert not fresh["head.weight"].any()
    assert torch.equal(fresh["head.bias"], torch.full((10,), -10.0))


def test_layer_norms_have_the_reference_epsilon() -> None:
    model = build_model("ViT", 1, 32, depth=1, width=8, mlp_dim=8, num_heads=1, patch_size=16)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 3
    for norm in norms:
        assert norm.eps == 1e-6
        assert torch.equal(norm.weight, torch.ones(8))
        assert not norm.bias.any()


def test_a_hybrids_units_start_as_identities() -> None:
    model = build_model(
        "R+ViT",
        1,
        32,
        depth=1,
        width=8,
        mlp_dim=8,
        num_heads=1,
        stages=(2,),
        width_factor=1,
    )
    unit = model.embedding.units[1]
    inputs = torch.rand(1, 256, 4, 4)
    # The scale of the last norm is 0, and a ReLU leaves what is positive.
    assert torch.equal(unit(inputs), inputs)
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert {(norm.num_groups, norm.eps) for norm in norms} == {(32, 1e-6)}


def test_bit_norms_have_32_groups_and_bits_epsilon() -> None:
    model = build_model("ResNet", 1, 32, stages=(1, 1), width_factor=1)
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert {(norm.num_groups, norm.eps) for norm in norms} == {(32, 1e-5)}
    assert not model.head.weight.any()


@pytest.mark.parametrize("name", ["ViT-B/16", "R50x1", "R50x1+ViT-B/16", "AxialResNet50"])
def test_first_logits_are_the_head_bias(name: str) -> None:
    model = build_model(name, num_classes=3, image_size=32, head_bias=-6.9).eval()
    with torch.no_grad():
        logits = model(torch.rand(1, 3, 32, 32) * 2 - 1)
    assert logits.tolist() == [pytest.approx([-6.9] * 3)]
