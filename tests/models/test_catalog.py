"""Names, sizes and parameter counts against the paper and its reference code."""

import pytest
import torch
from torch import nn
from transformers import BitConfig, BitForImageClassification

from tests.models.small import FAMILIES, POSITION_VARIANTS, TINY_VIT, small_model
from vit_ray.models import build_model
from vit_ray.models.catalog import RESNETS
from vit_ray.training.optimizers import decayed_parameters

# (with a head of 1000 classes, without head); counted from google-research/vision_transformer.
VIT_COUNTS = {
    "ViT-Ti/16": (5_717_416, 5_524_416),
    "ViT-S/16": (22_050_664, 21_665_664),
    "ViT-S/32": (22_878_952, 22_493_952),
    "ViT-b/32": (22_878_952, 22_493_952),
    "ViT-B/32": (88_224_232, 87_455_232),
    "ViT-B/16": (86_567_656, 85_798_656),
    "ViT-L/32": (306_535_400, 305_510_400),
    "ViT-L/16": (304_326_632, 303_301_632),
    "ViT-H/14": (632_045_800, 630_764_800),
}
# Of timm's model table (vit_base_r50_s16, vit_large_r50_s32).
HYBRID_COUNTS_MILLIONS = {"R50x1+ViT-B/16": 98.66, "R50x1+ViT-L/32": 328.99}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", VIT_COUNTS)
def test_a_vit_has_exactly_the_parameters_of_the_reference(name):
    with torch.device("meta"):
        model = build_model(name, num_classes=1000)
    assert (count(model), count(model) - count(model.head)) == VIT_COUNTS[name]


@pytest.mark.parametrize("name", HYBRID_COUNTS_MILLIONS)
def test_a_hybrid_has_the_published_number_of_parameters(name):
    with torch.device("meta"):
        model = build_model(name, num_classes=1000)
    assert round(count(model) / 1e6, 2) == HYBRID_COUNTS_MILLIONS[name]


@pytest.mark.parametrize("name", RESNETS)
def test_a_resnet_has_exactly_the_parameters_of_transformers_bit(name):
    size = RESNETS[name]
    config = BitConfig(
        depths=list(size.stages),
        hidden_sizes=[256 * size.width_factor * 2**stage for stage in range(4)],
        embedding_size=64 * size.width_factor,
        num_labels=1000,
    )
    with torch.device("meta"):
        model, peer = build_model(name, num_classes=1000), BitForImageClassification(config)
    assert count(model) == count(peer)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("ViT-B/16", {224: 197, 384: 577}),
        ("ViT-L/16", {512: 1025}),
        # 384 is not a multiple of 14: the last 6 pixels are unused, as in the reference.
        ("ViT-H/14", {224: 257, 384: 730, 518: 1370}),
        ("R50x1+ViT-B/16", {224: 197, 384: 577}),
        ("R50x1+ViT-L/32", {224: 50}),
    ],
)
def test_the_sequence_is_as_long_as_in_the_paper(name, tokens):
    with torch.device("meta"):
        for size, expected in tokens.items():
            assert build_model(name, 10, image_size=size).num_tokens == expected


@pytest.mark.parametrize(("positions", "positions_at"), POSITION_VARIANTS)
def test_every_position_variant_has_its_tables(positions, positions_at):
    model = small_model("ViT", positions=positions, positions_at=positions_at)
    plain = small_model("ViT", positions="none")
    # 16 patches and a class token, width 32, 2 layers, heads 8 wide.
    table = {"none": 0, "learned_1d": 17 * 32, "learned_2d": 2 * 4 * 16 + 32, "relative": 33 * 8}
    copies = 2 if positions_at == "every_layer" or positions == "relative" else 1
    assert count(model) - count(plain) == copies * table[positions]


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("ViT-B16", {}, "ViT-B16.*similar names:.*ViT-B/16"),
        ("R50+ViT-B/16", {}, r"R50\+ViT-B/16.*similar names:.*R50x1\+"),
        ("ViT-B/16", {"num_classes": 0}, "num_classes=0"),
        ("ViT-B/16", {"image_size": 8}, "smaller than a patch of 16x16"),
        ("R50x1", {"image_size": 16}, "image_size"),
        ("ViT-B/16", {"drop_out": 0.1}, "did you mean dropout"),
        ("Axial-ViT-B/16", {"stochastic_depth": 0.1}, "axial ViT"),
        ("ViT", {"depth": 2}, "add width, mlp_dim, num_heads, patch_size"),
        ("ResNet", {"stages": (1,), "width_factor": 0}, "width_factor=0"),
        ("ViT", {**TINY_VIT, "num_heads": 5}, "num_heads=5"),
        ("ViT", {**TINY_VIT, "width": 15, "num_heads": 3, "positions": "learned_2d"}, "width=15"),
        ("ViT", {**TINY_VIT, "width": 30, "num_heads": 3, "positions": "sincos_2d"}, "ple of 4"),
        ("ViT-B/16", {"positions": "relative", "positions_at": "every_layer"}, "no effect"),
        ("ViT", {**TINY_VIT, "positions": "sincos_2d", "positions_at": "every_layer"}, "every_l"),
        ("ViT-B/16", {"pool": "max"}, "use one of cls, gap"),
        ("ViT-B/16", {"activation": "relu"}, "use one of gelu_tanh, gelu"),
        ("ViT-B/16", {"norm_eps": 0.0}, r"norm_eps=0\.0"),
        ("ViT-B/16", {"dropout": 1.0}, r"dropout=1\.0"),
        ("ViT-B/16", {"stochastic_depth": 1.0}, "stochastic_depth="),
        ("ViT-B/16", {"stochastic_depth": -0.1}, "stochastic_depth="),
        ("R50x1", {"stochastic_depth": 0.1}, "has no option stochastic_depth"),
        ("ViT-B/16", {"head_bias": float("nan")}, "head_bias=nan"),
        ("Axial-ViT-B/16", {"pool": "cls"}, "pool='gap'"),
    ],
)
def test_what_does_not_fit_is_named(name, options, named):
    with pytest.raises(ValueError, match=named), torch.device("meta"):
        build_model(name, **{"num_classes": 1, **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_decay_acts_on_kernels_and_on_nothing_else(family):
    options = {"representation": True, "positions": "learned_2d"} if family == "ViT" else {}
    model = small_model(family, **options)
    decayed, kept = decayed_parameters(model)
    assert {name for name, _ in [*decayed, *kept]} == {n for n, _ in model.named_parameters()}
    # Kernels are the tensors of two or more axes that are not tables or tokens.
    tables = ("table", "token", "rows", "columns", "class_position")
    for name, parameter in decayed:
        assert parameter.dim() in (2, 4)
        assert name.endswith("weight")
    for name, parameter in kept:
        assert parameter.dim() == 1 or name.endswith(tables)
    assert "head.weight" in dict(decayed)
    assert "head.bias" in dict(kept)
