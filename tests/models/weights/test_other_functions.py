"""Published files whose tensors fit, and which would be another function than the model's."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeiTConfig, ViTConfig, ViTForImageClassification

from tests.models.small import FAMILIES, relative_difference, small_model, some_images
from vit_ray.checkpoints.init_weights import planned_load
from vit_ray.config.training_sections import ModelConfig
from vit_ray.models import build_model
from vit_ray.models.weights import load_weights, save_weights


def oblong(image_size: tuple[int, int]) -> torch.nn.Module:
    torch.manual_seed(11)
    return build_model("ViT", **{"num_classes": 5, **FAMILIES["ViT"], "image_size": image_size})


def transformers_folder(folder: Path, **settings: Any) -> ViTForImageClassification:
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8, num_labels=5, hidden_act="gelu_pytorch_tanh",
        initializer_range=0.2,
    )  # fmt: skip
    config.update(settings)
    torch.manual_seed(3)
    model = ViTForImageClassification(config).eval()
    with torch.no_grad():
        model.classifier.weight.normal_()
    model.save_pretrained(folder)
    return model


def fitting_model() -> torch.nn.Module:
    return oblong((32, 32)).eval()


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"layer_norm_eps": 1e-6}, ""),
        ({"hidden_act": "gelu", "layer_norm_eps": 1e-6}, "trained with activation=gelu"),
        ({}, "trained with norm_eps=1e-12"),
    ],
)
def test_settings_that_differ_little_are_read_and_reported(tmp_path, settings, difference):
    peer, model = transformers_folder(tmp_path, **settings), fitting_model()
    report = str(load_weights(model, tmp_path))
    assert difference in report if difference else "trained with" not in report
    with torch.no_grad():
        assert relative_difference(model(some_images()), peer(some_images()).logits) < 5e-3


def test_an_epsilon_that_is_none_is_refused(tmp_path):
    transformers_folder(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "layer_norm_eps": -1e-6}))
    with pytest.raises(ValueError, match="norm_eps="):
        load_weights(fitting_model(), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "activation=quick_gelu"),
        ({"layer_norm_eps": 0.1}, "norm_eps=0.1"),
    ],
)
def test_settings_of_another_function_are_refused(tmp_path, settings, message):
    peer, model = transformers_folder(tmp_path, **settings), fitting_model()
    with pytest.raises(ValueError, match=message):
        load_weights(model, tmp_path)
    (tmp_path / "config.json").unlink()  # the same tensors, of which nothing is known
    load_weights(model, tmp_path)
    with torch.no_grad():
        assert relative_difference(model(some_images()), peer(some_images()).logits) > 5e-3


def test_settings_of_timm_are_read_too(tmp_path):
    config = {"architecture": "vit_base_patch16_224", "model_args": {"act_layer": "quick_gelu"}}
    save_weights(small_model("ViT"), tmp_path / "model.safetensors", "timm")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is of a model with activation=quick_gelu"):
        load_weights(small_model("ViT"), tmp_path / "model.safetensors")


def without_metadata(folder: Path) -> Path:
    """timm's own files do not tell the grid."""
    save_weights(small_model("ViT"), folder / "ours.safetensors", "timm")
    save_file(load_file(folder / "ours.safetensors"), folder / "timm.safetensors")
    return folder / "timm.safetensors"


@pytest.mark.parametrize("layout", ["jax", "timm"])
def test_published_positions_are_of_a_square_image(tmp_path, layout):
    """16 patches are 4 x 4, also for a model that has 2 x 8."""
    path = without_metadata(tmp_path)
    if layout == "jax":
        path = tmp_path / "published.npz"
        save_weights(small_model("ViT"), path, "jax")
    told, guessed = oblong((16, 64)), oblong((16, 64))
    load_weights(told, path, source_grid=(4, 4))
    report = load_weights(guessed, path)
    assert len(report.resized) == 1
    assert report.grids == ((4, 4), (2, 8))
    assert torch.equal(told.positions[0].table, guessed.positions[0].table)
    assert not torch.equal(small_model("ViT").positions[0].table, guessed.positions[0].table)
    same = oblong((32, 32))
    assert load_weights(same, path).resized == []


