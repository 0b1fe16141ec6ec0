"""Weights whose inputs were normalised otherwise give the same logits for the same pixels."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ViTImageProcessor

from tests.models.small import small_model
from vit_ray.models.published import FOLDER_PREPROCESSOR, statistics_beside
from vit_ray.models.weights import load_weights, save_weights
from vit_ray.training.objective import normalize

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def published(folder: Path, files: dict[str, Any]) -> nn.Module:
    """A ViT in a folder as Hugging Face has it, with what is said of its inputs beside."""
    torch.manual_seed(5)
    model = small_model("ViT").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    save_weights(model, folder / "model.safetensors", "timm")
    for name, told in files.items():
        (folder / name).write_text(json.dumps(told))
    return model


def pixels(model: Any) -> torch.Tensor:
    rows, columns = model.grid
    side = model.embedding.patch_size
    return torch.randint(0, 256, (3, rows * side, columns * side, 3), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("files", "inputs"),
    [
        ({"config.json": {"architecture": "vit", "pretrained_cfg": IMAGENET}}, IMAGENET),
        ({"config.json": IMAGENET}, IMAGENET),
        ({FOLDER_PREPROCESSOR: {f"image_{key}": v for key, v in IMAGENET.items()}}, IMAGENET),
        # Pixels that are only scaled are normalised, too.
        ({FOLDER_PREPROCESSOR: {"do_normalize": False}}, {"mean": [0.0] * 3, "std": [1.0] * 3}),
    ],
)
def test_logits_are_those_of_the_models_own_normalisation(tmp_path, files, inputs):
    original = published(tmp_path, files)
    images = pixels(original)
    # The normalisation of an image processor of transformers.
    processor = ViTImageProcessor(
        do_resize=False, image_mean=inputs["mean"], image_std=inputs["std"]
    )
    values = processor(list(images.numpy()), return_tensors="pt")["pixel_values"]
    loaded = small_model("ViT").eval()
    report = load_weights(loaded, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(normalize(images, torch.float32)), original(values), rtol=1e-4, atol=1e-4
        )
    assert inputs is not IMAGENET or "mean [0.485, 0.456, 0.406] and std [0.229" in str(report)
    assert "folded into the first layer" in str(report)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}},
        {FOLDER_PREPROCESSOR: {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}},
    ],
)
def test_weights_of_inputs_as_ours_are_left_to_the_bit(tmp_path, files):
    original = published(tmp_path, files)
    loaded = small_model("ViT")
    report = load_weights(loaded, tmp_path)
    for name, tensor in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert "folded" not in str(report)


def test_what_is_no_mean_and_deviation_is_refused(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"mean": 0.5, "std": [0.5] * 3}))
    with pytest.raises(ValueError, match=r"mean 0\.5 and .*three numbers each"):
        statistics_beside(tmp_path)
    config.write_text(json.dumps({"mean": [0.5] * 3, "std": [0.5, 0, 1]}))
    with pytest.raises(ValueError, match="deviations above zero"):
        statistics_beside(tmp_path)
    config.write_text(json.dumps({"num_attention_heads": 2}))
    assert statistics_beside(tmp_path) is None
    assert statistics_beside(tmp_path / "other.safetensors") is None
