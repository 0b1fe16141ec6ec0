"""Registers, pooling by attention and fixed positions against other people's code and formulas."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    SiglipVisionConfig,
)
from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

from tests.models.small import TINY_VIT, small_model, some_images
from tests.recipes import recipe_with
from vit_ray.evaluate.inspection import attention_figures, position_vectors
from vit_ray.models import build_model
from vit_ray.models.counter_random import sample_keys
from vit_ray.models.layers import LayerScale
from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.models.positions import sincos_table
from vit_ray.models.weights import load_weights, save_weights

WIDTH, HEADS, MLP = TINY_VIT["width"], TINY_VIT["num_heads"], TINY_VIT["mlp_dim"]
IMAGES = some_images()


def copy_linear(target: nn.Module, weight: Tensor, bias: Tensor) -> None:
    with torch.no_grad():
        target.weight.copy_(weight)
        target.bias.copy_(bias)


def dino_with(model: Any) -> Dinov2WithRegistersModel:
    """transformers' DINOv2 with registers, filled with the model's weights."""
    config = Dinov2WithRegistersConfig(
        hidden_size=WIDTH,
        num_hidden_layers=TINY_VIT["depth"],
        num_attention_heads=HEADS,
        mlp_ratio=MLP // WIDTH,
        hidden_act="gelu_pytorch_tanh",
        image_size=32,
        patch_size=TINY_VIT["patch_size"],
        num_register_tokens=model.options.registers,
    )
    other = Dinov2WithRegistersModel(config).eval()
    stem = other.embeddings
    with torch.no_grad():
        stem.cls_token.copy_(model.class_token.token)
        stem.register_tokens.copy_(model.registers.tokens)
        stem.position_embeddings.copy_(model.positions[0].table)
    projection = model.embedding.projection
    copy_linear(stem.patch_embeddings.projection, projection.weight, projection.bias)
    for own, layer in zip(model.blocks, other.encoder.layer, strict=True):
        attention = layer.attention
        parts = zip(own.attention.qkv.weight.chunk(3), own.attention.qkv.bias.chunk(3), strict=True)
        for target, part in zip(
            (attention.q_proj, attention.k_proj, attention.v_proj), parts, strict=True
        ):
            copy_linear(target, *part)
        for target, source in (
            (layer.norm1, own.attention_norm),
            (attention.o_proj, own.attention.out),
            (layer.norm2, own.mlp_norm),
            (layer.mlp.fc1, own.mlp.expand),
            (layer.mlp.fc2, own.mlp.contract),
        ):
            copy_linear(target, source.weight, source.bias)
        with torch.no_grad():
            for target, source in (
                (layer.layer_scale1, own.attention_scale),
                (layer.layer_scale2, own.mlp_scale),
            ):
                if isinstance(source, LayerScale):
                    target.lambda1.copy_(source.scale)
    copy_linear(other.layernorm, model.norm.weight, model.norm.bias)
    return other


@pytest.mark.parametrize("layer_scale", [0.0, 0.3])
def test_registers_and_layer_scale_are_those_of_dinov2(layer_scale: float) -> None:
    model: Any = small_model("ViT", registers=3, layer_scale=layer_scale).eval()
    with torch.no_grad():
        ours = model.encode(model.embed(IMAGES))
        theirs = dino_with(model)(IMAGES).last_hidden_state
        features = model.features(IMAGES)
    assert ours.shape == (2, 1 + 3 + 16, WIDTH)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.allclose(features, theirs[:, 0], atol=1e-5)


def test_the_mean_over_patches_leaves_registers_out() -> None:
    model: Any = small_model("ViT", registers=3, pool="gap").eval()
    with torch.no_grad():
        encoded = model.encode(model.embed(IMAGES))
        assert encoded.shape[1] == 3 + 16
        assert torch.allclose(model.features(IMAGES), encoded[:, 3:].mean(1))


def test_registers_start_unlike_each_other() -> None:
    model: Any = build_model("ViT", 5, 32, **TINY_VIT, registers=4)
    tokens = model.registers.tokens[0]
    assert len(torch.unique(tokens, dim=0)) == 4
    assert float(tokens.abs().max()) < 1e-5


@pytest.mark.parametrize("registers", [0, 2])
def test_pooling_by_attention_is_that_of_siglip(registers: int) -> None:
    model: Any = small_model("ViT", pool="map", registers=registers).eval()
    config = SiglipVisionConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        intermediate_size=MLP,
        hidden_act="gelu_pytorch_tanh",
    )
    theirs, own = SiglipMultiheadAttentionPoolingHead(config).eval(), model.attention_pool
    with torch.no_grad():
        theirs.probe.copy_(own.probe)
        parts = (own.query, own.key, own.value)
        theirs.attention.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.attention.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        for target, source in (
            (theirs.attention.out_proj, own.out),
            (theirs.layernorm, own.norm),
            (theirs.mlp.fc1, own.mlp.expand),
            (theirs.mlp.fc2, own.mlp.contract),
        ):
            copy_linear(target, source.weight, source.bias)
        encoded = model.encode(model.embed(IMAGES))
        assert encoded.shape[1] == 16 + registers
        theirs.layernorm.eps = own.norm.eps
        assert torch.allclose(model.features(IMAGES), theirs(encoded), atol=1e-5)


def test_the_probe_starts_as_flax_draws_it() -> None:
    torch.manual_seed(0)
    model: Any = build_model("ViT-B/16", 5, pool="map")
    probe, limit = model.attention_pool.probe, math.sqrt(6 / (1 + 768))
    assert float(probe.abs().max()) <= limit
    assert float(probe.std()) == pytest.approx(limit / math.sqrt(3), rel=0.05)
    # Zhai et al.'s B/16 has 93 M with a head of 768 outputs (SigLIP's image tower).
    tower = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("head"))
    assert tower == 92_884_224


def test_fixed_positions_are_big_visions() -> None:
    """`posemb_sincos_2d` of big_vision/models/vit.py, number by number."""
    height, width, dim = 3, 5, 24
    expected = np.zeros((height * width, dim))
    for y in range(height):
        for x in range(width):
            for i in range(dim // 4):
                angle = 1 / 10_000 ** (i / (dim // 4 - 1))
                row = expected[y * width + x]
                row[i], row[6 + i] = math.sin(x * angle), math.cos(x * angle)
                row[12 + i], row[18 + i] = math.sin(y * angle), math.cos(y * angle)
    assert np.abs(sincos_table((height, width), dim).numpy() - expected).max() < 1e-6


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_fixed_positions_are_added_to_patches_and_no_parameter(pool: str) -> None:
    fixed: Any = small_model("ViT", positions="sincos_2d", pool=pool).eval()
    plain: Any = small_model("ViT", positions="none", pool=pool).eval()
    assert fixed.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(fixed.state_dict())
    table = sincos_table((4, 4), WIDTH)
    with torch.no_grad():
        expected = plain.encode(plain.embed(IMAGES) + table)
        assert torch.allclose(fixed.encode(fixed.embed(IMAGES)), expected, atol=1e-6)
    vectors = position_vectors(fixed)
    assert vectors is not None
    assert np.allclose(vectors.reshape(16, -1), table.numpy())


OPTIONS: list[dict[str, Any]] = [
    {"registers": 2},
    {"registers": 2, "pool": "gap"},
    {"pool": "map", "registers": 1},
    {"positions": "sincos_2d"},
    {"positions": "rope_2d", "registers": 2},
    {"activation": "swiglu"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_our_own_layout_keeps_everything_and_others_say_what_they_cannot(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = small_model("ViT", **options).eval()
    save_weights(model, tmp_path / "own.safetensors", layout="vit_ray")
    other = build_model("ViT", 5, 32, **{**TINY_VIT, **options}).eval()
    load_weights(other, tmp_path / "own.safetensors")
    with torch.no_grad():
        assert torch.equal(other(IMAGES), model(IMAGES))
    for layout in ("jax", "timm", "huggingface"):
        file = tmp_path / ("w.npz" if layout == "jax" else "w.safetensors")
        with pytest.raises(ValueError, match="use layout='vit_ray'"):
            save_weights(model, file, layout=layout)


def test_fixed_positions_are_not_taken_for_none(tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    save_weights(small_model("ViT", positions="sincos_2d"), file, layout="vit_ray")
    with pytest.raises(ValueError, match="positions=sincos_2d, and this one has positions=none"):
        load_weights(small_model("ViT", positions="none"), file)


SCALED: dict[str, Any] = {
    "layer_scale": 0.3, "qk_norm": True, "pre_norm": True, "activation": "quick_gelu",
}  # fmt: skip


@pytest.mark.parametrize("options", [*OPTIONS, SCALED, {"pool": "map", "dropout": 0.1}])
def test_every_parameter_learns_and_recomputation_changes_nothing(options: dict[str, Any]) -> None:
    keys = sample_keys(torch.arange(2), 0, 0)
    gradients = []
    for every in (0, 1):
        model: Any = small_model("ViT", **options).train()
        model.set_activation_checkpointing(every)
        model(IMAGES, keys).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert torch.allclose(gradient, gradients[1][name], atol=1e-5), name
        assert name.endswith("key.bias") or float(gradient.abs().max()) > 0, name


@pytest.mark.parametrize("options", [*OPTIONS, SCALED])
def test_masked_patch_prediction_predicts_patches_only(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    objective = MaskedPatchObjective(small_model("ViT", **options))
    loss = objective(some_images(4), torch.arange(4))
    loss.backward()
    unused = [n for n, p in objective.named_parameters() if p.requires_grad and p.grad is None]
    assert not unused


@pytest.mark.parametrize("options", [{"registers": 2}, {"registers": 2, "pool": "gap"}, OPTIONS[4]])
def test_attention_figures_are_of_patches(options: dict[str, Any]) -> None:
    model: Any = small_model("ViT", **options)
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)
    distances, rollouts = attention_figures(model, images)
    assert distances.shape == (2, HEADS)
    assert rollouts.shape == (3, 4, 4)
    # What of a row is not of patches belongs to registers and the class token.
    assert 0 < float(rollouts.sum((1, 2)).max()) < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"registers": -1}, "registers=-1 must be 0 or more"),
        ({"registers": 1, "positions": "relative"}, "registers=1 have no position"),
        ({"registers": 1, "positions_at": "every_layer"}, "registers=1 have no position"),
        ({"positions": "sincos_2d", "positions_at": "every_layer"}, "positions_at='every_layer'"),
        ({"positions": "sincos_2d", "width": 30, "num_heads": 3}, "multiple of 4"),
        ({"positions": "rope_2d", "positions_at": "every_layer"}, "positions_at='every_layer'"),
        ({"positions": "rope_2d", "width": 24}, "a multiple of 4 .*width=24 have 6 each"),
        ({"pool": "max"}, "use one of cls, gap, map"),
        ({"activation": "relu"}, "use one of gelu_tanh, gelu, quick_gelu, swiglu"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 must be above 0 and below 1"),
        ({"layer_scale": -1e-4}, "layer_scale=-0.0001 must be 0 or a positive number"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model("ViT", 5, 32, **{**TINY_VIT, **options})


@pytest.mark.parametrize("options", [{"registers": 1}, {"pool": "map"}, {"positions": "rope_2d"}])
def test_axial_models_have_neither(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="axial ViT"):
        build_model("Axial-ViT", 5, 32, **{**TINY_VIT, **options})


@pytest.mark.parametrize(
    ("key", "value"),
    [("registers", -1), ("layer_scale", -1), ("pool", "max"), ("positions", "sincos")],
)
def test_recipes_are_refused_by_the_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"model\.{key}"):
        recipe_with(model={key: value})
