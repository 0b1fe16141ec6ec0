"""Names and shapes of tensors in published checkpoints, next to our own: one table a family.

A layout is a column. Sources: google-research/vision_transformer (ViT, hybrids), big_vision (its
ViT's spelling), big_transfer (BiT), huggingface/pytorch-image-models, and transformers' files.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit_ray.models.axial import AxialViT
from vit_ray.models.fitting import SPARE_PREFIXES, Tensors
from vit_ray.models.resnet import BitResNet, ResNetEmbedding
from vit_ray.models.vit import VisionTransformer

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

# Of every file, by layout.
_FIRST_LAYERS = {
    "jax": ("embedding/kernel", "resnet/root_block/"),
    "huggingface": ("embeddings.patch_embeddings.", "embedder.convolution."),
    "timm": ("patch_embed.proj.", "stem.conv."),
    "vit_ray": ("embedding.projection.", "units.0."),
}

# What Hugging Face puts before the names of an encoder with a head.
ENCODER = r"^(vit|deit|bit)\."

# Our part, its kind, and its names in files of JAX, timm and Hugging Face; the first line is what @
# stands for: a block or unit, by its numbers (stage1 and unit1 count from 1). A part is a kernel or
# scale and a bias; `kernel` has no bias, and `tensor` is one tensor. | is between spellings, of
# which the first is written; * is query, key and value; - is no name. Names of Hugging Face are
# those of an encoder alone.
_VIT = """
@ - Transformer/encoderblock_{block}/ blocks.{block}. encoder.layer.{block}.
embedding.projection conv embedding patch_embed.proj embeddings.patch_embeddings.projection
class_token.token tensor cls cls_token embeddings.cls_token
positions.0.table tensor Transformer/posembed_input/pos_embedding|Transformer/pos_embedding|pos_embedding pos_embed embeddings.position_embeddings
blocks.{block}.attention_norm norm @LayerNorm_0 @norm1 @layernorm_before
blocks.{block}.attention.qkv qkv @MultiHeadDotProductAttention_1/*|@MultiHeadDotProductAttention_0/* @attn.qkv @attention.attention.*
blocks.{block}.attention.out out @MultiHeadDotProductAttention_1/out|@MultiHeadDotProductAttention_0/out @attn.proj @attention.output.dense
blocks.{block}.mlp_norm norm @LayerNorm_2|@LayerNorm_1 @norm2 @layernorm_after
blocks.{block}.mlp.expand linear @MlpBlock_3/Dense_0|@MlpBlock_0/Dense_0 @mlp.fc1 @intermediate.dense
blocks.{block}.mlp.contract linear @MlpBlock_3/Dense_1|@MlpBlock_0/Dense_1 @mlp.fc2 @output.dense
norm norm Transformer/encoder_norm norm layernorm
fc_norm norm - fc_norm -
representation linear pre_logits pre_logits.fc|pre_logits pooler.dense
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

# By layout and kind: our leaf, theirs, and how their shapes differ.
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
_TIMM_HEAD = [(".weight", ".weight", "head_conv"), (".bias", ".bias", "same")]
_SPLIT_QKV = [(".weight", ".weight", "parts"), (".bias", ".bias", "parts")]
_LEAVES = {
    "jax": _JAX,
    "timm": {**_TORCH, "head_conv": _TIMM_HEAD},
    "huggingface": {**_TORCH, "qkv": _SPLIT_QKV},
}

# From published tensors to ours, and back. `linear` is (in, out) for our (out, in); `conv` is (h,
# w, in, out) for (out, in, h, w); `qkv` kernels are (D, H, K) each and biases (H, K); `out` is (H,
# K, D); `head_conv` is a 1 x 1 convolution for a matrix; `vector` may come with leading axes of
# length 1; `parts` are matrices or vectors in our own orientation, one for each of q, k and v.
_SHAPES: dict[
    str, tuple[Callable[[list[Tensor]], Tensor], Callable[[Tensor, int], list[Tensor]]]
] = {
    "same": (lambda parts: parts[0], lambda own, heads: [own]),
    "vector": (lambda parts: parts[0].flatten(), lambda own, heads: [own]),
    "linear": (lambda parts: parts[0].T, lambda own, heads: [own.T]),
    "conv": (
        lambda parts: parts[0].permute(3, 2, 0, 1),
        lambda own, heads: [own.permute(2, 3, 1, 0)],
    ),
    "qkv_kernel": (
        lambda parts: torch.cat([part.flatten(1).T for part in parts]),
        lambda own, heads: [part.T.reshape(part.shape[1], heads, -1) for part in own.chunk(3)],
    ),
    "qkv_bias": (
        lambda parts: torch.cat([part.flatten() for part in parts]),
        lambda own, heads: [part.reshape(heads, -1) for part in own.chunk(3)],
    ),
    "out_kernel": (
        lambda parts: parts[0].flatten(0, 1).T,
        lambda own, heads: [own.T.reshape(heads, -1, own.shape[0])],
    ),
    "parts": (lambda parts: torch.cat(parts), lambda own, heads: list(own.chunk(3))),
    "head_conv_jax": (lambda parts: parts[0][0, 0].T, lambda own, heads: [own.T[None, None]]),
    "head_conv": (lambda parts: parts[0].flatten(1), lambda own, heads: [own[:, :, None, None]]),
}


class Rule(NamedTuple):
    """One of our tensors, the published tensors it is made of, and how their shapes differ.

    Attributes:
        spellings: of their names; files have one of them, and the first is written.
    """

    own: str
    spellings: list[list[str]]
    shape: str = "same"

    def to_own(self, parts: list[Tensor]) -> Tensor:
        return _SHAPES[self.shape][0](parts).contiguous()

    def to_published(self, tensor: Tensor, num_heads: int) -> Tensors:
        """The published tensors from ours; `num_heads` is of the encoder, if there is one."""
        parts = [part.contiguous() for part in _SHAPES[self.shape][1](tensor, num_heads)]
        return dict(zip(self.spellings[0], parts, strict=True))


def rules_for(model: nn.Module, layout: str) -> list[Rule]:
    """The rules of a layout for a model, head included.

    A published layout's rules for a ViT include those of `SPARE_PREFIXES`, whether or not the model
    has them.

    Raises:
        ValueError: if the layout is unknown or has no names for such a model.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    own = model.state_dict()
    if layout == "vit_ray":
        return [Rule(name, [[name]]) for name in own]
    if isinstance(model, BitResNet):
        return _rules(_BIT, layout, _units(model.size.stages))
    backbone = getattr(model, "embedding", None)
    is_hybrid = isinstance(backbone, ResNetEmbedding) and layout == "huggingface"
    if not isinstance(model, VisionTransformer) or isinstance(model, AxialViT) or is_hybrid:
        kind = f"{'hybrid ' if is_hybrid else ''}{type(model).__name__}"
        raise ValueError(f"layout={layout!r} has no names for a {kind}; use layout='vit_ray'")
    rules = _rules(_VIT, layout, [{"block": index} for index in range(model.size.depth)])
    rules = [rule for rule in rules if rule.own in own or rule.own.startswith(SPARE_PREFIXES)]
    if isinstance(backbone, ResNetEmbedding):
        rules += _rules(_BACKBONE, layout, _units(backbone.size.stages))
    return rules


def _units(stages: tuple[int, ...]) -> list[dict[str, Any]]:
    """Numbers of each convolution of each unit of a ResNet."""
    places = [(stage, unit) for stage, count in enumerate(stages) for unit in range(count)]
    return [
        {"index": index, "stage": stage, "unit": unit, "stage1": stage + 1, "unit1": unit + 1}
        | {"part": part, "letter": "abc"[part - 1]}
        for index, (stage, unit) in enumerate(places)
        for part in (1, 2, 3)
    ]


def _rules(table: str, layout: str, places: list[dict[str, Any]]) -> list[Rule]:
    """Rules from a table's rows, each for all values of the numbers in it."""
    column = LAYOUTS.index(layout)
    (_, _, *prefixes), *rows = (line.split() for line in table.strip().splitlines())
    rules: dict[str, Rule] = {}
    for part, kind, *forms in rows:
        form = forms[column].replace("@", prefixes[column])
        queries = ("query", "key", "value") if "*" in form else ("",)
        for place in places if form != "-" else []:
            if "shortcut" in part and place["unit"]:
                continue
            names = form.format_map(place).split("|")
            for leaf, their_leaf, shape in _LEAVES[layout][kind]:
                spellings = [[name.replace("*", q) + their_leaf for q in queries] for name in names]
                own = part.format_map(place) + leaf
                rules[own] = Rule(own, spellings, shape)
    return list(rules.values())


def detect_layout(names: Iterable[str]) -> str:
    """The layout of a file, from the names of its tensors.

    Raises:
        ValueError: if no layout has such names.
    """
    for layout, first_layer in _FIRST_LAYERS.items():
        if any(name.startswith(first_layer) for name in names):
            return layout
    shown = ", ".join(sorted(names)[:8])
    raise ValueError(
        f"the tensors' names are of no known layout ({', '.join(LAYOUTS)}): {shown}, ...; check "
        "that the file holds a ViT, a hybrid or a BiT ResNet"
    )
