"""Files that are not the model's, models that a layout cannot express, and outlines of files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from tests.models.small import FAMILIES, small_model
from vit_ray.checkpoints.init_weights import initialize_weights, planned_load
from vit_ray.config.training_sections import ModelConfig
from vit_ray.models.weights import load_weights, save_weights

Writer = Callable[[Path], Any]


def jax_file(**arrays: np.ndarray[Any, Any] | None) -> Writer:
    """Writes the model's file with these arrays; None takes one away."""

    def write(path: Path) -> None:
        save_weights(small_model("ViT"), path, "jax")
        both = {**np.load(path), **arrays}
        np.savez(path, **{name: array for name, array in both.items() if array is not None})

    return write


def file_of(layout: str, family: str = "ViT", **options: Any) -> Writer:
    return lambda path: save_weights(small_model(family, **options), path, layout)


def folder_of(layout: str, **settings: Any) -> Writer:
    """Writes the model's folder with these settings in its `config.json`."""

    def write(path: Path) -> None:
        save_weights(small_model("ViT"), path, layout)
        config = path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))

    return write


def quantized(layout: str, name: str, dtype: torch.dtype) -> Writer:
    """Without its scales, which a quantizer writes beside, a tensor is of other numbers."""

    def write(path: Path) -> None:
        save_weights(small_model("ViT"), path, layout)
        tensors: dict[str, Tensor] = load_file(path)
        tensors[f"{name}_scale"] = torch.ones(1)
        tensors[name] = tensors[name].to(dtype)
        save_file(tensors, path)

    return write


def not_finite(path: Path) -> None:
    model = small_model("ViT")
    with torch.no_grad():
        model.blocks[1].mlp.expand.weight[3, 2] = float("inf")
    save_weights(model, path, "vit_ray")


def folder_of_two_heads(path: Path) -> None:
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        patch_size=8, image_size=32, num_labels=5,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(path)


KEY_BIAS = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/key/bias"
NORM = "Transformer/encoder_norm/scale"
FC2, EXPAND = "vit.encoder.layer.1.output.dense.weight", "blocks.1.mlp.expand.weight"
# Name of the file, or of the folder that is written, and what the error names.
WRONG: list[tuple[str, Writer, str]] = [
    ("model.pth", lambda p: torch.save({"a": torch.zeros(1)}, p), "only .npz and .safetensors"),
    ("a.npz", lambda p: np.savez(p, a=np.array([object()], dtype=object)), "cannot be read"),
    ("empty.npz", lambda p: p.touch(), "empty.npz cannot be read"),
    ("a.safetensors", lambda p: p.write_bytes(bytes(99)), "cannot be read"),
    ("none.npz", lambda p: None, "do not exist"),
    ("other.npz", lambda p: np.savez(p, banana=np.zeros(1)), "banana"),
    ("a.npz", jax_file(**{KEY_BIAS: None}), "not fit this Vi.*\n.*missing: .*_1.*/key/bias"),
    ("a.npz", jax_file(cls=None), "missing: class_token.token"),
    ("a.npz", jax_file(extra=np.zeros(3)), "unexpected: extra"),
    ("a.npz", jax_file(**{"embedding/bias": np.zeros(31)}), "projection.bias is 31, .* has 32"),
    ("a.npz", jax_file(**{NORM: np.ones(32, np.int8)}), r"encoder_norm/scale \(torch\.int8\)"),
    ("a.npz", jax_file(**{NORM: np.ones(32, "V1")}), r"encoder_norm/scale.* type \|V1"),  # fp8
    ("a.npz", file_of("jax", depth=3), "encoderblock_2"),
    ("a.npz", file_of("jax", num_heads=8), "num_heads=8, and this one has num_heads=4"),
    ("a.safetensors", file_of("timm", num_heads=8), "num_heads=8, and this one has num_heads=4"),
    ("hub", file_of("huggingface", num_heads=8), "num_heads=8, and this one has num_heads=4"),
    ("hub", folder_of_two_heads, "num_heads=2, and this one has num_heads=4"),
    (
        "a.safetensors",
        file_of("vit_ray", positions_at="every_layer_shared"),
        "positions_at=every_layer_shared",
    ),
    ("a.safetensors", file_of("vit_ray", positions="sincos_2d"), "positions=sincos_2d"),
    ("a.safetensors", not_finite, r"not finite: blocks\.1\.mlp\.expand\.weight"),
    ("a.safetensors", quantized("huggingface", FC2, torch.int8), f"quantized.*{FC2[4:]}"),
    ("a.safetensors", quantized("vit_ray", EXPAND, torch.float8_e5m2), f"quantized.*{EXPAND}"),
    ("hub", folder_of("huggingface", layer_norm_eps=-1e-6), "norm_eps="),
    ("timm", folder_of("timm", model_args={"act_layer": "quick_gelu"}), "activation=quick_gelu"),
    ("hub", folder_of("huggingface", mean=0.5, std=[0.5] * 3), r"mean 0\.5"),
    ("timm", folder_of("timm", pretrained_cfg={"mean": [0.5] * 3, "std": [1, 0, 1]}), "above zero"),
]


