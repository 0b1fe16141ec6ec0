"""Axial models against the papers' equations in numpy and float64, on whole (h, w) grids.

No line is ever cut out of a grid here, and no pair of tokens looked up: sums run along an axis of
the grid, and relative positions are taken offset by offset (Dosovitskiy et al., arXiv:2010.11929,
equations 1 to 4 and appendix A; Wang et al., arXiv:2003.07853, equation 4).
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.models.small import shake, small_model, some_images
from vit_ray.models.axial import AxialAttention2d

Array = NDArray[np.float64]
HEADS = 4  # of the small encoder
AXIAL_HEADS = 8


def float64(module: torch.nn.Module) -> dict[str, Array]:
    return {name: value.double().numpy() for name, value in module.state_dict().items()}


def softmax(logits: Array) -> Array:
    grown = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Array = grown / grown.sum(axis=-1, keepdims=True)
    return shares


def layer_norm(x: Array, w: dict[str, Array], name: str) -> Array:
    scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    normed: Array = scaled * w[f"{name}.weight"] + w[f"{name}.bias"]
    return normed


def dense(x: Array, w: dict[str, Array], name: str) -> Array:
    made: Array = np.einsum("...d,ed->...e", x, w[f"{name}.weight"]) + w[f"{name}.bias"]
    return made


def self_attention(x_bhwd: Array, w: dict[str, Array], name: str, axis: str) -> Array:
    """Appendix A, each token over its row ("w") or its column ("h")."""
    qkv = dense(x_bhwd, w, f"{name}.qkv")
    q, k, v = (part.reshape(*x_bhwd.shape[:3], HEADS, -1) for part in np.split(qkv, 3, axis=-1))
    ours, others = ("bhqnk", "bhpnk") if axis == "w" else ("bqwnk", "bpwnk")
    line = "bhnqp" if axis == "w" else "bwnqp"
    weights = softmax(np.einsum(f"{ours},{others}->{line}", q, k) / np.sqrt(q.shape[-1]))
    mixed = np.einsum(f"{line},{others}->{ours}", weights, v)
    return dense(mixed.reshape(x_bhwd.shape), w, f"{name}.out")


def mlp(x: Array, w: dict[str, Array], name: str) -> Array:
    hidden = dense(x, w, f"{name}.expand")
    inner = np.sqrt(2.0 / np.pi) * (hidden + 0.044715 * hidden**3)
    return dense(0.5 * hidden * (1.0 + np.tanh(inner)), w, f"{name}.contract")


def axial_vit_logits(w: dict[str, Array], images: Array, patch: int, depth: int) -> Array:
    """Equations 1 to 4, with two half-blocks a block and the tokens' mean for the class token."""
    batch, _, height, width = images.shape
    kernel, bias = w["embedding.projection.weight"], w["embedding.projection.bias"]
    x = np.empty((batch, height // patch, width // patch, len(bias)))
    for row in range(x.shape[1]):
        for column in range(x.shape[2]):
            part = images[:, :, row * patch :, column * patch :][:, :, :patch, :patch]
            x[:, row, column] = np.tensordot(part, kernel, ([1, 2, 3], [1, 2, 3])) + bias
    x += w["positions.0.table"].reshape(1, *x.shape[1:])
    for index in range(depth):
        for half, axis in (("row", "w"), ("column", "h")):
            name = f"blocks.{index}.{half}"
            normed = layer_norm(x, w, f"{name}.attention_norm")
            x = x + self_attention(normed, w, f"{name}.attention", axis)
            x = x + mlp(layer_norm(x, w, f"{name}.mlp_norm"), w, f"{name}.mlp")
    return dense(layer_norm(x, w, "norm").mean(axis=(1, 2)), w, "head")


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_an_axial_vit_is_what_the_equations_say(size):
    model = small_model("Axial-ViT", image_size=size).eval()
    images = some_images(2, size)
    expected = axial_vit_logits(float64(model), images.double().numpy(), patch=8, depth=2)
    found = model(images).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def position_sensitive(x_bld: Array, w: dict[str, Array], name: str) -> Array:
    """Equation 4 of Axial-DeepLab, with logits over the root of the keys' width, offset by offset.

    Of a table of 2 L - 1 rows, row L - 1 - d belongs to the key d places behind its query.
    """
    batch, length, channels = x_bld.shape
    qk, v = dense(x_bld, w, f"{name}.qk"), dense(x_bld, w, f"{name}.v")
    q, k = (p.reshape(batch, length, AXIAL_HEADS, -1) for p in np.split(qk, 2, axis=-1))
    v = v.reshape(batch, length, AXIAL_HEADS, -1)
    tables = {kind: w[f"{name}.{kind}_table"][::-1] for kind in ("query", "key", "value")}
    logits = np.einsum("bonk,bpnk->bnop", q, k)
    values = np.broadcast_to(v[:, None], (batch, length, *v.shape[1:])).copy()  # of (query, key)
    for offset in range(1 - length, length):
        o = np.arange(max(0, -offset), min(length, length - offset))
        p = o + offset
        by_query = q[:, o] @ tables["query"][offset + length - 1]
        by_key = k[:, p] @ tables["key"][offset + length - 1]
        logits[:, :, o, p] += (by_query + by_key).transpose(0, 2, 1)
        values[:, o, p] += tables["value"][offset + length - 1]
    weights = softmax(logits / np.sqrt(q.shape[-1]))
    mixed: Array = np.einsum("bnop,bopnv->bonv", weights, values)
    return mixed.reshape(batch, length, channels)


@pytest.mark.parametrize("stride", [1, 2])
def test_axial_attention_of_a_resnet_is_what_the_equation_says(stride):
    torch.manual_seed(0)
    attention = AxialAttention2d(32, (3, 5), stride)
    shake(attention)
    images = torch.randn(2, 32, 3, 5)
    w, x = float64(attention), images.double().numpy().transpose(0, 2, 3, 1)
    x = np.stack([position_sensitive(row, w, "along_rows") for row in x.swapaxes(0, 1)], axis=1)
    columns = [position_sensitive(x[:, :, i], w, "along_columns") for i in range(5)]
    x = np.stack(columns, axis=2)
    places = [slice(i, i + stride) for i in range(0, 5, stride)]
    averaged = [[x[:, r, c].mean(axis=(1, 2)) for c in places] for r in places if r.start < 3]
    expected = np.array(averaged).transpose(2, 3, 0, 1)
    found: Any = attention(images).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
