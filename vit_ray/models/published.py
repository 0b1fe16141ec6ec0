"""Published weights: names and shapes of their tensors next to ours, and their settings files.

Each family of models has a table of names, with a column for each layout. `config.json` has the
options that tensors do not show; it or the image processor has the mean and deviation that
normalise inputs.

Sources: google-research/vision_transformer (ViT, hybrids), big_transfer (BiT),
huggingface/pytorch-image-models, and transformers' files and classes.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from vit_ray.models.axial import AxialViT
from vit_ray.models.fitting import SPARE_PREFIXES, Statistics, Tensors
from vit_ray.models.resnet import BitResNet, ResNetEmbedding
from vit_ray.models.vit import PatchEmbedding, VisionTransformer

# Files in a folder of Hugging Face transformers.
FOLDER_WEIGHTS, FOLDER_CONFIG = "model.safetensors", "config.json"
FOLDER_PREPROCESSOR: Final = "preprocessor_config.json"

# Key in `config.json` for the recipe sections that say how an exported model is used.
USE = "vit_ray"

# Defaults of a ViT in transformers, which its files may leave out.
_VIT_DEFAULTS: Final = {
    "image_size": 224, "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072,
    "num_attention_heads": 12, "patch_size": 16,
}  # fmt: skip
# Keys of a recipe's model, and their names in transformers and timm. The last two are no keys of a
# recipe: `fit_state_dict` compares them.
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

LAYOUTS = ("jax", "timm", "huggingface", "vit_ray")

# The head's bias in the layouts; its length is the number of classes.
HEAD_BIASES = (
    "head/bias",
    "resnet/head/conv2d/bias",
    "head.bias",
    "head.fc.bias",
    "classifier.bias",
    "classifier.1.bias",
)

# By layout: prefixes of the first layer, which every file has.
_FIRST_LAYERS = {
    "jax": ("embedding/kernel", "resnet/root_block/"),
    "huggingface": ("embeddings.patch_embeddings.", "embedder.convolution."),
    "timm": ("patch_embed.proj.", "stem.conv."),
    "vit_ray": ("embedding.projection.", "units.0."),
}

# Prefix of an encoder's names in Hugging Face's models with a head.
ENCODER = r"^(vit|deit|bit)\."

# Columns: our layer, its kind, and its names in files of JAX, timm and Hugging Face. The first row
# gives the text for @: the prefix of a block or unit (stage1 and unit1 count from 1). A layer has a
# kernel or scale, and a bias; the kind `kernel` has no bias, and `tensor` is one tensor. * is
# query, key and value; - means no name. Names of Hugging Face are without the prefix `ENCODER`.
_VIT = """
@ - Transformer/encoderblock_{block}/ blocks.{block}. encoder.layer.{block}.
embedding.projection conv embedding patch_embed.proj embeddings.patch_embeddings.projection
class_token.token tensor cls cls_token embeddings.cls_token
positions.0.table tensor Transformer/posembed_input/pos_embedding pos_embed embeddings.position_embeddings
blocks.{block}.attention_norm norm @LayerNorm_0 @norm1 @layernorm_before
blocks.{block}.attention.qkv qkv @MultiHeadDotProductAttention_1/* @attn.qkv @attention.attention.*
blocks.{block}.attention.out out @MultiHeadDotProductAttention_1/out @attn.proj @attention.output.dense
blocks.{block}.mlp_norm norm @LayerNorm_2 @norm2 @layernorm_after
blocks.{block}.mlp.expand linear @MlpBlock_3/Dense_0 @mlp.fc1 @intermediate.dense
blocks.{block}.mlp.contract linear @MlpBlock_3/Dense_1 @mlp.fc2 @output.dense
norm norm Transformer/encoder_norm norm layernorm
fc_norm norm - fc_norm -
representation linear pre_logits pre_logits.fc pooler.dense
head linear head head classifier
"""  # noqa: E501
_BACKBONE = """
@ - block{stage1}/unit{unit1}/ patch_embed.backbone.stages.{stage}.blocks.{unit}.
embedding.root kernel conv_root patch_embed.backbone.stem.conv
embedding.root_norm norm gn_root patch_embed.backbone.stem.norm
embedding.units.{index}.conv{part} kernel @conv{part} @conv{part}
embedding.units.{index}.norm{part} norm @gn{part} @norm{part}
embedding.units.{index}.shortcut.conv kernel @conv_proj @downsample.conv
embedding.units.{index}.shortcut.norm norm @gn_proj @downsample.norm
"""
_BIT = """
@ - resnet/block{stage1}/unit{unit1:02d}/ stages.{stage}.blocks.{unit}. encoder.stages.{stage}.layers.{unit}.
root kernel resnet/root_block/standardized_conv2d stem.conv embedder.convolution
units.{index}.conv{part} kernel @{letter}/standardized_conv2d @conv{part} @conv{part}
units.{index}.norm{part} group_norm @{letter}/group_norm @norm{part} @norm{part}
units.{index}.shortcut kernel @a/proj/standardized_conv2d @downsample.conv @downsample.conv
norm group_norm resnet/group_norm norm norm
head head_conv resnet/head/conv2d head.fc classifier.1
"""  # noqa: E501

# By layout and kind: our suffix, the published suffix, and the key of their shapes in `_SHAPES`.
_JAX = {
    "tensor": [("", "", "same")],
    "conv": [(".weight", "/kernel", "conv"), (".bias", "/bias", "same")],
    "kernel": [(".weight", "/kernel", "conv")],
    "linear": [(".weight", "/kernel", "linear"), (".bias", "/bias", "same")],
    "qkv": [(".weight", "/kernel", "qkv_kernel"), (".bias", "/bias", "qkv_bias")],
    "out": [(".weight", "/kernel", "out_kernel"), (".bias", "/bias", "same")],
    "norm": [(".weight", "/scale", "vector"), (".bias", "/bias", "vector")],
    "group_norm": [(".weight", "/gamma", "vector"), (".bias", "/beta", "vector")],
    "head_conv": [(".weight", "/kernel", "head_conv_jax"), (".bias", "/bias", "vector")],
}
_TORCH = {
    **{kind: [(".weight", ".weight", "same"), (".bias", ".bias", "same")] for kind in _JAX},
    "tensor": [("", "", "same")],
    "kernel": [(".weight", ".weight", "same")],
}
_SUFFIXES = {
    "jax": _JAX,
    "timm": _TORCH
    | {"head_conv": [(".weight", ".weight", "head_conv"), (".bias", ".bias", "same")]},
    "huggingface": _TORCH | {"qkv": [(".weight", ".weight", "parts"), (".bias", ".bias", "parts")]},
}

# From published tensors to ours, and back. `linear` is (in, out) for our (out, in); `conv` is (h,
# w, in, out) for (out, in, h, w); `qkv` kernels are (D, H, K) each and biases (H, K); `out` is (H,
# K, D); `head_conv` is a 1 x 1 convolution for a matrix; `vector` may come with leading axes of
# length 1; `parts` are matrices or vectors in our own orientation, one for each of q, k and v.
_SHAPES: dict[
    str, tuple[Callable[[list[Tensor]], Tensor], Callable[[Tensor, int], list[Tensor]]]
] = {
    "same": (lambda parts: parts[0], lambda tensor, heads: [tensor]),
    "vector": (lambda parts: parts[0].flatten(), lambda tensor, heads: [tensor]),
    "linear": (lambda parts: parts[0].T, lambda tensor, heads: [tensor.T]),
    "conv": (
        lambda parts: parts[0].permute(3, 2, 0, 1),
        lambda tensor, heads: [tensor.permute(2, 3, 1, 0)],
    ),
    "qkv_kernel": (
        lambda parts: torch.cat([part.flatten(1).T for part in parts]),
        lambda tensor, heads: [
            part.T.reshape(part.shape[1], heads, -1) for part in tensor.chunk(3)
        ],
    ),
    "qkv_bias": (
        lambda parts: torch.cat([part.flatten() for part in parts]),
        lambda tensor, heads: [part.reshape(heads, -1) for part in tensor.chunk(3)],
    ),
    "out_kernel": (
        lambda parts: parts[0].flatten(0, 1).T,
        lambda tensor, heads: [tensor.T.reshape(heads, -1, tensor.shape[0])],
    ),
    "parts": (lambda parts: torch.cat(parts), lambda tensor, heads: list(tensor.chunk(3))),
    "head_conv_jax": (lambda parts: parts[0][0, 0].T, lambda tensor, heads: [tensor.T[None, None]]),
    "head_conv": (
        lambda parts: parts[0].flatten(1),
        lambda tensor, heads: [tensor[:, :, None, None]],
    ),
}


class Rule(NamedTuple):
    """One of our tensors, and the published tensors that it is made of.

    Attributes:
        name: of our tensor.
        published: names of the published tensors.
        shape: how the shapes differ, a key of `_SHAPES`.
    """

    name: str
    published: list[str]
    shape: str = "same"

    def to_ours(self, parts: list[Tensor]) -> Tensor:
        return _SHAPES[self.shape][0](parts).contiguous()

    def to_published(self, tensor: Tensor, num_heads: int) -> Tensors:
        """The published tensors from ours; `num_heads` is of the encoder, if there is one."""
        parts = [part.contiguous() for part in _SHAPES[self.shape][1](tensor, num_heads)]
        return dict(zip(self.published, parts, strict=True))


def rules_for(model: nn.Module, layout: str) -> list[Rule]:
    """The rules of a layout for a model, head included.

    A published layout's rules for a ViT include those of `SPARE_PREFIXES`, whether or not the model
    has them.

    Raises:
        ValueError: if the layout is unknown or has no names for such a model.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    if layout == "vit_ray":
        return [Rule(name, [name]) for name in model.state_dict()]
    if isinstance(model, BitResNet):
        return _rules(_BIT, layout, _units(model.size.stages))
    backbone = getattr(model, "embedding", None)
    is_hybrid = isinstance(backbone, ResNetEmbedding) and layout == "huggingface"
    if not isinstance(model, VisionTransformer) or isinstance(model, AxialViT) or is_hybrid:
        kind = f"{'hybrid ' if is_hybrid else ''}{type(model).__name__}"
        raise ValueError(f"layout={layout!r} has no names for a {kind}; use layout='vit_ray'")
    names = model.state_dict()
    rules = _rules(_VIT, layout, [{"block": index} for index in range(model.size.depth)])
    rules = [rule for rule in rules if rule.name in names or rule.name.startswith(SPARE_PREFIXES)]
    if isinstance(backbone, ResNetEmbedding):
        rules += _rules(_BACKBONE, layout, _units(backbone.size.stages))
    return rules


def _units(stages: tuple[int, ...]) -> list[dict[str, Any]]:
    """The numbers in a table's names, for each convolution of each unit of a ResNet."""
    units = [(stage, unit) for stage, count in enumerate(stages) for unit in range(count)]
    return [
        {"index": index, "stage": stage, "unit": unit, "stage1": stage + 1, "unit1": unit + 1}
        | {"part": part, "letter": "abc"[part - 1]}
        for index, (stage, unit) in enumerate(units)
        for part in (1, 2, 3)
    ]


def _rules(table: str, layout: str, units: list[dict[str, Any]]) -> list[Rule]:
    """Rules from a table's rows, each row for all blocks or units (the numbers in its names)."""
    column = LAYOUTS.index(layout)
    (_, _, *prefixes), *rows = (line.split() for line in table.strip().splitlines())
    rules: dict[str, Rule] = {}
    for layer, kind, *columns in rows:
        published = columns[column].replace("@", prefixes[column])
        queries = ("query", "key", "value") if "*" in published else ("",)
        for unit in units if published != "-" else []:
            if "shortcut" in layer and unit["unit"]:
                continue
            theirs = published.format_map(unit)
            for suffix, their_suffix, shape in _SUFFIXES[layout][kind]:
                names = [theirs.replace("*", query) + their_suffix for query in queries]
                name = layer.format_map(unit) + suffix
                rules[name] = Rule(name, names, shape)
    return list(rules.values())


def detect_layout(names: Iterable[str]) -> str:
    """The layout of a file, from the names of its tensors.

    Raises:
        ValueError: if no layout has such names.
    """
    for layout, first_layer in _FIRST_LAYERS.items():
        if any(name.startswith(first_layer) for name in names):
            return layout
    listed = ", ".join(sorted(names)[:8])
    raise ValueError(
        f"the tensors' names are of no known layout ({', '.join(LAYOUTS)}): {listed}, ...; check "
        "that the file holds a ViT, a hybrid or a BiT ResNet"
    )


def weights_file(layout: str) -> str:
    """Name of the weight file in a model's folder."""
    return "model.npz" if layout == "jax" else FOLDER_WEIGHTS


def settings_beside(path: Path, name: str) -> dict[str, Any]:
    """A JSON file in the folder of a published model; empty if there is none.

    Args:
        path: the folder, or its weight file; a file with another name has no settings.

    Raises:
        ValueError: the file is not JSON.
    """
    file = (path if path.is_dir() else path.parent) / name
    is_in_folder = path.is_dir() or path.name == FOLDER_WEIGHTS
    return parse_settings(file.read_bytes(), str(file)) if is_in_folder and file.is_file() else {}


def parse_settings(content: bytes, source: str) -> dict[str, Any]:
    """The object in a JSON file; empty for any other value.

    Raises:
        ValueError: the content is not JSON.
    """
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON ({error}); fetch it again") from None
    return settings if isinstance(settings, dict) else {}


def model_options(config: dict[str, Any]) -> dict[str, Any]:
    """Options of our models from a `config.json` of transformers or timm; also some of `Origin`.

    Activations that we do not have keep their names.
    """
    defaults = _VIT_DEFAULTS if config.get("model_type") == "vit" else {}
    settings = {**defaults, **config, **(config.get("model_args") or {})}
    options = {
        option: settings[key]
        for option, keys in _KEYS.items()
        for key in keys
        if settings.get(key) is not None
    }
    if {"embed_dim", "depth"} <= set(settings):
        options["mlp_dim"] = int(settings["embed_dim"] * settings.get("mlp_ratio", 4))
    sides, patch = options.get("image_size"), options.get("patch_size")
    if isinstance(patch, int) and sides:
        height_width = sides if isinstance(sides, list) else [sides, sides]
        options["grid"] = [side // patch for side in height_width]
    if settings.get("pos_embed") == "none":
        options["positions"] = "none"
    if options.get("activation") in ("gelu_pytorch_tanh", "gelu_new"):
        options["activation"] = "gelu_tanh"
    if settings.get("global_pool") == "avg":
        options["pool"] = "gap"
    return options


def statistics_beside(path: Path) -> Statistics | None:
    """Mean and deviation that normalise a published model's inputs; None for [-1, 1], as ours.

    Args:
        path: the model's folder, or its weight file.

    Raises:
        ValueError: they are not three numbers each, or a file is not JSON.
    """
    timm, hub = (settings_beside(path, name) for name in (FOLDER_CONFIG, FOLDER_PREPROCESSOR))
    timm = {**timm, **(timm.get("pretrained_cfg") or {})}
    mean, std = hub.get("image_mean", timm.get("mean")), hub.get("image_std", timm.get("std"))
    if hub.get("do_normalize") is False:
        mean, std = [0.0] * 3, [1.0] * 3
    if mean is None or std is None:
        return None
    try:
        both = torch.tensor([mean, std], dtype=torch.float64).view(2, 3)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{path}: inputs are normalised by mean {mean!r} and deviation {std!r}; they must be "
            "three numbers each: fetch the folder again"
        ) from None
    return None if bool(((both - 0.5).abs() < 1e-6).all()) else (mean, std)


def folder_config(model: nn.Module, layout: str, classes: Sequence[str]) -> dict[str, Any]:
    """`config.json`: the class names, and how the library of the layout builds the model.

    The defaults of transformers differ from our blocks in the activation and the epsilon, those of
    timm in the activation and in the norm of a mean over tokens. With this file timm 1.0.20 gives
    our logits, within 1e-6; models that timm does not have get no `architecture`.
    """
    num_classes = model.get_parameter("head.bias").numel()
    if layout == "huggingface":
        labels = {i: classes[i] if classes else f"LABEL_{i}" for i in range(num_classes)}
        indices = {name: index for index, name in labels.items()}
        return {**_huggingface_config(model), "id2label": labels, "label2id": indices}
    config: dict[str, Any] = {"num_classes": num_classes}
    if classes:
        config["label_names"] = list(classes)
    if layout != "timm" or not isinstance(model, VisionTransformer):
        return config
    has_class_token, has_positions = model.class_token is not None, len(model.positions) > 0
    lacks_positions = has_class_token and not has_positions  # timm also leaves out the token
    is_hybrid = not isinstance(model.embedding, PatchEmbedding)
    if is_hybrid or lacks_positions or model.options.representation:
        return config
    size, patch = model.size, model.embedding.patch_size
    sides = [side * patch for side in model.grid]
    is_exact = int(size.width * (size.mlp_dim / size.width)) == size.mlp_dim
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
            # timm truncates the product of this ratio and the width to a whole number.
            "mlp_ratio": (size.mlp_dim + (0 if is_exact else 0.5)) / size.width,
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
