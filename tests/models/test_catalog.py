"""Parameters, initial values and costs against the paper, its code and transformers."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BitConfig, BitForImageClassification

from tests.models.small import FAMILIES, TINY_VIT, small_model
from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.config.training_sections import TrainConfig
from vit_ray.models import build_model
from vit_ray.models.catalog import find_spec
from vit_ray.models.flops import count_macs, forward_macs, training_exaflops
from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.training.memory_estimate import forward_pass, prepared_model, step_macs
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


@pytest.mark.parametrize("name", ["R50x1", "R101x1", "R152x2", "R152x4", "R200x3"])
def test_a_resnet_has_exactly_the_parameters_of_transformers_bit(name):
    size = find_spec(name, {}).resnet
    assert size
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
        ("ResNet", {"stages": (), "width_factor": 1}, "stages="),
        ("ViT", {**TINY_VIT, "num_heads": 5}, "num_heads=5"),
        ("ViT", {**TINY_VIT, "width": 15, "num_heads": 3, "positions": "learned_2d"}, "width=15"),
        ("ViT", {**TINY_VIT, "width": 30, "num_heads": 3, "positions": "sincos_2d"}, "ple of 4"),
        ("ViT-B/16", {"positions": "relative", "positions_at": "every_layer"}, "no effect"),
        ("ViT", {**TINY_VIT, "positions": "sincos_2d", "positions_at": "every_layer"}, "every_l"),
        ("ViT-B/16", {"pool": "max"}, "use one of cls, gap"),
        ("ViT-B/16", {"activation": "relu"}, "use one of gelu_tanh, gelu"),
        ("R50x1", {"stochastic_depth": 0.1}, "has no option stochastic_depth"),
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
    decayed, kept = (dict(group) for group in decayed_parameters(model))
    assert {*decayed, *kept} == {name for name, _ in model.named_parameters()}
    assert "head.weight" in decayed
    assert "head.bias" in kept
    for name, parameter in decayed.items():
        assert parameter.dim() in (2, 4)
        assert name.endswith("weight")
    # Of the others with two axes or more none is a kernel.
    tables = ("table", "token", "rows", "columns", "class_position")
    for name, parameter in kept.items():
        assert parameter.dim() == 1 or name.endswith(tables)


# Kind and name of parameters, and how they start; the first that matches counts.
STARTS: list[tuple[str, Callable[[Tensor], bool]]] = [
    (r"mlp\.(expand|contract)\.bias$", lambda values: has_std(values, 1e-6)),
    (r"bias$|class_token|(head|prediction)\.weight$", lambda values: not values.any()),
    (r"attention\.qkv\.weight$", lambda values: all(map(is_xavier, values.chunk(3)))),
    (r"\.(qk|v|out|expand|contract)\.weight$", lambda values: is_xavier(values)),
    (r"\.(projection|representation|conv\d?|root|shortcut)\.weight$", lambda v: is_lecun(v)),
    (r"(table|rows|columns|class_position|mask\.token)$", lambda v: has_std(v, 0.02)),
    # Units of the hybrids' backbone start as identities, BiT's do not.
    (r"^(R\+ViT|AxialResNet).*\.norm3\.weight$", lambda values: not values.any()),
    (r"norm\d?\.weight$", lambda values: bool((values == 1).all())),
]


def has_std(values: Tensor, std: float) -> bool:
    """Within six deviations of what so many numbers of mean 0 have."""
    return abs(values.square().mean().sqrt().item() / std - 1) < 6 / math.sqrt(2 * values.numel())


def is_xavier(kernel: Tensor) -> bool:
    limit = math.sqrt(6 / sum(kernel.shape))
    return bool(kernel.abs().max() <= limit) and has_std(kernel, limit / math.sqrt(3))


def is_lecun(kernel: Tensor) -> bool:
    std = math.sqrt(1 / kernel[0].numel())
    return bool(kernel.abs().max() <= 2.28 * std) and has_std(kernel, std)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("ViT", {"representation": True}),
        ("ViT", {"positions": "learned_2d", "positions_at": "every_layer"}),
        ("ViT", {"positions": "relative"}),
        ("R+ViT", {}),
        ("ResNet", {}),
        ("Axial-ViT", {}),
        ("AxialResNet", {}),
    ],
)
def test_every_tensor_of_every_family_starts_as_its_kind_does(family, options):
    torch.manual_seed(0)
    model = build_model(family, 10, 64, head_bias=-10.0, **FAMILIES[family], **options)
    if family == "ViT":
        model = MaskedPatchObjective(model)
    for name, parameter in model.named_parameters():
        place = f"{family}.{name}"
        start = next(start for pattern, start in STARTS if re.search(pattern, place))
        assert start(parameter.detach()), name


@pytest.mark.parametrize(("family", "eps"), [("R+ViT", 1e-6), ("ResNet", 1e-5)])
def test_group_norms_have_32_groups_and_the_epsilon_of_their_family(family, eps):
    model = build_model(family, 1, 32, **FAMILIES[family])
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert {(norm.num_groups, norm.eps) for norm in norms} == {(32, eps)}


JFT_IMAGES = 303_000_000

# Name, epochs, exaFLOPs. R50+L/16 at 7 epochs is printed as 859, which disagrees with half of its
# own 14-epoch row; 834 is that half. B/32 prints 55 where the convention of all others gives 56.3.
TABLE_6 = [
    ("ViT-B/32", 7, 55), ("ViT-B/16", 7, 224), ("ViT-L/32", 7, 196), ("ViT-L/16", 7, 783),
    ("ViT-L/16", 14, 1567), ("ViT-H/14", 14, 4262),
    ("R50x1", 7, 50), ("R50x2", 7, 199), ("R101x1", 7, 96), ("R152x1", 7, 141),
    ("R152x2", 7, 563), ("R152x2", 14, 1126), ("R200x3", 14, 3306),
    ("R50x1+ViT-B/32", 7, 106), ("R50x1+ViT-B/16", 7, 274), ("R50x1+ViT-L/32", 7, 246),
    ("R50x1+ViT-L/16", 7, 834), ("R50x1+ViT-L/16", 14, 1668),
]  # fmt: skip


@pytest.mark.parametrize(("name", "epochs", "exaflops"), TABLE_6)
def test_training_cost_is_that_of_table_6(name, epochs, exaflops):
    tolerance = 0.025 if name in ("ViT-B/32", "R50x1") else 0.01
    assert training_exaflops(name, JFT_IMAGES, epochs) == pytest.approx(exaflops, rel=tolerance)


# GMACs of google-research/vision_transformer's models with 1000 classes.
REFERENCE = [
    ("ViT-Ti/16", 224, 1.254), ("ViT-S/32", 224, 1.143), ("ViT-B/16", 384, 55.5),
    ("ViT-L/16", 512, 362), ("ViT-H/14", 518, 1017),
]  # fmt: skip


@pytest.mark.parametrize(("name", "image_size", "gmacs"), REFERENCE)
def test_forward_cost_is_that_of_the_reference(name, image_size, gmacs):
    assert forward_macs(name, 1000, image_size) / 1e9 == pytest.approx(gmacs, rel=1e-3)


def step_of(family: str, side: int, **train: Any) -> Recipe:
    """Of an image of a family; keys of the model that are not of `train` are options."""
    keys = {key: train.pop(key) for key in list(train) if key not in TrainConfig.model_fields}
    return recipe_with(
        model={"name": family, "image_size": side, **FAMILIES[family], **keys}, train=train
    )


def forward_of(recipe: Recipe) -> int:
    return count_macs(forward_pass(prepared_model(recipe, 10), recipe, 1))


@pytest.mark.parametrize(
    ("family", "options", "pixels"),
    [
        ("ViT", {}, 16 * 3 * 8**2 * 32),
        ("ViT", {"pool": "gap", "representation": True}, 16 * 3 * 8**2 * 32),
        ("Axial-ViT", {}, 16 * 3 * 8**2 * 32),
        ("ResNet", {}, 16**2 * 3 * 7**2 * 64),
        ("AxialResNet", {}, 16**2 * 3 * 7**2 * 64),
        ("R+ViT", {}, 16**2 * 3 * 7**2 * 64),
    ],
)
def test_each_product_has_two_gradients_but_that_of_the_pixels(family, options, pixels):
    recipe = step_of(family, 32, **options)
    assert step_macs(recipe, 10) == 3 * forward_of(recipe) - pixels


@pytest.mark.parametrize("target", ["mean_color", "downsized", "full_patch"])
def test_masked_patches_are_counted_with_their_predictions(target):
    """All tokens of the last block, and predictions for 8 of 16 patches instead of the head."""
    outputs = {"mean_color": 512, "downsized": 16 * 512, "full_patch": 3 * 8**2}[target]
    recipe = step_of("ViT", 32, loss="masked_patch", masked_target=target)
    whole = forward_macs("ViT", 10, 32, **FAMILIES["ViT"])
    assert forward_of(recipe) == whole - 10 * 32 + 8 * 32 * outputs
