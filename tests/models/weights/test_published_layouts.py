"""Files as they are published: every name, shape and type, in as many blocks as a test can afford.

Listings: `gs://vit_models/imagenet21k/ViT-B_16.npz`, `ViT-L_16.npz`, `ViT-H_14.npz`
(google-research/vision_transformer).
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.models.small import relative_difference, some_images
from tests.models.weights.published import SIZES, drawn, jax_shapes, jax_vit_logits
from vit_ray.checkpoints.init_weights import initialize_weights, open_weights
from vit_ray.models import build_model

I21K = 21843


def vit(name: str, num_classes: int, image_size: int = 224, **options: Any) -> nn.Module:
    return build_model(
        "ViT", num_classes, image_size, **{"depth": 1, **SIZES[name], **options}
    ).eval()


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", SIZES)
def test_the_npz_of_imagenet_21k_fits_its_model_and_one_to_be_fine_tuned(name, tmp_path):
    # Zeros are written fast; the head of the published ViT-H_14 is of zeros, too.
    arrays = {
        key: np.zeros(shape, np.float32) for key, shape in jax_shapes(name, I21K, True).items()
    }
    arrays["Transformer/posembed_input/pos_embedding"] += 1.0
    path = str(tmp_path / f"{name}.npz")
    np.savez(path, **arrays)  # type: ignore[arg-type]
    assert open_weights(path).num_classes == I21K
    whole = vit(name, I21K, representation=True)
    report = initialize_weights(whole, path, new_head=False)
    assert (report.new, report.ignored, report.resized) == ([], [], [])
    tuned = vit(name, 10, image_size=2 * 224)
    report = initialize_weights(tuned, path, new_head=True)
    assert sorted(report.new) == ["head.bias", "head.weight"]
    assert sorted(report.ignored) == [
        "head.bias", "head.weight", "representation.bias", "representation.weight",
    ]  # fmt: skip
    assert len(report.resized) == 1
    deeper = vit(name, 10, depth=2)
    with pytest.raises(ValueError, match=r"Transformer/encoderblock_1/LayerNorm_0/bias"):
        initialize_weights(deeper, path, new_head=True)
    heads = 16 if name == "ViT-B_16" else 12
    with pytest.raises(ValueError, match=f"this one has num_heads={heads}"):
        initialize_weights(vit("ViT-B_16" if heads == 12 else "ViT-L_16", 10), path, new_head=True)


def test_a_model_in_the_jax_layout_has_the_logits_of_its_names(tmp_path):
    """timm's and transformers' layouts: `test_timm_logits.py`, `tests/models/test_vit.py`."""
    arrays = drawn(jax_shapes("ViT-B_16", 1000, has_representation=False))
    images = some_images(1, (224, 224))
    expected = jax_vit_logits(arrays, images, patch=16, depth=1)
    path = tmp_path / "ViT-B_16-224.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    assert open_weights(str(path)).num_classes == 1000
    model = vit("ViT-B_16", 1000)
    report = initialize_weights(model, str(path), new_head=False)
    assert (report.new, report.ignored, report.resized) == ([], [], [])
    with torch.no_grad():
        assert relative_difference(model(images).double(), expected) < 1e-4
