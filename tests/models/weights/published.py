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


VIT_B_16 = {"width": 768, "mlp_dim": 3072, "num_heads": 12, "patch_size": 16}


def jax_shapes(
    size: dict[str, int], num_classes: int, has_representation: bool
) -> dict[str, tuple[int, ...]]:
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
