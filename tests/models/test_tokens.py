"""Fixed positions against big_vision's formula, files with them, and options that cannot be."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.models.small import TINY_VIT, small_model, some_images
from vit_ray.evaluation.inspection import position_vectors
from vit_ray.models.positions import sincos_table

WIDTH, HEADS, MLP = TINY_VIT["width"], TINY_VIT["num_heads"], TINY_VIT["mlp_dim"]
IMAGES = some_images()


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
    fixed: Any = small_model("ViT", positions="sincos_2d", pool=pool).eval()
    plain: Any = small_model("ViT", positions="none", pool=pool).eval()
    assert fixed.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(fixed.state_dict())
    table = sincos_table((4, 4), WIDTH)
    with torch.no_grad():
        expected = plain.encode(plain.embed(IMAGES) + table)
        assert torch.allclose(fixed.encode(fixed.embed(IMAGES)), expected, atol=1e-6)
    vectors = position_vectors(fixed)
    assert np.allclose(vectors.reshape(16, -1), table.numpy())


@pytest.mark.parametrize("family", ["ViT", "Axial-ViT"])
def test_every_layer_norm_has_the_models_epsilon(family):
    model = small_model(family, norm_eps=3e-5)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert {norm.eps for norm in norms} == {3e-5}
    assert len(norms) == (2 * 2 + 1 if family == "ViT" else 2 * 4 + 1)
