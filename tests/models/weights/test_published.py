"""Published files: their names and shapes, and what stands beside them of the model's function.

Listing: `gs://vit_models/imagenet21k/ViT-B_16.npz` (google-research/vision_transformer).
"""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import ViTImageProcessor

from tests.models.peers import transformers_vit
from tests.models.small import other_model, relative_difference, small_model, some_images
from tests.models.weights.published import VIT_B_16, drawn, jax_shapes, jax_vit_logits
from vit_ray.checkpoints.init_weights import open_weights
from vit_ray.models import build_model
from vit_ray.models.layers import StandardizedConv2d
from vit_ray.models.published import FOLDER_PREPROCESSOR
from vit_ray.models.weights import load_weights, save_weights
from vit_ray.training.objective import normalize


@pytest.mark.parametrize("has_representation", [False, True])
def test_a_model_in_the_jax_layout_has_the_logits_of_its_names(has_representation, tmp_path):
    """Those of timm and transformers are held against theirs: below, and in `test_vit.py`."""
    arrays = drawn(jax_shapes(VIT_B_16, 1000, has_representation))
    images = some_images(1, (224, 224))
    expected = jax_vit_logits(arrays, images, patch=16, depth=1)
    path = tmp_path / "ViT-B_16-224.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    assert open_weights(str(path)).num_classes == 1000
    options = {"depth": 1, "representation": has_representation, **VIT_B_16}
    model = build_model("ViT", 1000, **options).eval()
    report = open_weights(str(path)).load_into(model, False)
    assert (report.new, report.ignored, report.resized) == ([], [], [])
    with torch.no_grad():
        assert relative_difference(model(images).double(), expected) < 1e-4


def test_the_prefix_of_a_deit_is_taken_off(tmp_path):
    path = tmp_path / "a.safetensors"
    save_weights(small_model("ViT"), path, "huggingface")
    tensors = {name.replace("vit.", "deit.", 1): t for name, t in load_file(path).items()}
    save_file(tensors, path)
    loaded = other_model("ViT").eval()
    report = load_weights(loaded, path)
    assert report.new == report.ignored == []
    assert torch.equal(loaded(some_images()), small_model("ViT").eval()(some_images()))


@pytest.mark.parametrize(
    ("settings", "told", "is_another_function"),
    [
        ({}, "", False),
        ({"hidden_act": "gelu"}, "trained with activation=gelu", False),
        ({"layer_norm_eps": 1e-12}, "trained with norm_eps=1e-12", False),
        ({"hidden_act": "quick_gelu"}, "activation=quick_gelu", True),
        ({"layer_norm_eps": 0.1}, "norm_eps=0.1", True),
    ],
)
def test_settings_that_differ_little_are_reported_and_those_of_another_function_refused(
    tmp_path, settings, told, is_another_function
):
    peer = transformers_vit(tmp_path, initializer_range=0.2, **settings)
    model = other_model("ViT").eval()
    if is_another_function:
        with pytest.raises(ValueError, match=told):
            load_weights(model, tmp_path)
        (tmp_path / "config.json").unlink()  # the same tensors, of which nothing is known
        load_weights(model, tmp_path)
    else:
        report = str(load_weights(model, tmp_path))
        assert told in report if told else "trained with" not in report
    with torch.no_grad():
        difference = relative_difference(model(some_images()), peer(some_images()).logits)
    assert (difference > 5e-3) == is_another_function


IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def folder_with(folder: Path, files: dict[str, Any]) -> nn.Module:
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


HALVES = {"mean": [0.5] * 3, "std": [0.5] * 3}