def test_a_config_with_an_oblong_image_is_believed(tmp_path):
    save_weights(oblong((16, 64)), tmp_path, "huggingface")
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors")
    assert load_weights(oblong((16, 64)), tmp_path).resized == []


def test_an_npz_file_cannot_hold_a_grid_that_would_be_read_as_a_square(tmp_path):
    with pytest.raises(ValueError, match="2 x 8 patches"):
        save_weights(oblong((16, 64)), tmp_path / "model.npz", "jax")
    with pytest.raises(ValueError, match="4 x 6 patches"):  # 25 rows with the class token
        save_weights(oblong((32, 48)), tmp_path / "model.npz", "jax")
    save_weights(oblong((16, 48)), tmp_path / "model.npz", "jax")  # 12 patches are no square


def test_numbers_that_are_not_finite_are_named(tmp_path):
    model = small_model("ViT")
    with torch.no_grad():
        model.blocks[1].mlp.expand.weight[3, 2] = float("inf")
    save_weights(model, tmp_path / "model.safetensors", "vit_ray")
    with pytest.raises(ValueError, match=r"not finite: blocks\.1\.mlp\.expand\.weight; its"):
        load_weights(small_model("ViT"), tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("layout", "dtype"), [("huggingface", torch.int8), ("vit_ray", torch.float8_e5m2)]
)
def test_quantized_tensors_are_named(tmp_path, layout, dtype):
    """Without their scales they are other numbers; also where only shapes are read."""
    path = respelled(tmp_path, layout, lambda name: name)
    name = next(
        n
        for n in load_file(path)
        if "1" in n and n.endswith(("fc2.weight", "expand.weight", "1.output.dense.weight"))
    )
    tensors = load_file(path)
    scale = {f"{name}_scale": torch.ones(1)}  # a quantizer writes it beside
    save_file({**tensors, **scale, name: tensors[name].to(dtype)}, path)
    named = re.escape(name.removeprefix("vit."))
    said = rf"quantized tensors: \S*{named} \({dtype}\); give the weights"
    model = small_model("ViT")
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=said):
        load_weights(model, path)
    config = ModelConfig(name="ViT", image_size=32, **FAMILIES["ViT"])
    with pytest.raises(ValueError, match=said):
        planned_load(config, 5, str(path), False)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_integers_of_an_npz_file_are_named(tmp_path):
    save_weights(small_model("ViT"), tmp_path / "model.npz", "jax")
    arrays = dict(np.load(tmp_path / "model.npz"))
    arrays["Transformer/encoder_norm/scale"] = np.ones(32, np.int8)
    np.savez(tmp_path / "model.npz", **arrays)
    with pytest.raises(
        ValueError, match=r"quantized tensors: \S+encoder_norm/scale \(torch\.int8\)"
    ):
        load_weights(small_model("ViT"), tmp_path / "model.npz")
    arrays["Transformer/encoder_norm/scale"] = np.ones(32, "V1")  # numpy's fp8
    np.savez(tmp_path / "model.npz", **arrays)
    with pytest.raises(ValueError, match=r"encoder_norm/scale.* is of the type \|V1"):
        load_weights(small_model("ViT"), tmp_path / "model.npz")


def respelled(folder: Path, layout: str, spell: Any) -> Path:
    save_weights(small_model("ViT"), folder / "plain.safetensors", layout)
    tensors: dict[str, Tensor] = load_file(folder / "plain.safetensors")
    save_file({spell(name): t for name, t in tensors.items()}, folder / "respelled.safetensors")
    return folder / "respelled.safetensors"


@pytest.mark.parametrize(
    ("layout", "spell"),
    [
        ("huggingface", lambda name: f"module._orig_mod.{name}"),
        ("vit_ray", lambda name: f"state_dict.model.{name}"),
        ("huggingface", lambda name: name.replace("vit.", f"{DeiTConfig.model_type}.", 1)),
    ],
)
def test_prefixes_of_trainers_and_of_deit_are_taken_off(tmp_path, layout, spell):
    loaded = fitting_model()
    report = load_weights(loaded, respelled(tmp_path, layout, spell))
    assert report.new == report.ignored == []
    assert torch.equal(loaded(some_images()), small_model("ViT").eval()(some_images()))
