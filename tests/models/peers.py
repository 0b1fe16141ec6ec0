"""The small ViT of these tests by transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification


def transformers_vit(
    folder: Path, kind: Any = ViTForImageClassification, **settings: Any
) -> nn.Module:
    """Random in every parameter, and saved; with other settings of its `ViTConfig`."""
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        patch_size=8, image_size=32, num_labels=5,
    )  # fmt: skip
    config.update({"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, **settings})
    config._attn_implementation = "eager"  # which shows its weights
    torch.manual_seed(3)
    peer: nn.Module = kind(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    peer.save_pretrained(folder)
    return peer
