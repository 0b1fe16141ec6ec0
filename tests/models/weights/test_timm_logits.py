"""Models with drawn weights in timm's layout against logits that timm's own code computed.

`timm_logits.json` was made by the script that commit a48c6e22 has as `timm_logits.py` here, with
timm 1.0.31, in fp64.
"""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vit_ray.checkpoints.init_weights import open_weights
from vit_ray.models import build_model
from vit_ray.models.layers import StandardizedConv2d
from vit_ray.models.weights import load_weights, save_weights

FILE = Path(__file__).with_name("timm_logits.json")
CLASSES, SIDE, IMAGES = 10, 64, 2
# Models as timm has them published, but for the size of a ViT and of what stands on a ResNet, and
# its GELU, which timm computes by erf (0.01 % of the largest logit) and the paper's code by tanh.
ENCODER = {"depth": 2, "width": 64, "mlp_dim": 256, "num_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit_tiny_patch16_224": ("ViT", {**ENCODER, "patch_size": 16}),
    "vit_base_r50_s16_224": ("R+ViT", {**ENCODER, "stages": (3, 4, 9), "width_factor": 1}),
    "vit_large_r50_s32_224": ("R+ViT", {**ENCODER, "stages": (3, 4, 6, 3), "width_factor": 1}),
    "resnetv2_50x1_bit": ("ResNet", {"stages": (3, 4, 6, 3), "width_factor": 1}),
}


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers in fp32 that depend on the name alone, as large as weights of that shape are."""
    random = np.random.RandomState(zlib.crc32(name.encode()))  # whose numbers never change
    spread = random.uniform(-1.0, 1.0, shape)
    if len(shape) > 1:
        spread = spread * math.sqrt(3 / math.prod(shape[1:]))
    elif name.endswith("weight"):  # of a norm
        spread = 1 + 0.2 * spread
    return torch.from_numpy(spread.astype(np.float32))


def images() -> Tensor:
    """float64 (B, 3, H, W) in [-1, 1]."""
    return drawn("images", (IMAGES * 3 * SIDE * SIDE,)).double().view(IMAGES, 3, SIDE, SIDE)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_timms_code_with_the_same_weights(name, tmp_path, monkeypatch):
    # All in fp64: what is fp32 in every precision, standardised kernels and logits, too.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    kept = json.loads(FILE.read_text())[name]
    family, options = MODELS[name]
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
