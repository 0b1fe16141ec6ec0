"""Files with the names of published ones go through every command, and mean there what they are.

The commands are followed up to what they hand to the workers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.data.small_sets import write_set
from tests.models.small import relative_difference
from tests.models.weights.published import (
    SIZES,
    drawn,
    huggingface_tensors,
    jax_shapes,
    jax_vit_logits,
    timm_tensors,
)
from tests.recipes import recipe_with
from vit_ray.checkpoints.init_weights import initialize_weights, published_use
from vit_ray.commands.trained_model import load_trained_model
from vit_ray.config import Recipe
from vit_ray.launch.prepared_run import PreparedRun, prepare_evaluation, prepared_training
from vit_ray.training.objective import build_objective, normalize

TINY = {"width": 32, "mlp_dim": 64, "num_heads": 2, "patch_size": 16}
OURS = {"mean": [0.5] * 3, "std": [0.5] * 3}
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
CLASSES = ["ant", "bee", "cow"]


def write_published(folder: Path, layout: str) -> tuple[str, dict[str, Any]]:
    """A tiny ViT under the names of a layout, and its arrays under those of the JAX files.

    What stands beside timm's and transformers' files says that inputs are normalised by ImageNet's
    mean and deviation, and that the classes are in another order than the data set's.
    """
    folder.mkdir()
    arrays = drawn(jax_shapes("tiny", 3, has_representation=False))
    if layout == "jax":
        np.savez(folder / "ViT-B_16.npz", **arrays)  # type: ignore[arg-type]
        return str(folder / "ViT-B_16.npz"), arrays
    tensors = timm_tensors(arrays)
    config: dict[str, Any] = {"pretrained_cfg": IMAGENET, "label_names": CLASSES[::-1]}
    if layout == "huggingface":
        tensors = huggingface_tensors(tensors, "vit.")
        config = {"num_attention_heads": 2, "id2label": dict(enumerate(CLASSES[::-1]))}
        told = {f"image_{key}": value for key, value in IMAGENET.items()}
        (folder / "preprocessor_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder), arrays


@pytest.mark.parametrize(
    ("facts", "crop"),
    [
        ({"crop_pct": 0.9}, {"kind": "center_crop", "resize": 248}),  # timm: floor(224 / 0.9)
        ({"crop_pct": 1.0, "crop_mode": "squash"}, {"kind": "resize"}),
    ],
)
def test_images_are_cropped_as_timm_crops_them(facts, crop, tmp_path):
    file = tmp_path / "model.safetensors"
    settings = {"architecture": "vit_base_patch16_224", "num_classes": 3}
    facts = {"input_size": [3, 224, 224], **facts}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "pretrained_cfg": facts}))
    file.touch()
    found = published_use(str(file))
    assert found is not None
    assert found["data"]["eval_augment"] == crop


def recipe_of(folder: Path, path: str) -> Recipe:
    rows = [(str(k), [k % 3]) for k in range(6)]
    data = write_set(folder / "set", rows, CLASSES).path
    return recipe_with(
        "published", output=str(folder / "runs"), init_from=path,
        model={"name": "ViT", "depth": 1, **TINY},
        data={"train": data, "eval": data}, optim={"steps": 1}, workers={"num_workers": 1},
        train={"global_batch_size": 2, "micro_batch_size": 2},
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["jax", "timm", "huggingface"])
def test_a_published_vit_goes_through_every_command(layout, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(SIZES, "tiny", TINY)
    path, arrays = write_published(tmp_path / "published", layout)
    recipe = recipe_of(tmp_path, path)
    pixels = torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8)
    statistics = OURS if layout == "jax" else IMAGENET
    mean, std = (torch.tensor(statistics[key]) for key in ("mean", "std"))
    inputs = ((pixels / 255 - mean) / std).permute(0, 3, 1, 2)
    expected = jax_vit_logits(arrays, inputs, patch=16, depth=1)

    def logits(model: torch.nn.Module) -> Tensor:
        with torch.no_grad():
            return model(normalize(pixels, torch.float32)).double()

    def loaded_by(prepared: PreparedRun) -> torch.nn.Module:
        """The model as a worker builds it."""
        model = build_objective(prepared.recipe, prepared.num_classes).eval()
        initialize_weights(model, str(prepared.recipe.init_from), new_head=prepared.new_head)
        return model

    evaluated = prepare_evaluation(recipe)
    assert relative_difference(logits(loaded_by(evaluated)), expected) < 1e-4
    inspected, *_ = load_trained_model(recipe, None)
    assert relative_difference(logits(inspected), expected) < 1e-4
    with prepared_training(recipe, "finetune") as finetuning:
        tuned = loaded_by(finetuning)
    assert torch.equal(logits(tuned), torch.zeros(2, 3, dtype=torch.float64))  # a new head
    block = dict(inspected.named_parameters())["blocks.0.mlp.expand.weight"]
    assert torch.equal(dict(tuned.named_parameters())["blocks.0.mlp.expand.weight"], block)
    assert evaluated.answers is not None
    assert evaluated.answers.classes == tuple(CLASSES if layout == "jax" else CLASSES[::-1])
    told = "the weights were trained at 224 x 224 pixels"
    assert told not in caplog.text
    if layout == "timm":
        prepare_evaluation(recipe.with_changes(model={"image_size": 160}))
        assert told in caplog.text
