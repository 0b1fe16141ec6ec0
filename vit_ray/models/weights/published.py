"""What stands beside published weights: the settings of transformers and timm, read and written.

`config.json` says what tensors do not show; it or the image processor has the mean and deviation by
which inputs were normalised. Sources: transformers' configuration classes, and timm's
`vision_transformer.py`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from vit_ray.models.fitting import Tensors
from vit_ray.models.resnet import BitResNet
from vit_ray.models.vit import PatchEmbedding, VisionTransformer

# Files in a folder of Hugging Face transformers.
FOLDER_WEIGHTS, FOLDER_CONFIG = "model.safetensors", "config.json"
FOLDER_PREPROCESSOR: Final = "preprocessor_config.json"
# Replaces the weights if these are split over files: says which file holds which tensor.
FOLDER_INDEX = "model.safetensors.index.json"

# Key for the recipe sections that say how an exported model is used.
USE = "vit_ray"

_ACTIVATIONS: Final = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
# transformers' defaults of a ViT, which its files may leave out.
_VIT_DEFAULTS: Final = {
    "image_size": 224, "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072,
    "num_attention_heads": 12, "patch_size": 16,
}  # fmt: skip
# Keys of a recipe's model, and what transformers and timm call them; the last two are none.
_KEYS: Final = {
    "image_size": ("image_size", "img_size"),
    "depth": ("num_hidden_layers", "depth"),
    "width": ("hidden_size", "embed_dim"),
    "mlp_dim": ("intermediate_size",),
    "num_heads": ("num_attention_heads", "num_heads"),
    "patch_size": ("patch_size",),
    "activation": ("hidden_act", "act_layer"),
    "norm_eps": ("layer_norm_eps",),
    "norm_layer": ("norm_layer",),
    "pooler_act": ("pooler_act",),
}

# Mean and deviation of each channel, with pixels in [0, 1]: inputs are (pixel - mean) / std.
Statistics = tuple[list[float], list[float]]


def weights_file(layout: str) -> str:
    """Name of the weights in the folder of a model."""
    return "model.npz" if layout == "jax" else FOLDER_WEIGHTS


def settings_beside(path: Path, name: str) -> dict[str, Any]:
    """A JSON file in the folder of a published model; empty if there is none.

    Args:
        path: the folder, or the weight file in it; a file with another name has no such folder.

    Raises:
        ValueError: it is not JSON.
    """
    file = (path if path.is_dir() else path.parent) / name
    is_in_folder = path.is_dir() or path.name in (FOLDER_WEIGHTS, FOLDER_INDEX)
    return parse_settings(file.read_bytes(), str(file)) if is_in_folder and file.is_file() else {}


def parse_settings(content: bytes, source: str) -> dict[str, Any]:
    """The content of such a file.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON ({error}); fetch it again") from None
    return settings if isinstance(settings, dict) else {}


def model_options(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of a recipe's model that a `config.json` of transformers or timm gives.

    An activation that we do not have keeps its name; so do other settings of the function.
    """
    defaults = _VIT_DEFAULTS if config.get("model_type") == "vit" else {}
    said = {**defaults, **config, **(config.get("model_args") or {})}
    found = {
        own: said[key] for own, keys in _KEYS.items() for key in keys if said.get(key) is not None
    }
    if {"embed_dim", "depth"} <= set(said):
        found["mlp_dim"] = int(said["embed_dim"] * said.get("mlp_ratio", 4))
    sides, patch = found.get("image_size"), found.get("patch_size")
    if isinstance(patch, int) and sides:
        found["grid"] = [
            side // patch for side in (sides if isinstance(sides, list) else [sides] * 2)
        ]
    if said.get("pos_embed") == "none":
        found["positions"] = "none"
    if "activation" in found:
        found["activation"] = _ACTIVATIONS.get(found["activation"], found["activation"])
    if said.get("global_pool") == "avg":
        found["pool"] = "gap"
    return found


def statistics_beside(path: Path) -> Statistics | None:
    """The statistics in the folder of a published model; None if inputs are in [-1, 1] as ours.

    Args:
        path: the folder, or the weight file in it.

    Raises:
        ValueError: they are not a mean and deviation of three channels, or not JSON.
    """
    timm, hub = (settings_beside(path, name) for name in (FOLDER_CONFIG, FOLDER_PREPROCESSOR))
    timm = {**timm, **(timm.get("pretrained_cfg") or {})}
    mean, std = hub.get("image_mean", timm.get("mean")), hub.get("image_std", timm.get("std"))
    if hub.get("do_normalize") is False:
        mean, std = [0.0] * 3, [1.0] * 3
    if mean is None or std is None:
        return None
    try:
        both = torch.tensor([mean, std], dtype=torch.float64)
    except (TypeError, ValueError):
        both = torch.zeros(0)
    if both.shape != (2, 3) or not bool((both[1] > 0).all()):
        raise ValueError(
            f"{path}: inputs are normalised by mean {mean!r} and deviation {std!r}; they must be "
            "three numbers each, and deviations above zero: fetch the folder again"
        )
    return None if bool(((both - 0.5).abs() < 1e-6).all()) else (mean, std)


def with_our_inputs(
    state: Tensors, model: nn.Module, statistics: Statistics, source: str
) -> Tensors:
    """Weights of the same function for inputs in [-1, 1]: another first kernel and bias.

    Args:
        state: with our own names.

    Raises:
        ValueError: the first layer pads its inputs, so there is no such kernel.
    """
    if not isinstance(getattr(model, "embedding", None), PatchEmbedding):
        raise ValueError(
            f"{source} takes inputs normalised by mean {statistics[0]} and deviation "
            f"{statistics[1]}; models here take pixels in [-1, 1] (0.5 and 0.5), and only a ViT on "
            "patches of the image can be converted to that"
        )
    names = ("embedding.projection.weight", "embedding.projection.bias")
    old_kernel, old_bias = (state[name] for name in names)
    if old_kernel.is_meta:  # only values would change
        return state
    mean, std = (torch.tensor(values).double().view(1, 3, 1, 1) for values in statistics)
    # An input of ours, x, is the pixel 0.5 x + 0.5.
    shift = (old_kernel.double() * (0.5 - mean) / std).sum(dim=(1, 2, 3))
    kernel, bias = old_kernel.double() * (0.5 / std), old_bias.double() + shift
    return {**state, names[0]: kernel.to(old_kernel.dtype), names[1]: bias.to(old_bias.dtype)}


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
    lacks_positions = has_class_token and not has_positions  # timm leaves out the token, too
    is_hybrid = not isinstance(model.embedding, PatchEmbedding)
    if is_hybrid or lacks_positions or model.options.representation:
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
            "act_layer": model.options.activation,
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
    if isinstance(model, BitResNet):
        return {
            "architectures": ["BitForImageClassification"],
            "model_type": "bit",
            "depths": list(model.size.stages),
            "hidden_sizes": [4 * width for width in model.size.widths],
            "embedding_size": model.size.widths[0],
            "layer_type": "preactivation",
        }
    assert isinstance(model, VisionTransformer)
    activation, patch_size = model.options.activation, model.embedding.patch_size
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": model.size.width,
        "intermediate_size": model.size.mlp_dim,
        "num_hidden_layers": model.size.depth,
        "num_attention_heads": model.size.num_heads,
        "patch_size": patch_size,
        "image_size": [side * patch_size for side in model.grid],
        "hidden_act": "gelu_pytorch_tanh" if activation == "gelu_tanh" else activation,
        "layer_norm_eps": model.options.norm_eps,
    }