@pytest.mark.parametrize(
    ("files", "inputs"),
    [
        ({"config.json": {"architecture": "vit", "pretrained_cfg": IMAGENET}}, IMAGENET),
        ({"config.json": IMAGENET}, IMAGENET),
        ({FOLDER_PREPROCESSOR: {f"image_{key}": v for key, v in IMAGENET.items()}}, IMAGENET),
        # Pixels that are only scaled are normalised, too.
        ({FOLDER_PREPROCESSOR: {"do_normalize": False}}, {"mean": [0.0] * 3, "std": [1.0] * 3}),
        ({}, HALVES),
        ({"config.json": {"num_attention_heads": 4}}, HALVES),
        ({"config.json": {"pretrained_cfg": HALVES}}, HALVES),
        ({FOLDER_PREPROCESSOR: {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}}, HALVES),
    ],
)
def test_logits_are_those_of_the_models_own_normalisation(tmp_path, files, inputs):
    original = folder_with(tmp_path, files)
    images = torch.randint(0, 256, (3, 32, 32, 3), dtype=torch.uint8)
    processor = ViTImageProcessor(
        do_resize=False, image_mean=inputs["mean"], image_std=inputs["std"]
    )
    values = processor(list(images.numpy()), return_tensors="pt")["pixel_values"]
    loaded = small_model("ViT").eval()
    report = str(load_weights(loaded, tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(normalize(images, torch.float32)), original(values), rtol=1e-4, atol=1e-4
        )
    # Weights of inputs as ours are left to the bit.
    assert ("folded into the first layer" in report) == (inputs is not HALVES)
    state, loaded_state = original.state_dict(), loaded.state_dict()
    is_equal = all(torch.equal(state[name], loaded_state[name]) for name in state)
    assert is_equal == (inputs is HALVES)


# Logits that timm's own code computed of drawn weights: made by the script that commit a48c6e22 has
# as `timm_logits.py` here, with timm 1.0.31, in fp64.
FILE = Path(__file__).with_name("timm_logits.json")
CLASSES, SIDE, IMAGES = 10, 64, 2
# Models as timm has them published, but for the size of a ViT and of what stands on a ResNet, and
# its GELU, which timm computes by erf (0.01 % of the largest logit) and the paper's code by tanh.
ENCODER = {"depth": 2, "width": 64, "mlp_dim": 256, "num_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit_tiny_patch16_224": ("ViT", {**ENCODER, "patch_size": 16}),
    "vit_base_r50_s16_224": ("R+ViT", {**ENCODER, "stages": (3, 4, 9), "width_factor": 1}),
    "vit_large_r50_s32_224": ("R+ViT", {**ENCODER, "stages": (3, 4, 6, 3), "width_factor": 1}),
    "resnetv2_50x1_bit": ("ResNet", {"stages": (3, 4, 6, 3), "width_factor": 1}),
}


def drawn_by_name(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers in fp32 that depend on the name alone, as large as weights of that shape are."""
    random = np.random.RandomState(zlib.crc32(name.encode()))  # whose numbers never change
    spread = random.uniform(-1.0, 1.0, shape)
    if len(shape) > 1:
        spread = spread * math.sqrt(3 / math.prod(shape[1:]))
    elif name.endswith("weight"):  # of a norm
        spread = 1 + 0.2 * spread
    return torch.from_numpy(spread.astype(np.float32))


def drawn_images() -> Tensor:
    """float64 (B, 3, H, W) in [-1, 1]."""
    return drawn_by_name("images", (IMAGES * 3 * SIDE * SIDE,)).double().view(IMAGES, 3, SIDE, SIDE)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_timms_code_with_the_same_weights(name, tmp_path, monkeypatch):
    # All in fp64: what is fp32 in every precision, standardised kernels and logits, too.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    kept = json.loads(FILE.read_text())[name]
    family, options = MODELS[name]
    model, path = build_model(family, CLASSES, SIDE, **options), tmp_path / "model.safetensors"
    save_weights(model, path, "timm")
    shapes = {key: tuple(tensor.shape) for key, tensor in load_file(path).items()}
    assert len(shapes) == kept["tensors"]
    assert zlib.crc32(json.dumps(sorted(shapes.items())).encode()) == kept["crc32_of_shapes"]
    save_file({key: drawn_by_name(key, shape) for key, shape in shapes.items()}, path)
    assert open_weights(str(path)).num_classes == CLASSES
    load_weights(model, path)
    expected = torch.tensor(kept["logits"], dtype=torch.float64)
    # Measured: 5e-16 for the ViT, and by the constants alone 1.1e-5 (hybrids) and 2e-6 (BiT).
    assert apart(model, expected) < 2e-5
    take_timms_constants(model)
    assert apart(model, expected) < 1e-12  # 5e-16 to 6e-15


def apart(model: nn.Module, expected: Tensor) -> float:
    with torch.no_grad():
        logits: Tensor = model.double().eval()(drawn_images())
    assert logits.dtype == expected.dtype
    return float((logits - expected).abs().max() / expected.abs().max())


def take_timms_constants(model: nn.Module) -> None:
    """What keeps a division from 0; ours are those of the models' own authors."""
    for module in model.modules():
        if isinstance(module, StandardizedConv2d):
            module.eps, module.eps_on_deviation = 1e-8, False
        elif isinstance(module, nn.GroupNorm):
            module.eps = 1e-5
