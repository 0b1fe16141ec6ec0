"""Names and shapes of tensors in published checkpoints, next to our own.

A layout is a column of the tables below. A rule says which published tensors make one of ours, and
how their shapes differ. Spellings differ between versions of the files; `aliases.py` converts every
spelling to that of the rules (and of `save_weights`).

Sources: google-research/vision_transformer (ViT, hybrids), big_vision (its ViT spelling),
big_transfer (BiT), huggingface/pytorch-image-models, and transformers' saved files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vit_ray.models.axial import AxialViT
from vit_ray.models.resnet import BitResNet, ResNetEmbedding
from vit_ray.models.vit import VisionTransformer

LAYOUTS = ("jax", "timm", "huggingface", "vit_ray")

Tensors = dict[str, Tensor]

JAX_POSITIONS = "Transformer/posembed_input/pos_embedding"
_ATTENTION = "MultiHeadDotProductAttention_1"
# The head's bias in the layouts; its length is the number of classes.
HEAD_BIASES = (
    "head/bias",
    "resnet/head/conv2d/bias",
    "head.bias",
    "head.fc.bias",
    "classifier.bias",
    "classifier.1.bias",
)

# What a file may hold beyond the model: its head (fine-tuning drops both linear layers, paper 3.2),
# and the class token.
SPARE_PREFIXES = ("head.", "representation.", "class_token.")

# Our part, its kind, and the part in the layouts of JAX, timm and Hugging Face; the first line is
# what @ stands for: a block or unit, by its numbers (stage1 and unit1 count from 1). A part is a
# kernel or scale and a bias; `kernel` has no bias, and `tensor` is one tensor; - is no name.
_VIT = f"""
@ - Transformer/encoderblock_{{block}}/ blocks.{{block}}. vit.encoder.layer.{{block}}.
embedding.projection conv embedding patch_embed.proj vit.embeddings.patch_embeddings.projection
class_token.token tensor cls cls_token vit.embeddings.cls_token
positions.0.table tensor {JAX_POSITIONS} pos_embed vit.embeddings.position_embeddings
blocks.{{block}}.attention_norm norm @LayerNorm_0 @norm1 @layernorm_before
blocks.{{block}}.attention.qkv qkv @{_ATTENTION}/* @attn.qkv @attention.attention.*
blocks.{{block}}.attention.out out @{_ATTENTION}/out @attn.proj @attention.output.dense
blocks.{{block}}.mlp_norm norm @LayerNorm_2 @norm2 @layernorm_after
blocks.{{block}}.mlp.expand linear @MlpBlock_3/Dense_0 @mlp.fc1 @intermediate.dense
blocks.{{block}}.mlp.contract linear @MlpBlock_3/Dense_1 @mlp.fc2 @output.dense
norm norm Transformer/encoder_norm norm vit.layernorm
representation linear pre_logits pre_logits.fc vit.pooler.dense
head linear head head classifier
"""
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
@ - resnet/block{stage1}/unit{unit1:02d}/ stages.{stage}.blocks.{unit}. bit.encoder.stages.{stage}.layers.{unit}.
root kernel resnet/root_block/standardized_conv2d stem.conv bit.embedder.convolution
units.{index}.conv{part} kernel @{letter}/standardized_conv2d @conv{part} @conv{part}
units.{index}.norm{part} group_norm @{letter}/group_norm @norm{part} @norm{part}
units.{index}.shortcut kernel @a/proj/standardized_conv2d @downsample.conv @downsample.conv
norm group_norm resnet/group_norm norm bit.norm
head head_conv resnet/head/conv2d head.fc classifier.1
"""  # noqa: E501

# By kind: names of the kernel and of the bias in JAX files, and how their shapes differ from ours.
_JAX_KINDS = {
    "conv": ("kernel", "conv", "bias", "same"),
    "kernel": ("kernel", "conv", "", ""),
    "linear": ("kernel", "linear", "bias", "same"),
    "qkv": ("kernel", "qkv_kernel", "bias", "qkv_bias"),
    "out": ("kernel", "out_kernel", "bias", "same"),
    "norm": ("scale", "vector", "bias", "vector"),
    "group_norm": ("gamma", "vector", "beta", "vector"),
    "head_conv": ("kernel", "head_conv_jax", "bias", "vector"),
}


@dataclass(frozen=True)
class Rule:
    """One of our tensors, the published tensors it is made of, and how their shapes differ."""

    own: str
    published: tuple[str, ...]
    shape: str = "same"

    def to_own(self, parts: list[Tensor]) -> Tensor:
        return _SHAPES[self.shape][0](parts).contiguous()

    def to_published(self, tensor: Tensor, num_heads: int) -> list[Tensor]:
        """The published tensors from ours; `num_heads` is of the encoder, if there is one."""
        return [part.contiguous() for part in _SHAPES[self.shape][1](tensor, num_heads)]


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


def check_layout(layout: str) -> None:
    """Refuse a name that is not a layout.

    Raises:
        ValueError: listing the layouts.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; use one of {', '.join(LAYOUTS)}")


def rules_for(model: nn.Module, layout: str) -> list[Rule]:
    """The rules of a layout for a model, head included.

    A published layout's rules for a ViT include those of `SPARE_PREFIXES`, whether or not the model
    has them.

    Raises:
        ValueError: if the layout is unknown or has no names for such a model.
    """
    check_layout(layout)
    if layout == "vit_ray":
        return [Rule(name, (name,)) for name in model.state_dict()]
    if isinstance(model, BitResNet):
        return list(_rules(_BIT, layout, _units(model.size.stages)))
    has_names = isinstance(model, VisionTransformer) and not isinstance(model, AxialViT)
    is_hybrid = has_names and isinstance(model.embedding, ResNetEmbedding)
    if not has_names or (is_hybrid and layout == "huggingface"):
        raise ValueError(
            f"layout={layout!r} has no names for this kind of model ({describe(model)}); "
            "use layout='vit_ray'"
        )
    assert isinstance(model, VisionTransformer)
    blocks = [{"block": index} for index in range(model.size.depth)]
    own = model.state_dict()
    rules = [
        rule
        for rule in _rules(_VIT, layout, blocks)
        if rule.own in own or rule.own.startswith(SPARE_PREFIXES)
    ]
    if isinstance(model.embedding, ResNetEmbedding):
        rules += _rules(_BACKBONE, layout, _units(model.embedding.size.stages))
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


def _rules(table: str, layout: str, places: list[dict[str, Any]]) -> Iterator[Rule]:
    """Rules from a table's rows, each for all values of the numbers in it."""
    column, joint = 2 + LAYOUTS.index(layout), "/" if layout == "jax" else "."
    (_, _, *prefixes), *rows = (line.split() for line in table.strip().splitlines())
    made = set()
    for row in rows:
        form = row[column].replace("@", prefixes[column - 2])
        for place in places:
            own, name, kind = row[0].format_map(place), form.format_map(place), row[1]
            if own in made or form == "-" or ("shortcut" in own and place["unit"]):
                continue
            made.add(own)
            if kind == "tensor":
                yield Rule(own, (name,))
                continue
            names = [name]
            weight, weight_shape, bias, bias_shape = _JAX_KINDS[kind]
            if layout != "jax":
                weight, bias, weight_shape, bias_shape = "weight", bias and "bias", "same", "same"
                if (kind, layout) == ("head_conv", "timm"):
                    weight_shape = "head_conv"
            if "*" in name:
                names = [name.replace("*", part) for part in ("query", "key", "value")]
                if layout != "jax":
                    weight_shape = bias_shape = "parts"
            yield Rule(f"{own}.weight", tuple(n + joint + weight for n in names), weight_shape)
            if bias:
                yield Rule(f"{own}.bias", tuple(n + joint + bias for n in names), bias_shape)


def describe(model: nn.Module) -> str:
    """The kind of a model as a short text."""
    if isinstance(model, AxialViT):
        return "axial ViT"
    if isinstance(model, VisionTransformer):
        is_hybrid = isinstance(model.embedding, ResNetEmbedding)
        return "ResNet + ViT hybrid" if is_hybrid else "ViT"
    return "BiT ResNet" if isinstance(model, BitResNet) else type(model).__name__