@pytest.mark.parametrize(("name", "write", "named"), WRONG)
def test_a_file_that_is_not_the_models_is_refused_and_leaves_the_model_as_it_is(
    name, write, named, tmp_path
):
    model = small_model("ViT")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = tmp_path / name
    write(path)
    with pytest.raises(ValueError, match=named):
        load_weights(model, path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    if "quantized" in named:
        config = ModelConfig(name="ViT", image_size=32, **FAMILIES["ViT"])
        with pytest.raises(ValueError, match=named):
            planned_load(config, 5, str(path), False)


@pytest.mark.parametrize(
    ("family", "options", "name", "layout", "named"),
    [
        ("ViT", {"positions": "learned_2d"}, "x.npz", "jax", "positions.0.class_position"),
        ("Axial-ViT", {}, "x.npz", "jax", "use layout='vit_ray'"),
        ("R+ViT", {}, "x.safetensors", "huggingface", "hybrid"),
        ("ViT", {}, "x.safetensors", "jax", "layout='jax' is written to .npz"),
        ("ViT", {"positions_at": "every_layer_shared"}, "x.npz", "jax", "every_layer_shared"),
        ("ViT", {"pool": "gap"}, "x.safetensors", "huggingface", "pool='gap'"),
        ("ViT", {"positions": "none"}, "x.safetensors", "huggingface", "positions='none'"),
        ("ViT", {"positions": "sincos_2d"}, "x.safetensors", "timm", "use layout='vit_ray'"),
        ("ViT", {}, "file/model.npz", "jax", "weights cannot be written to .*/file/model.npz"),
        # Which would be read as a square; 25 rows with the class token are one, too.
        ("ViT", {"image_size": (16, 64)}, "x.npz", "jax", "2 x 8 patches"),
        ("ViT", {"image_size": (32, 48)}, "x.npz", "jax", "4 x 6 patches"),
    ],
)
def test_what_a_layout_cannot_express_is_not_saved_as_something_else(
    family, options, name, layout, named, tmp_path
):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=named):
        save_weights(small_model(family, **options), tmp_path / name, layout)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("family", "name", "layout", "new_head"),
    [
        ("ViT", "model.npz", "jax", True),
        ("ViT", "hub", "huggingface", "auto"),
        ("R+ViT", "model.safetensors", "timm", "auto"),
        ("ResNet", "model.npz", "jax", False),
        ("ViT", "model.safetensors", "vit_ray", False),
    ],
)
def test_a_load_planned_by_names_and_shapes_is_what_becomes_of_the_tensors(
    family, name, layout, new_head, tmp_path
):
    path = str(tmp_path / name)
    save_weights(small_model(family, image_size=32).bfloat16(), path, layout)
    real = initialize_weights(small_model(family, image_size=64), path, new_head=new_head)
    config = ModelConfig(name=family, image_size=64, **FAMILIES[family])
    planned = planned_load(config, 5, path, new_head)
    assert vars(planned) == vars(real)
    assert (planned.grids is None) == (family == "ResNet")
