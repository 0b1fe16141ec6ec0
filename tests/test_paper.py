"""Names of timm and of Hugging Face for the paper's models."""

import pytest
import torch

from vit_ray.config import load_recipe
from vit_ray.models import build_model
from vit_ray.paper import canonical_model


# Parameters in millions from timm's table of results (results-imagenet.csv), to two places.
@pytest.mark.parametrize(
    ("name", "canonical", "side", "millions"),
    [
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", "ViT-Ti/16", 224, 5.72),
        ("vit_small_patch32_384", "ViT-S/32", 384, 22.92),
        ("deit_base_patch16_384", "ViT-B/16", 384, 86.86),
        ("vit_base_patch8_224.augreg_in21k_ft_in1k", "ViT-B/8", 224, 86.58),
        ("google/vit-large-patch16-384", "ViT-L/16", 384, 304.72),
        ("google/vit-huge-patch14-224-in21k", "ViT-H/14", 224, 632.05),
        ("vit_base_r50_s16_384.orig_in21k_ft_in1k", "R50x1+ViT-B/16", 384, 98.95),
        ("vit_large_r50_s32_224", "R50x1+ViT-L/32", 224, 328.99),
        ("resnetv2_152x2_bit.goog_in21k_ft_in1k", "R152x2", None, 236.34),
        ("google/bit-50", "R50x1", None, 25.55),
    ],
)
def test_another_name_is_of_the_model_with_its_published_parameters(
    name, canonical, side, millions
):
    assert canonical_model(name) == (canonical, side)
    with torch.device("meta"):
        model = build_model(name, 1000, side or 224)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions


def test_a_recipe_has_the_catalogs_name_and_the_size_that_the_other_name_says():
    others = ("vit_base_patch16_rope_224", "facebook/vit-mae-base", "deit3_base_patch16_224")
    for name in ("ViT-B/16", *others):
        assert canonical_model(name) == (name, None)
    changes = ["model.name=vit_large_patch32_384", "model.image_size=384"]
    model = load_recipe("finetune/imagenet", changes).model
    assert (model.name, model.image_size) == ("ViT-L/32", 384)
    assert model == model.model_validate(model.model_dump())
    assert type(model)(name="vit_base_patch16_384").image_size == 384


def test_a_name_of_another_size_than_the_one_given_is_refused():
    name, message = "vit_base_patch16_384", "for 384 pixels, but image_size=224"
    with pytest.raises(ValueError, match=message):
        load_recipe("finetune/imagenet", [f"model.name={name}", "model.image_size=224"])
    with pytest.raises(ValueError, match=message):
        build_model(name, 10)
