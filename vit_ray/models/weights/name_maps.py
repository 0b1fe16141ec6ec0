"""Names and shapes of tensors in published checkpoints, beside our own.

A layout is a list of rules for a given model. Each rule says which published tensors make one of
ours. The files disagree about spelling from version to version; `aliases.py` brings every
spelling to the one that the rules (and `save_weights`) use.

Sources: google-research/vision_transformer (ViT, hybrids), big_vision (its ViT spelling),
big_transfer (BiT), huggingface/pytorch-image-models, and transformers' saved files.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vit_ray.models.axial import AxialViT
from vit_ray.models.hybrid import ResNetEmbedding
from vit_ray.models.resnet import BitResNet
from vit_ray.models.sizes import ResNetSize
from vit_ray.models.vit import VisionTransformer

LAYOUTS = ("jax", "timm", "huggingface", "vit_ray")

Tensors = dict[str, Tensor]


JAX_POSITIONS = "Transformer/posembed_input/pos_embedding"
# The head's bias in the layouts; as long as there are classes.
HEAD_BIASES = (
    "head/bias",
    "resnet/head/conv2d/bias",
    "head.bias",
    "head.fc.bias",
    "classifier.bias",
    "classifier.1.bias",
)


@dataclass(frozen=True)
class Rule:
    """One of our tensors, the published tensors it is made of, and how their shapes differ."""

    own: str
    published: tuple[str, ...]
    shape: str = "same"


def to_own(rule: Rule, parts: list[Tensor]) -> Tensor:
    """Our tensor from the published ones."""
    return _TO_OWN[rule.shape](parts).contiguous()


def to_published(rule: Rule, tensor: Tensor, num_heads: int) -> list[Tensor]:
    """The published tensors from ours; `num_heads` is of the encoder, where there is one."""
    return [part.contiguous() for part in _TO_PUBLISHED[rule.shape](tensor, num_heads)]


# Shapes: `linear` is (in, out) for our (out, in); `conv` is (h, w, in, out) for (out, in, h, w);
# `qkv` kernels are (D, H, K) each and biases (H, K); `out` is (H, K, D); `head_conv` is a 1 x 1
# convolution for a matrix; `vector` may come with leading axes of length 1; `parts` are matrices
# or vectors in our own orientation, one for each of q, k and v.
_TO_OWN: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "same": lambda parts: parts[0],
    "vector": lambda parts: parts[0].flatten(),
    "linear": lambda parts: parts[0].T,
    "conv": lambda parts: parts[0].permute(3, 2, 0, 1),
    "qkv_kernel": lambda parts: torch.cat([part.flatten(1).T for part in parts]),
    "qkv_bias": lambda parts: torch.cat([part.flatten() for part in parts]),
    "out_kernel": lambda parts: parts[0].flatten(0, 1).T,
    "parts": lambda parts: torch.cat(parts),
    "head_conv_jax": lambda parts: parts[0][0, 0].T,
    "head_conv": lambda parts: parts[0].flatten(1),
}

_TO_PUBLISHED: dict[str, Callable[[Tensor, int], list[Tensor]]] = {
    "same": lambda own, heads: [own],
    "vector": lambda own, heads: [own],
    "linear": lambda own, heads: [own.T],
    "conv": lambda own, heads: [own.permute(2, 3, 1, 0)],
    "qkv_kernel": lambda own, heads: [
        part.T.reshape(part.shape[1], heads, -1) for part in own.chunk(3)
    ],
    "qkv_bias": lambda own, heads: [part.reshape(heads, -1) for part in own.chunk(3)],
    "out_kernel": lambda own, heads: [own.T.reshape(heads, -1, own.shape[0])],
    "parts": lambda own, heads: list(own.chunk(3)),
    "head_conv_jax": lambda own, heads: [own.T[None, None]],
    "head_conv": lambda own, heads: [own[:, :, None, None]],
}


def check_layout(layout: str) -> None:
    """Refuse a name that is no layout.

    Raises:
        ValueError: listing the layouts.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; use one of {', '.join(LAYOUTS)}.")


def rules_for(model: nn.Module, layout: str) -> list[Rule]:
    """The rules of a layout for a model, head included.

    A published layout's for a ViT have the class token and the representation layer too, whether or
    not it has them.

    Raises:
        ValueError: if the layout is unknown or has no names for such a model.
    """
    check_layout(layout)
    if layout == "vit_ray":
        return [Rule(name, (name,)) for name in model.state_dict()]
    if isinstance(model, VisionTransformer) and not isinstance(model, AxialViT):
        is_hybrid = isinstance(model.embedding, ResNetEmbedding)
        if not (is_hybrid and layout == "huggingface"):
            return _VIT_RULES[layout](model)
    if isinstance(model, BitResNet):
        return _BIT_RULES[layout](model)
    raise ValueError(
        f"layout={layout!r} has no names for this kind of model ({describe(model)}); "
        "use layout='vit_ray'."
    )


