"""LayerScale, and layer norm of queries and keys: formulas, first values, decay, files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from tests.models.small import TINY_VIT, small_model, some_images
from vit_ray.models import build_model
from vit_ray.models.build import decayed_parameters
from vit_ray.models.weights import load_weights, save_weights

OPTIONS: dict[str, Any] = {"layer_scale": 1e-4, "qk_norm": True}
HEADS, HEAD_WIDTH = TINY_VIT["num_heads"], TINY_VIT["width"] // TINY_VIT["num_heads"]


@pytest.mark.parametrize("family", ["ViT", "R+ViT", "Axial-ViT"])
def test_a_branch_is_scaled_channel_by_channel(family: str) -> None:
    model: Any = small_model(family, **OPTIONS).eval()
    block = getattr(model.blocks[1], "row", model.blocks[1])
    x = torch.randn(2, 7, TINY_VIT["width"])
    with torch.no_grad():
        mixed = x + block.attention(block.attention_norm(x)) * block.attention_scale.scale
        expected = mixed + block.mlp(block.mlp_norm(mixed)) * block.mlp_scale.scale
        torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("num_queries", [None, 1])
def test_queries_and_keys_are_normalised_head_by_head(num_queries: int | None) -> None:
    model: Any = small_model("ViT", **OPTIONS)
    attention, x = model.blocks[0].attention, torch.randn(2, 7, TINY_VIT["width"])
    weights: list[torch.Tensor] = []
    with torch.no_grad():
        found = attention(x, weights.append, num_queries)
        q, k, v = (
            part.unflatten(-1, (HEADS, HEAD_WIDTH)).transpose(1, 2)
            for part in F.linear(x, attention.qkv.weight, attention.qkv.bias).chunk(3, dim=-1)
        )
        q, k = (
            F.layer_norm(part, (HEAD_WIDTH,), norm.weight, norm.bias, 1e-6)
            for part, norm in ((q, attention.query_norm), (k, attention.key_norm))
        )
        expected = torch.softmax(q @ k.transpose(2, 3) / HEAD_WIDTH**0.5, dim=-1)[
            :, :, :num_queries
        ]
        torch.testing.assert_close(weights[0], expected)
        mixed = (expected @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(found, attention.out(mixed))


def test_factors_start_as_asked_are_not_decayed_and_are_all_that_is_added() -> None:
    fresh = dict(build_model("ViT", 5, 32, **TINY_VIT, **OPTIONS).named_parameters())
    plain = dict(build_model("ViT", 5, 32, **TINY_VIT).named_parameters())
    added = {name: p for name, p in fresh.items() if name not in plain}
    scales = [p for name, p in added.items() if name.endswith("_scale.scale")]
    assert len(scales) == 2 * TINY_VIT["depth"]
    assert all(torch.equal(p, torch.full((TINY_VIT["width"],), 1e-4)) for p in scales)
    # Per block two vectors of the width, and weight and bias of two norms of a head's width.
    per_block = 2 * TINY_VIT["width"] + 4 * HEAD_WIDTH
    assert sum(p.numel() for p in added.values()) == TINY_VIT["depth"] * per_block
    decayed, _ = decayed_parameters(build_model("ViT", 5, 32, **TINY_VIT, **OPTIONS))
    assert not added.keys() & dict(decayed).keys()


def test_files_have_timms_names_and_are_refused_by_a_model_without(tmp_path: Path) -> None:
    model = small_model("ViT", **OPTIONS).eval()
    save_weights(model, tmp_path / "timm", "timm")
    names = load_file(tmp_path / "timm" / "model.safetensors").keys()
    # huggingface/pytorch-image-models: layers/layer_scale.py, layers/attention.py
    assert {"blocks.1.ls1.gamma", "blocks.1.ls2.gamma", "blocks.1.attn.q_norm.bias"} <= names
    loaded = small_model("ViT", **{**OPTIONS, "layer_scale": 0.5}).eval()
    load_weights(loaded, tmp_path / "timm")
    with torch.no_grad():
        assert torch.equal(loaded(some_images()), model(some_images()))
    with pytest.raises(ValueError, match=r"unexpected: .*blocks\.0\.ls1\.gamma"):
        load_weights(small_model("ViT"), tmp_path / "timm")
    save_weights(small_model("ViT"), tmp_path / "plain", "timm")
    with pytest.raises(ValueError, match=r"missing: .*blocks\.0\.ls1\.gamma"):
        load_weights(model, tmp_path / "plain")
    for layout, name in (("jax", "w.npz"), ("huggingface", "w.safetensors")):
        with pytest.raises(ValueError, match="use layout='vit_ray'"):
            save_weights(model, tmp_path / name, layout)


@pytest.mark.parametrize("family", ["ViT", "Axial-ViT"])
def test_every_layer_norm_has_the_models_epsilon(family: str) -> None:
    pool = {"pool": "map"} if family == "ViT" else {}
    model = small_model(family, qk_norm=True, pre_norm=True, norm_eps=3e-5, **pool)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert {norm.eps for norm in norms} == {3e-5}
    assert len(norms) == (2 * 4 + 3 if family == "ViT" else 2 * 8 + 2)
