"""The ViT's forward pass against independent implementations and plain formulas."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViTForImageClassification, ViTModel

from tests.models.peers import transformers_vit
from tests.models.small import attention_weights, relative_difference, small_model, some_images
from vit_ray.checkpoints.init_weights import open_weights
from vit_ray.evaluation.inspection import position_vectors
from vit_ray.models import build_model
from vit_ray.models.positions import sincos_table
from vit_ray.models.weights import load_weights, save_weights


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"hidden_act": "gelu"}, {"activation": "gelu"}),
        ({"layer_norm_eps": 0.01}, {"norm_eps": 0.01}),
    ],
)
def test_logits_and_attention_equal_those_of_transformers(settings, options, tmp_path):
    peer = transformers_vit(tmp_path, **settings)
    assert open_weights(str(tmp_path)).num_classes == 5
    model = small_model("ViT", **options).eval()
    load_weights(model, tmp_path, new_head=False)
    with torch.no_grad():
        theirs = peer(some_images(4), output_attentions=True)
        ours = attention_weights(model, some_images(4))
        # float32 rounding over two blocks; the two add up in another order.
        assert relative_difference(model(some_images(4)), theirs.logits) < 1e-5
    for our, their in zip(ours, theirs.attentions, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-6)


def test_a_vit_of_the_paper_equals_transformers_at_full_size(tmp_path):
    torch.manual_seed(0)
    model = build_model("ViT-S/16", num_classes=7, image_size=224).eval()
    nn.init.normal_(model.head.weight)
    nn.init.normal_(model.class_token.token)
    save_weights(model, tmp_path, "huggingface")
    peer = ViTForImageClassification.from_pretrained(tmp_path).eval()
    images = some_images(1, (224, 224))
    with torch.no_grad():
        assert relative_difference(model(images), peer(images).logits) < 1e-5


def test_features_behind_the_tanh_layer_equal_transformers_pooler(tmp_path):
    peer = transformers_vit(tmp_path, ViTModel)
    model = small_model("ViT", representation=True).eval()
    report = load_weights(model, tmp_path)
    # A bare model has no head.
    assert open_weights(str(tmp_path)).num_classes is None
    with pytest.raises(ValueError, match="head"):
        load_weights(model, tmp_path, new_head=False)
    assert report.new == ["head.bias", "head.weight"]
    with torch.no_grad():
        theirs = peer(some_images(4)).pooler_output
        assert relative_difference(model.features(some_images(4)), theirs) < 1e-5


def test_logits_at_another_resolution_equal_transformers_interpolation(tmp_path):
    peer = transformers_vit(tmp_path)
    model = small_model("ViT", image_size=(40, 64)).eval()
    load_weights(model, tmp_path, resize="bicubic")
    images = some_images(2, (40, 64))
    with torch.no_grad():
        theirs = peer(images, interpolate_pos_encoding=True).logits
        assert relative_difference(model(images), theirs) < 1e-5


@pytest.mark.parametrize(
    ("positions", "positions_at"),
    [("none", "stem"), ("learned_2d", "every_layer"), ("relative", "stem")],
)
def test_the_fused_kernel_applies_the_attention_weights_that_are_shown(positions, positions_at):
    model = small_model("ViT", positions=positions, positions_at=positions_at).eval()
    seen: list[tuple[Tensor, ...]] = []
    model.keep_all_tokens()
    attention = model.blocks[1].attention
    attention.qkv.register_forward_hook(lambda m, i, o: seen.append(o))
    outputs: list[Tensor] = []
    attention.out.register_forward_pre_hook(lambda m, i: outputs.append(i[0]))
    with torch.no_grad():
        weights = attention_weights(model, some_images())[1]
    values = seen[0][2].reshape(2, 17, 4, 8).transpose(1, 2)
    mixed = (weights @ values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(outputs[0], mixed, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 17))


def test_relative_attention_is_the_sum_over_offsets_of_the_paper():
    model = small_model("ViT", positions="relative").eval()
    relative = model.blocks[0].attention.relative
    q = torch.randn(2, 4, 17, 8)
    bias = relative(q)
    for query, key in [(0, 0), (0, 16), (16, 0), (5, 9), (9, 5)]:
        # Offset q - k counts up from -(N - 1) at row 0 of the table; logits are over sqrt(8).
        row = relative.table[query - key + 16]
        torch.testing.assert_close(bias[..., query, key], q[:, :, query] @ row / 8**0.5)


@pytest.mark.parametrize("positions_at", ["stem", "every_layer", "every_layer_shared"])
def test_positions_are_added_before_the_layers_that_are_named(positions_at):
    model = small_model("ViT", positions="learned_1d", positions_at=positions_at).eval()
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda m, i: inputs.append(i[0]))
        block.register_forward_hook(lambda m, i, o: outputs.append(o))
    with torch.no_grad():
        model(some_images())
        stem = model.class_token(model.embed(some_images()))
    tables = [table.table.detach() for table in model.positions]
    torch.testing.assert_close(inputs[0] - stem, tables[0].expand(2, -1, -1), atol=1e-6, rtol=1e-5)
    added = {"stem": torch.zeros(1), "every_layer": tables[-1], "every_layer_shared": tables[0]}
    expected = added[positions_at].expand(2, 17, 32)
    torch.testing.assert_close(inputs[1] - outputs[0], expected, atol=1e-6, rtol=1e-5)
    assert len(tables) == (2 if positions_at == "every_layer" else 1)


def test_gap_averages_the_patches_and_has_no_class_token():
    model = small_model("ViT", pool="gap").eval()
    encoded = model.encode(model.embed(some_images()))
    assert encoded.shape == (2, 16, 32)
    torch.testing.assert_close(model.features(some_images()), encoded.mean(1))
    expected = F.linear(encoded.mean(1), model.head.weight, model.head.bias)
    torch.testing.assert_close(model(some_images()), expected)


def test_dropout_is_where_the_paper_has_it_and_nowhere_else():
    model = small_model("ViT", dropout=0.5, representation=True).train()
    calls: list[tuple[str, Tensor]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(
                lambda m, args, name=name: calls.append((name, args[0]))
            )
    model(some_images())
    # After positions; then after the attention's output and after both layers of each MLP, of which
    # the last is only for the class token. None on attention weights, none in the head.
    assert [(name, tuple(x.shape)) for name, x in calls] == [
        ("dropout", (2, 17, 32)),
        ("blocks.0.dropout", (2, 17, 32)),
        ("blocks.0.mlp.dropout", (2, 17, 64)),
        ("blocks.0.mlp.dropout", (2, 17, 32)),
        ("blocks.1.dropout", (2, 1, 32)),
        ("blocks.1.mlp.dropout", (2, 1, 64)),
        ("blocks.1.mlp.dropout", (2, 1, 32)),
    ]
    attention, x = model.blocks[0].attention, torch.randn(2, 17, 32)
    assert torch.equal(attention(x), attention(x))
    stem = model.class_token(model.embed(some_images()))
    table = model.positions[0].table.expand_as(stem)
    torch.testing.assert_close(calls[0][1] - stem, table, atol=1e-6, rtol=1e-5)


def test_the_last_pixels_of_a_size_that_does_not_divide_are_unused():
    model = small_model("ViT", image_size=36).eval()
    images = some_images(2, (36, 36))
    changed = images.clone()
    changed[:, :, 32:] = 5
    assert torch.equal(model(images), model(changed))


@pytest.mark.parametrize(
    ("family", "options", "size", "named"),
    [
        ("ViT", {}, (40, 48), r"built for 4x4; build it with image_size=\(40, 48\)"),
        ("AxialResNet", {}, (40, 48), "axial ResNet built for 32x32"),
        # As many tokens, of other lines.
        ("Axial-ViT", {"positions": "none"}, (16, 64), "grid of 2x8, .* built for 4x4"),
    ],
)
def test_images_of_another_size_are_refused(family, options, size, named):
    with pytest.raises(ValueError, match=named):
        small_model(family, **options)(some_images(2, size))


def test_fixed_positions_are_big_visions():
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
def test_fixed_positions_are_added_to_patches_and_no_parameter(pool):
    fixed = small_model("ViT", positions="sincos_2d", pool=pool).eval()
    plain = small_model("ViT", positions="none", pool=pool).eval()
    plain.load_state_dict(fixed.state_dict())
    table = sincos_table((4, 4), 32)
    with torch.no_grad():
        expected = plain.encode(plain.embed(some_images()) + table)
        assert torch.allclose(fixed.encode(fixed.embed(some_images())), expected, atol=1e-6)
    vectors = position_vectors(fixed)
    assert np.allclose(vectors.reshape(16, -1), table.numpy())