def describe(model: nn.Module) -> str:
    """The kind of a model in a few words."""
    if isinstance(model, AxialViT):
        return "axial ViT"
    if isinstance(model, VisionTransformer):
        is_hybrid = isinstance(model.embedding, ResNetEmbedding)
        return "ResNet + ViT hybrid" if is_hybrid else "ViT"
    return "BiT ResNet" if isinstance(model, BitResNet) else type(model).__name__


def _pairs(own: str, published: str, leaves: tuple[str, str], shape: str = "same") -> list[Rule]:
    """Rules of a kernel (or scale) and a bias."""
    bias_shape = "vector" if shape == "vector" else "same"
    return [
        Rule(f"{own}.weight", (f"{published}{leaves[0]}",), shape),
        Rule(f"{own}.bias", (f"{published}{leaves[1]}",), bias_shape),
    ]


def _unit_places(stages: tuple[int, ...]) -> list[tuple[int, int]]:
    """(stage, unit in the stage) of each of our units, 0-based."""
    return [(stage, unit) for stage, count in enumerate(stages) for unit in range(count)]


def _vit_jax(model: VisionTransformer) -> list[Rule]:
    dense, norm = ("/kernel", "/bias"), ("/scale", "/bias")
    rules = (
        _hybrid_jax(model.embedding.size) if isinstance(model.embedding, ResNetEmbedding) else []
    )
    rules += _pairs("embedding.projection", "embedding", dense, "conv")
    rules.append(Rule("class_token.token", ("cls",)))
    if len(model.positions):
        rules.append(Rule("positions.0.table", (JAX_POSITIONS,)))
    for index in range(model.size.depth):
        own, block = f"blocks.{index}.", f"Transformer/encoderblock_{index}/"
        attention = f"{block}MultiHeadDotProductAttention_1/"
        qkv = [f"{attention}{part}" for part in ("query", "key", "value")]
        rules += _pairs(f"{own}attention_norm", f"{block}LayerNorm_0", norm)
        rules += [
            Rule(f"{own}attention.qkv.weight", tuple(f"{p}/kernel" for p in qkv), "qkv_kernel"),
            Rule(f"{own}attention.qkv.bias", tuple(f"{p}/bias" for p in qkv), "qkv_bias"),
            Rule(f"{own}attention.out.weight", (f"{attention}out/kernel",), "out_kernel"),
            Rule(f"{own}attention.out.bias", (f"{attention}out/bias",)),
        ]
        rules += _pairs(f"{own}mlp_norm", f"{block}LayerNorm_2", norm)
        rules += _pairs(f"{own}mlp.expand", f"{block}MlpBlock_3/Dense_0", dense, "linear")
        rules += _pairs(f"{own}mlp.contract", f"{block}MlpBlock_3/Dense_1", dense, "linear")
    rules += _pairs("norm", "Transformer/encoder_norm", norm)
    rules += _pairs("representation", "pre_logits", dense, "linear")
    return rules + _pairs("head", "head", dense, "linear")


def _hybrid_jax(size: ResNetSize) -> list[Rule]:
    norm = ("/scale", "/bias")
    rules = [Rule("embedding.root.weight", ("conv_root/kernel",), "conv")]
    rules += _pairs("embedding.root_norm", "gn_root", norm, "vector")
    for index, (stage, unit) in enumerate(_unit_places(size.stages)):
        own, block = f"embedding.units.{index}.", f"block{stage + 1}/unit{unit + 1}/"
        for part in (1, 2, 3):
            rules.append(Rule(f"{own}conv{part}.weight", (f"{block}conv{part}/kernel",), "conv"))
            rules += _pairs(f"{own}norm{part}", f"{block}gn{part}", norm, "vector")
        if unit == 0:
            rules.append(Rule(f"{own}shortcut.conv.weight", (f"{block}conv_proj/kernel",), "conv"))
            rules += _pairs(f"{own}shortcut.norm", f"{block}gn_proj", norm, "vector")
    return rules


def _vit_timm(model: VisionTransformer) -> list[Rule]:
    leaves = (".weight", ".bias")
    rules = (
        _hybrid_timm(model.embedding.size) if isinstance(model.embedding, ResNetEmbedding) else []
    )
    rules += _pairs("embedding.projection", "patch_embed.proj", leaves)
    rules.append(Rule("class_token.token", ("cls_token",)))
    if len(model.positions):
        rules.append(Rule("positions.0.table", ("pos_embed",)))
    names = {
        "attention_norm": "norm1",
        "attention.qkv": "attn.qkv",
        "attention.out": "attn.proj",
        "mlp_norm": "norm2",
        "mlp.expand": "mlp.fc1",
        "mlp.contract": "mlp.fc2",
    }
    for index in range(model.size.depth):
        for own, published in names.items():
            rules += _pairs(f"blocks.{index}.{own}", f"blocks.{index}.{published}", leaves)
    rules += _pairs("norm", "norm", leaves)
    rules += _pairs("representation", "pre_logits.fc", leaves)
    return rules + _pairs("head", "head", leaves)


