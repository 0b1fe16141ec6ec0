"""Arrays under the names of published files, and a ViT that knows only those of the JAX files."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray[Any, Any]]


def jax_vit_logits(arrays: Arrays, images: Tensor, patch: int, depth: int) -> Tensor:
    """Logits from arrays of google-research/vision_transformer's names and shapes, in float64."""
    w = {name: torch.from_numpy(array).double() for name, array in arrays.items()}

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * w[f"{name}/scale"] + w[f"{name}/bias"]

    x = images.double().permute(0, 2, 3, 1)
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // patch, patch, width // patch, patch, channels)
    x = torch.einsum("bhpwqc,pqcd->bhwd", x, w["embedding/kernel"]) + w["embedding/bias"]
    x = torch.cat([w["cls"].expand(batch, -1, -1), x.flatten(1, 2)], dim=1)
    x = x + w["Transformer/posembed_input/pos_embedding"]
    for index in range(depth):
        block = f"Transformer/encoderblock_{index}"
        attention = f"{block}/MultiHeadDotProductAttention_1"
        y = norm(x, f"{block}/LayerNorm_0")
        q, k, v = (
            torch.einsum("bnd,dhk->bhnk", y, w[f"{attention}/{part}/kernel"])
            + w[f"{attention}/{part}/bias"][:, None]
            for part in ("query", "key", "value")
        )
        weights = torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, dim=-1)
        y = torch.einsum("bhnk,hkd->bnd", weights @ v, w[f"{attention}/out/kernel"])
        x = x + y + w[f"{attention}/out/bias"]
        y = dense(norm(x, f"{block}/LayerNorm_2"), f"{block}/MlpBlock_3/Dense_0")
        y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
        x = x + dense(y, f"{block}/MlpBlock_3/Dense_1")
    x = norm(x, "Transformer/encoder_norm")[:, 0]
    if "pre_logits/kernel" in w:
        x = torch.tanh(dense(x, "pre_logits"))
    return dense(x, "head")


SIZES = {
    "ViT-B_16": {"width": 768, "mlp_dim": 3072, "num_heads": 12, "patch_size": 16},
}


def jax_shapes(name: str, num_classes: int, has_representation: bool) -> dict[str, tuple[int, ...]]:
    size = SIZES[name]
    width, mlp, heads, patch = (
        size[key] for key in ("width", "mlp_dim", "num_heads", "patch_size")
    )
    tokens = (224 // patch) ** 2 + 1
    block = "Transformer/encoderblock_0"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    shapes: dict[str, tuple[int, ...]] = {
        "cls": (1, 1, width),
        "embedding/bias": (width,),
        "embedding/kernel": (patch, patch, 3, width),
        "head/bias": (num_classes,),
        "head/kernel": (width, num_classes),
        "Transformer/posembed_input/pos_embedding": (1, tokens, width),
        f"{block}/MlpBlock_3/Dense_0/bias": (mlp,),
        f"{block}/MlpBlock_3/Dense_0/kernel": (width, mlp),
        f"{block}/MlpBlock_3/Dense_1/bias": (width,),
        f"{block}/MlpBlock_3/Dense_1/kernel": (mlp, width),
        f"{attention}/out/bias": (width,),
        f"{attention}/out/kernel": (heads, width // heads, width),
    }
    for part in ("query", "key", "value"):
        shapes[f"{attention}/{part}/bias"] = (heads, width // heads)
        shapes[f"{attention}/{part}/kernel"] = (width, heads, width // heads)
    for norm in (f"{block}/LayerNorm_0", f"{block}/LayerNorm_2", "Transformer/encoder_norm"):
        shapes |= {f"{norm}/bias": (width,), f"{norm}/scale": (width,)}
    if has_representation:
        shapes |= {"pre_logits/bias": (width,), "pre_logits/kernel": (width, width)}
    return shapes


def drawn(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    random = np.random.default_rng(0)
    return {
        name: (random.standard_normal(shape, np.float32) * 0.02) + name.endswith(("scale", "gamma"))
        for name, shape in shapes.items()
    }


def timm_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """As timm's own conversion of the JAX files has it."""
    w = {name: torch.from_numpy(array) for name, array in arrays.items()}
    block = "Transformer/encoderblock_0"
    attention, mlp = f"{block}/MultiHeadDotProductAttention_1", f"{block}/MlpBlock_3"
    width = w["cls"].shape[-1]
    qkv = [f"{attention}/{part}" for part in ("query", "key", "value")]
    found = {
        "cls_token": w["cls"],
        "pos_embed": w["Transformer/posembed_input/pos_embedding"],
        "patch_embed.proj.weight": w["embedding/kernel"].permute(3, 2, 0, 1),
        "patch_embed.proj.bias": w["embedding/bias"],
        "blocks.0.attn.qkv.weight": torch.cat([w[f"{q}/kernel"].flatten(1).T for q in qkv]),
        "blocks.0.attn.qkv.bias": torch.cat([w[f"{q}/bias"].flatten() for q in qkv]),
        "blocks.0.attn.proj.weight": w[f"{attention}/out/kernel"].reshape(width, width).T,
        "blocks.0.attn.proj.bias": w[f"{attention}/out/bias"],
        "head.weight": w["head/kernel"].T,
        "head.bias": w["head/bias"],
    }
    for number, layer in enumerate(("fc1", "fc2")):
        found[f"blocks.0.mlp.{layer}.weight"] = w[f"{mlp}/Dense_{number}/kernel"].T
        found[f"blocks.0.mlp.{layer}.bias"] = w[f"{mlp}/Dense_{number}/bias"]
    norms = {"blocks.0.norm1": "LayerNorm_0", "blocks.0.norm2": "LayerNorm_2"}
    for theirs, own in {
        **{name: f"{block}/{norm}" for name, norm in norms.items()},
        "norm": "Transformer/encoder_norm",
    }.items():
        found |= {f"{theirs}.weight": w[f"{own}/scale"], f"{theirs}.bias": w[f"{own}/bias"]}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def huggingface_tensors(timm: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """As transformers' conversion of timm's files has it; a bare model has no prefix, no head."""
    names = {
        "cls_token": "embeddings.cls_token",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "blocks.0.norm1": "encoder.layer.0.layernorm_before",
        "blocks.0.norm2": "encoder.layer.0.layernorm_after",
        "blocks.0.attn.proj": "encoder.layer.0.attention.output.dense",
        "blocks.0.mlp.fc1": "encoder.layer.0.intermediate.dense",
        "blocks.0.mlp.fc2": "encoder.layer.0.output.dense",
        "norm": "layernorm",
    }
    found = {}
    for name, tensor in timm.items():
        stem, dot, leaf = (
            name.rpartition(".") if name.endswith(("weight", "bias")) else (name, "", "")
        )
        if stem == "blocks.0.attn.qkv":
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                found[f"{prefix}encoder.layer.0.attention.attention.{part}.{leaf}"] = piece
        elif stem != "head":
            found[f"{prefix}{names[stem]}{dot}{leaf}"] = tensor
        elif prefix:
            found[f"classifier.{leaf}"] = tensor
    return {name: tensor.clone() for name, tensor in found.items()}
