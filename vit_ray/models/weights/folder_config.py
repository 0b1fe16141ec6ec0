"""`config.json` next to weights: how transformers or timm builds the same model.

Read for what tensors do not show, and written for those libraries with the class names.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vit_ray.models.resnet import BitResNet
from vit_ray.models.vit import PatchEmbedding, VisionTransformer

# Files in a folder of Hugging Face transformers.
FOLDER_WEIGHTS, FOLDER_CONFIG = "model.safetensors", "config.json"
# Replaces the weights if these are split over files: says which file holds which tensor.
FOLDER_INDEX = "model.safetensors.index.json"

USE = "vit_ray"
"""Key for the recipe sections that say how an exported model is used."""


def weights_file(layout: str) -> str:
    """Name of the weights in the folder of a model."""
    return "model.npz" if layout == "jax" else FOLDER_WEIGHTS


def config_beside(path: Path) -> dict[str, Any]:
    """The `config.json` that transformers or timm would build a folder's model with.

    Args:
        path: the folder, or the weight file in it; a file with another name has no such folder.
    """
    if path.is_dir():
        return read_settings(path / FOLDER_CONFIG)
    is_in_folder = path.name in (FOLDER_WEIGHTS, FOLDER_INDEX)
    return read_settings(path.with_name(FOLDER_CONFIG)) if is_in_folder else {}


def read_settings(file: Path) -> dict[str, Any]:
    """Content of a JSON file next to weights; empty if there is none.

    Raises:
        ValueError: it is not JSON.
    """
    return parse_settings(file.read_bytes(), str(file)) if file.is_file() else {}


def parse_settings(content: bytes, source: str) -> dict[str, Any]:
    """The content of such a file.

    Raises:
        ValueError: as `read_settings`.
    """
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON ({error}); fetch it again") from None
    return settings if isinstance(settings, dict) else {}


def folder_config(model: nn.Module, layout: str, classes: Sequence[str]) -> dict[str, Any]:
    """`config.json`: the class names, and how a layout's own library builds the model.

    transformers' defaults differ from our blocks in the activation and the epsilon, timm's in the
    activation and in the norm of a mean over tokens. With this file timm 1.0.20 gives our logits,
    within 1e-6; a model that it does not have gets no `architecture`.
    """
    num_classes = model.get_parameter("head.bias").numel()
    if layout == "huggingface":
        labels = {i: classes[i] if classes else f"LABEL_{i}" for i in range(num_classes)}
        places = {name: index for index, name in labels.items()}
        return {**_huggingface_config(model), "id2label": labels, "label2id": places}
    config: dict[str, Any] = {"num_classes": num_classes}
    if classes:
        config["label_names"] = list(classes)
    if layout != "timm" or not isinstance(model, VisionTransformer):
        return config
    has_class_token, has_positions = model.class_token is not None, len(model.positions) > 0
    options = model.options
    if (
        options.representation
        or not isinstance(model.embedding, PatchEmbedding)
        or (has_class_token and not has_positions)  # without positions timm leaves the token out
    ):
        return config
    size, patch = model.size, model.embedding.patch_size
    sides = [side * patch for side in model.grid]
    exact = int(size.width * (size.mlp_dim / size.width)) == size.mlp_dim
    return {
        "architecture": "vit_base_patch16_224",
        **config,
        "num_features": size.width,
        "model_args": {
            "global_pool": "token" if has_class_token else "avg",
            "img_size": sides,
            "patch_size": patch,
            "embed_dim": size.width,
            "depth": size.depth,
            "num_heads": size.num_heads,
            # It truncates the product of this and the width to a whole number.
            "mlp_ratio": (size.mlp_dim + (0 if exact else 0.5)) / size.width,
            "class_token": has_class_token,
            "fc_norm": False,
            "act_layer": options.activation,
            **({} if has_positions else {"pos_embed": "none"}),
        },
        "pretrained_cfg": {
            "num_classes": num_classes,
            "input_size": [3, *sides],
            "interpolation": "bilinear",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def _huggingface_config(model: nn.Module) -> dict[str, Any]:
    if isinstance(model, VisionTransformer):
        embedding = model.embedding
        assert isinstance(embedding, PatchEmbedding)
        size, patch_size = model.size, embedding.patch_size
        activation = model.options.activation
        config: dict[str, Any] = {
            "architectures": ["ViTForImageClassification"],
            "model_type": "vit",
            "hidden_size": size.width,
            "intermediate_size": size.mlp_dim,
            "num_hidden_layers": size.depth,
            "num_attention_heads": size.num_heads,
            "patch_size": patch_size,
            "image_size": [side * patch_size for side in model.grid],
            "hidden_act": "gelu_pytorch_tanh" if activation == "gelu_tanh" else activation,
            "layer_norm_eps": model.options.norm_eps,
        }
    else:
        assert isinstance(model, BitResNet)
        config = {
            "architectures": ["BitForImageClassification"],
            "model_type": "bit",
            "depths": list(model.size.stages),
            "hidden_sizes": [4 * width for width in model.size.widths],
            "embedding_size": model.size.widths[0],
            "layer_type": "preactivation",
        }
    return config