def _hybrid_timm(size: ResNetSize) -> list[Rule]:
    leaves, backbone = (".weight", ".bias"), "patch_embed.backbone."
    rules = [Rule("embedding.root.weight", (f"{backbone}stem.conv.weight",))]
    rules += _pairs("embedding.root_norm", f"{backbone}stem.norm", leaves)
    for index, (stage, unit) in enumerate(_unit_places(size.stages)):
        own, block = f"embedding.units.{index}.", f"{backbone}stages.{stage}.blocks.{unit}."
        for part in (1, 2, 3):
            rules.append(Rule(f"{own}conv{part}.weight", (f"{block}conv{part}.weight",)))
            rules += _pairs(f"{own}norm{part}", f"{block}norm{part}", leaves)
        if unit == 0:
            rules.append(Rule(f"{own}shortcut.conv.weight", (f"{block}downsample.conv.weight",)))
            rules += _pairs(f"{own}shortcut.norm", f"{block}downsample.norm", leaves)
    return rules


def _vit_huggingface(model: VisionTransformer) -> list[Rule]:
    leaves = (".weight", ".bias")
    rules = _pairs("embedding.projection", "vit.embeddings.patch_embeddings.projection", leaves)
    rules.append(Rule("class_token.token", ("vit.embeddings.cls_token",)))
    if len(model.positions):
        rules.append(Rule("positions.0.table", ("vit.embeddings.position_embeddings",)))
    names = {
        "attention_norm": "layernorm_before",
        "attention.out": "attention.output.dense",
        "mlp_norm": "layernorm_after",
        "mlp.expand": "intermediate.dense",
        "mlp.contract": "output.dense",
    }
    for index in range(model.size.depth):
        own, block = f"blocks.{index}.", f"vit.encoder.layer.{index}."
        qkv = [f"{block}attention.attention.{part}" for part in ("query", "key", "value")]
        for leaf in leaves:
            rules.append(Rule(f"{own}attention.qkv{leaf}", tuple(p + leaf for p in qkv), "parts"))
        for name, published in names.items():
            rules += _pairs(f"{own}{name}", f"{block}{published}", leaves)
    rules += _pairs("norm", "vit.layernorm", leaves)
    rules += _pairs("representation", "vit.pooler.dense", leaves)
    return rules + _pairs("head", "classifier", leaves)


def _bit_jax(model: BitResNet) -> list[Rule]:
    conv, norm = "standardized_conv2d/kernel", ("/gamma", "/beta")
    rules = [Rule("root.weight", (f"resnet/root_block/{conv}",), "conv")]
    for index, (stage, unit) in enumerate(_unit_places(model.size.stages)):
        own, block = f"units.{index}.", f"resnet/block{stage + 1}/unit{unit + 1:02d}/"
        for part, letter in enumerate("abc", start=1):
            rules.append(Rule(f"{own}conv{part}.weight", (f"{block}{letter}/{conv}",), "conv"))
            rules += _pairs(f"{own}norm{part}", f"{block}{letter}/group_norm", norm, "vector")
        if unit == 0:
            rules.append(Rule(f"{own}shortcut.weight", (f"{block}a/proj/{conv}",), "conv"))
    rules += _pairs("norm", "resnet/group_norm", norm, "vector")
    return [
        *rules,
        Rule("head.weight", ("resnet/head/conv2d/kernel",), "head_conv_jax"),
        Rule("head.bias", ("resnet/head/conv2d/bias",), "vector"),
    ]


def _bit_torch(model: BitResNet, stem: str, unit_name: str, norm_name: str) -> list[Rule]:
    """timm and transformers name a BiT alike, but for root, units, last norm and head."""
    leaves = (".weight", ".bias")
    rules = [Rule("root.weight", (stem,))]
    for index, (stage, unit) in enumerate(_unit_places(model.size.stages)):
        own, block = f"units.{index}.", unit_name.format(stage=stage, unit=unit)
        for part in (1, 2, 3):
            rules.append(Rule(f"{own}conv{part}.weight", (f"{block}conv{part}.weight",)))
            rules += _pairs(f"{own}norm{part}", f"{block}norm{part}", leaves)
        if unit == 0:
            rules.append(Rule(f"{own}shortcut.weight", (f"{block}downsample.conv.weight",)))
    return rules + _pairs("norm", norm_name, leaves)


def _bit_timm(model: BitResNet) -> list[Rule]:
    rules = _bit_torch(model, "stem.conv.weight", "stages.{stage}.blocks.{unit}.", "norm")
    return rules + _pairs("head", "head.fc", (".weight", ".bias"), "head_conv")


def _bit_huggingface(model: BitResNet) -> list[Rule]:
    unit = "bit.encoder.stages.{stage}.layers.{unit}."
    rules = _bit_torch(model, "bit.embedder.convolution.weight", unit, "bit.norm")
    return rules + _pairs("head", "classifier.1", (".weight", ".bias"))


_VIT_RULES: dict[str, Callable[[VisionTransformer], list[Rule]]] = {
    "jax": _vit_jax,
    "timm": _vit_timm,
    "huggingface": _vit_huggingface,
}
_BIT_RULES: dict[str, Callable[[BitResNet], list[Rule]]] = {
    "jax": _bit_jax,
    "timm": _bit_timm,
    "huggingface": _bit_huggingface,
}
