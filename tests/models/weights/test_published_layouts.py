"""Files as they are published: every name, shape and type, in as many blocks as a test can afford.

Listings: `gs://vit_models/imagenet21k/ViT-B_16.npz`, `ViT-L_16.npz`, `ViT-H_14.npz`
(google-research/vision_transformer), `BiT-M-R50x1-ILSVRC2012.npz` (big_transfer), timm's
`vit_base_patch16_224`, and `google/vit-base-patch16-224` and `-in21k` of the Hugging Face hub.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.models.small import some_images
from tests.models.weights.test_load_save import Arrays, jax_vit_logits, relative_difference
from vit_ray.models import build_model
from vit_ray.train.init_weights import initialize_weights, open_weights

SIZES = {
    "ViT-B_16": {"width": 768, "mlp_dim": 3072, "num_heads": 12, "patch_size": 16},
    "ViT-L_16": {"width": 1024, "mlp_dim": 4096, "num_heads": 16, "patch_size": 16},
    "ViT-H_14": {"width": 1280, "mlp_dim": 5120, "num_heads": 16, "patch_size": 14},
}
I21K = 21843


def vit(name: str, num_classes: int, image_size: int = 224, **options: Any) -> nn.Module:
    return build_model(
        "ViT", num_classes, image_size, **{"depth": 1, **SIZES[name], **options}
    ).eval()


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


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", SIZES)
def test_the_npz_of_imagenet_21k_fits_its_model_and_one_to_be_fine_tuned(
    name: str, tmp_path: Path
) -> None:
    # Zeros are written fast; the head of the published ViT-H_14 is of zeros, too.
    arrays = {
        key: np.zeros(shape, np.float32) for key, shape in jax_shapes(name, I21K, True).items()
    }
    arrays["Transformer/posembed_input/pos_embedding"] += 1.0
    path = str(tmp_path / f"{name}.npz")
    np.savez(path, **arrays)  # type: ignore[arg-type]
    assert open_weights(path).num_classes == I21K
    whole = vit(name, I21K, representation=True)
    report = initialize_weights(whole, path, new_head=False)
    assert (report.new, report.ignored, report.resized) == ([], [], [])
    tuned = vit(name, 10, image_size=2 * 224)
    report = initialize_weights(tuned, path, new_head=True)
    assert sorted(report.new) == ["head.bias", "head.weight"]
    assert sorted(report.ignored) == [
        "head.bias", "head.weight", "representation.bias", "representation.weight",
    ]  # fmt: skip
    assert len(report.resized) == 1
    deeper = vit(name, 10, depth=2)
    with pytest.raises(ValueError, match=r"Transformer/encoderblock_1/LayerNorm_0/bias"):
        initialize_weights(deeper, path, new_head=True)
    heads = 16 if name == "ViT-B_16" else 12
    with pytest.raises(ValueError, match=f"this one has num_heads={heads}"):
        initialize_weights(vit("ViT-B_16" if heads == 12 else "ViT-L_16", 10), path, new_head=True)


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


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("layout", ["jax", "timm", "huggingface"])
def test_one_model_in_each_published_layout_has_the_logits_of_its_names(
    layout: str, tmp_path: Path
) -> None:
    arrays = drawn(jax_shapes("ViT-B_16", 1000, has_representation=False))
    images = some_images(1, (224, 224))
    expected = jax_vit_logits(arrays, images, patch=16, depth=1)
    if layout == "jax":
        path = tmp_path / "ViT-B_16-224.npz"
        np.savez(path, **arrays)  # type: ignore[arg-type]
    else:
        path = tmp_path
        tensors = timm_tensors(arrays)
        if layout == "huggingface":
            tensors = huggingface_tensors(tensors, "vit.")
            told = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
            (path / "preprocessor_config.json").write_text(json.dumps(told))
            config = {"architectures": ["ViTForImageClassification"], "num_attention_heads": 12}
            (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert open_weights(str(path)).num_classes == 1000
    model = vit("ViT-B_16", 1000)
    report = initialize_weights(model, str(path), new_head=False)
    assert (report.new, report.ignored, report.resized) == ([], [], [])
    with torch.no_grad():
        # transformers' files were converted with GELU in another form, which is a fact of its
        # config: the weights are the same.
        assert relative_difference(model(images).double(), expected) < 1e-4


def test_a_bare_model_of_the_hub_has_no_head_and_a_pooler(tmp_path: Path) -> None:
    arrays = drawn(jax_shapes("ViT-B_16", 2, has_representation=False))
    tensors = huggingface_tensors(timm_tensors(arrays), "")
    tensors |= {"pooler.dense.weight": torch.eye(768), "pooler.dense.bias": torch.zeros(768)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_weights(str(tmp_path)).num_classes is None
    report = initialize_weights(vit("ViT-B_16", 10), str(tmp_path), new_head=True)
    assert sorted(report.new) == ["head.bias", "head.weight"]
    with pytest.raises(ValueError, match="head"):
        initialize_weights(vit("ViT-B_16", 10), str(tmp_path), new_head=False)


def bit_shapes(num_classes: int) -> dict[str, tuple[int, ...]]:
    """R50x1 with one unit in each of its four blocks."""
    conv = "standardized_conv2d/kernel"
    shapes: dict[str, tuple[int, ...]] = {
        f"resnet/root_block/{conv}": (7, 7, 3, 64),
        "resnet/group_norm/gamma": (2048,),
        "resnet/group_norm/beta": (2048,),
        "resnet/head/conv2d/kernel": (1, 1, 2048, num_classes),
        "resnet/head/conv2d/bias": (num_classes,),
    }
    before = 64
    for number, width in enumerate((64, 128, 256, 512), start=1):
        unit = f"resnet/block{number}/unit01"
        shapes |= {
            f"{unit}/a/{conv}": (1, 1, before, width),
            f"{unit}/b/{conv}": (3, 3, width, width),
            f"{unit}/c/{conv}": (1, 1, width, 4 * width),
            f"{unit}/a/proj/{conv}": (1, 1, before, 4 * width),
        }
        for part, channels in zip("abc", (before, width, width), strict=True):
            shapes[f"{unit}/{part}/group_norm/gamma"] = (channels,)
            shapes[f"{unit}/{part}/group_norm/beta"] = (channels,)
        before = 4 * width
    return shapes


@pytest.mark.slow
def test_the_npz_of_bit_fits_its_model_and_one_to_be_fine_tuned(tmp_path: Path) -> None:
    path = str(tmp_path / "BiT-M-R50x1-ILSVRC2012.npz")
    np.savez(path, **drawn(bit_shapes(1000)))  # type: ignore[arg-type]
    assert open_weights(path).num_classes == 1000
    size = {"stages": (1, 1, 1, 1), "width_factor": 1}
    report = initialize_weights(build_model("ResNet", 1000, 64, **size), path, new_head=False)
    assert (report.new, report.ignored, report.resized) == ([], [], [])
    report = initialize_weights(build_model("ResNet", 10, 64, **size), path, new_head=True)
    assert sorted(report.new) == ["head.bias", "head.weight"]
    deeper = build_model("ResNet", 1000, 64, stages=(2, 1, 1, 1), width_factor=1)
    with pytest.raises(ValueError, match=r"resnet/block1/unit02/a/"):
        initialize_weights(deeper, path, new_head=False)
