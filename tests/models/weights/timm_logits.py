"""Weights and images for the logits that timm's own code computes, kept as `timm_logits.json`.

Made by the script that commit a48c6e22 has at this path, with timm 1.0.31, in fp64.
"""

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).with_name("timm_logits.json")
CLASSES, SIDE, IMAGES = 10, 64, 2
SMALL = {"depth": 2, "embed_dim": 64, "num_heads": 2, "img_size": SIDE, "act_layer": "gelu_tanh"}
# Models as timm has them published, but for the size of a ViT and of what stands on a ResNet, and
# its GELU, which timm computes by erf (0.01 % of the largest logit) and the paper's code by tanh.
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": SMALL,
    "vit_base_r50_s16_224": SMALL,
    "vit_large_r50_s32_224": SMALL,
    "resnetv2_50x1_bit": {},
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
