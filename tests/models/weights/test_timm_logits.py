"""Models with drawn weights in timm's layout against logits that timm's own code computed."""

import json
import zlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.weights.timm_logits import CLASSES, FILE, MODELS, SIDE, drawn, images
from vit_ray.checkpoints.init_weights import open_weights
from vit_ray.models import build_model
from vit_ray.models.layers import StandardizedConv2d
from vit_ray.models.weights import load_weights, save_weights

ENCODER = {"depth": 2, "width": 64, "mlp_dim": 256, "num_heads": 2}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit_tiny_patch16_224": ("ViT", {**ENCODER, "patch_size": 16}),
    "vit_base_r50_s16_224": ("R+ViT", {**ENCODER, "stages": (3, 4, 9), "width_factor": 1}),
    "vit_large_r50_s32_224": ("R+ViT", {**ENCODER, "stages": (3, 4, 6, 3), "width_factor": 1}),
    "resnetv2_50x1_bit": ("ResNet", {"stages": (3, 4, 6, 3), "width_factor": 1}),
}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_timms_code_with_the_same_weights(name, tmp_path, monkeypatch):
    # All in fp64: what is fp32 in every precision, standardised kernels and logits, too.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    kept = json.loads(FILE.read_text())[name]
    family, options = OURS[name]
    model, path = build_model(family, CLASSES, SIDE, **options), tmp_path / "model.safetensors"
    save_weights(model, path, "timm")
    shapes = {key: tuple(tensor.shape) for key, tensor in load_file(path).items()}
    assert len(shapes) == kept["tensors"]
    assert zlib.crc32(json.dumps(sorted(shapes.items())).encode()) == kept["crc32_of_shapes"]
    save_file({key: drawn(key, shape) for key, shape in shapes.items()}, path)
    assert open_weights(str(path)).num_classes == CLASSES
    load_weights(model, path)
    expected = torch.tensor(kept["logits"], dtype=torch.float64)
    # Measured: 5e-16 for the ViT, and by the constants alone 1.1e-5 (hybrids) and 2e-6 (BiT).
    assert apart(model, expected) < 2e-5
    take_timms_constants(model)
    assert apart(model, expected) < 1e-12  # 5e-16 to 6e-15


def apart(model: nn.Module, expected: Tensor) -> float:
    with torch.no_grad():
        logits: Tensor = model.double().eval()(images())
    assert logits.dtype == expected.dtype
    return float((logits - expected).abs().max() / expected.abs().max())


def take_timms_constants(model: nn.Module) -> None:
    """What keeps a division from 0; ours are those of the models' own authors."""
    for module in model.modules():
        if isinstance(module, StandardizedConv2d):
            module.eps, module.eps_on_deviation = 1e-8, False
        elif isinstance(module, nn.GroupNorm):
            module.eps = 1e-5
