"""Weights in and out of files: layouts against peers, round trips, and what is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BitConfig, BitForImageClassification

from tests.models.peers import transformers_vit
from tests.models.small import FAMILIES, other_model, relative_difference, small_model, some_images
from tests.models.weights.published import Arrays
from vit_ray.checkpoints.init_weights import open_weights, planned_load
from vit_ray.config.training_sections import ModelConfig
from vit_ray.models.fitting import fit_state_dict, origin_of
from vit_ray.models.weights import load_weights, save_weights


def saved_arrays(model: nn.Module, folder: Path) -> Arrays:
    save_weights(model, folder / "model.npz", "jax")
    with np.load(folder / "model.npz", allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def test_group_norm_scales_with_leading_axes_are_read(tmp_path):
    model = small_model("R+ViT")
    arrays = saved_arrays(model, tmp_path)
    assert arrays["block2/unit2/conv1/kernel"].shape == (1, 1, 512, 128)
    # The published hybrids were written by a flax whose group norm had (1, 1, 1, C) parameters.
    for name in arrays:
        if "/gn" in name or name.startswith("gn"):
            arrays[name] = arrays[name].reshape(1, 1, 1, -1)
    np.savez(tmp_path / "old.npz", **arrays)
    assert_equal_after_loading(model, other_model("R+ViT"), tmp_path / "old.npz")


def assert_equal_after_loading(source: nn.Module, target: nn.Module, path: Path) -> None:
    report = load_weights(target, path)
    assert sorted(report.loaded) == sorted(source.state_dict())
    assert report.resized == report.new == report.ignored == []
    for name, tensor in source.state_dict().items():
        assert tensor.dtype == target.state_dict()[name].dtype
        assert torch.equal(tensor, target.state_dict()[name]), name


ROUND_TRIPS = [
    ("ViT", "jax", {"pool": "gap"}),
    ("ViT", "timm", {"pool": "gap", "activation": "gelu"}),
    ("ViT", "huggingface", {"activation": "gelu", "norm_eps": 1e-5}),
    ("R+ViT", "jax", {"representation": True}),
    ("ResNet", "timm", {}),
    ("ResNet", "huggingface", {}),
    ("Axial-ViT", "vit_ray", {"representation": True}),
    ("AxialResNet", "vit_ray", {}),
    ("R+ViT", "vit_ray", {"pool": "gap", "positions": "sincos_2d"}),
    ("ViT", "vit_ray", {"positions": "learned_2d", "positions_at": "every_layer"}),
]


def file_of(folder: Path, layout: str) -> Path:
    return folder / ("model.npz" if layout == "jax" else "model.safetensors")


def test_others_may_read_what_is_written_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        save_weights(small_model("ViT"), tmp_path / "a.npz", "jax")
    finally:
        os.umask(before)
    assert (tmp_path / "a.npz").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(("family", "layout", "options"), ROUND_TRIPS)
def test_a_round_trip_is_exact_to_the_bit(family, layout, options, tmp_path):
    source = small_model(family, **options)
    path = file_of(tmp_path, layout)
    save_weights(source, path, layout)
    loaded = other_model(family, **options)
    assert_equal_after_loading(source, loaded, path)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(some_images()), source.eval()(some_images()))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    save_weights(source.bfloat16(), path, layout)
    assert_equal_after_loading(source, other_model(family, **options).bfloat16(), path)


@pytest.mark.parametrize(("family", "layout"), [("ViT", "jax"), ("ResNet", "timm")])
def test_files_have_the_sum_of_the_heads_two_biases(family, layout, tmp_path):
    source = small_model(family, head_bias=-6.9).eval()
    plain = small_model(family).eval()
    expected = source(some_images())
    torch.testing.assert_close(expected, plain(some_images()) - 6.9)
    path = file_of(tmp_path, layout)
    save_weights(source, path, layout)
    for bias in (0.0, -6.9, -10.0):
        model = other_model(family, head_bias=bias).eval()
        report = load_weights(model, path)
        assert len(report.loaded) == len(source.state_dict())
        torch.testing.assert_close(model(some_images()), expected, rtol=1e-5, atol=1e-5)
    # A run's state dict has its trained bias alone, to the bit.
    same, other = other_model(family, head_bias=-6.9), other_model(family).eval()
    fit_state_dict(same, source.state_dict(), origin=origin_of(source))
    assert torch.equal(same.head.bias, source.head.bias)
    fit_state_dict(other, source.state_dict(), origin=origin_of(source))
    torch.testing.assert_close(other(some_images()), expected, rtol=1e-5, atol=1e-5)


def test_a_bit_resnet_equals_transformers_with_the_same_weights(tmp_path):
    """Names of the JAX files of hybrids and BiTs are in `tests/net/kept/models.json`."""
    sizes = {"depths": [1, 2], "hidden_sizes": [256, 512], "embedding_size": 64}
    config = BitConfig(**sizes, num_labels=5, layer_type="preactivation")
    torch.manual_seed(3)
    peer = BitForImageClassification(config).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.02))
    # Its kernels are standardised with 1e-8 beside the variance, BiT's with 1e-10.
    for module in peer.modules():
        if type(module).__name__.startswith("WeightStandardizedConv2d"):
            module.eps = 1e-10
    peer.save_pretrained(tmp_path)
    model = other_model("ResNet").eval()
    report = load_weights(model, tmp_path, new_head=False)
    assert (report.new, report.ignored) == ([], [])
    images = some_images(2, (64, 48))
    with torch.no_grad():
        assert relative_difference(model(images), peer(images).logits) < 1e-5
    kernel = saved_arrays(model, tmp_path)["resnet/block2/unit02/a/standardized_conv2d/kernel"]
    assert kernel.shape == (1, 1, 512, 128)


def test_transformers_reads_a_saved_folder(tmp_path):
    model = small_model("ResNet").eval()
    save_weights(model, tmp_path, "huggingface")
    peer, info = BitForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    with torch.no_grad():
        theirs = peer.eval()(some_images()).logits
        # 1e-8 against 1e-10 beside the variance of kernels is seen in the fifth digit.
        assert relative_difference(model(some_images()), theirs) < 1e-4


def test_timm_models_that_do_not_embed_the_class_token_are_read(tmp_path):
    model = small_model("ViT").eval()
    with torch.no_grad():
        model.positions[0].table[:, 0] = 0
    save_weights(model, tmp_path / "model.safetensors", "timm")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["pos_embed"] = tensors["pos_embed"][:, 1:].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = other_model("ViT").eval()
    load_weights(loaded, tmp_path / "model.safetensors")
    assert torch.equal(loaded(some_images()), model(some_images()))


Writer = Callable[[Path], Any]


def jax_file(**arrays: np.ndarray[Any, Any] | None) -> Writer:
    """Writes the model's file with these arrays; None takes one away."""

    def write(path: Path) -> None:
        save_weights(small_model("ViT"), path, "jax")
        both = {**np.load(path), **arrays}
        np.savez(path, **{name: array for name, array in both.items() if array is not None})

    return write


def written_as(layout: str, family: str = "ViT", **options: Any) -> Writer:
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
    ("a.npz", written_as("jax", depth=3), "encoderblock_2"),
    ("a.npz", written_as("jax", num_heads=8), "num_heads=8, and this one has num_heads=4"),
    ("a.safetensors", written_as("timm", num_heads=8), "num_heads=8, .* num_heads=4"),
    ("hub", written_as("huggingface", num_heads=8), "num_heads=8, .* num_heads=4"),
    ("hub", lambda p: transformers_vit(p, num_attention_heads=2), "num_heads=2, .* num_heads=4"),
    ("a.safetensors", written_as("vit_ray", positions_at="every_layer_shared"), "layer_shared"),
    ("a.safetensors", written_as("vit_ray", positions="sincos_2d"), "positions=sincos_2d"),
    ("a.safetensors", not_finite, r"not finite: blocks\.1\.mlp\.expand\.weight"),
    ("a.safetensors", quantized("huggingface", FC2, torch.int8), f"quantized.*{FC2[4:]}"),
    ("a.safetensors", quantized("vit_ray", EXPAND, torch.float8_e5m2), f"quantized.*{EXPAND}"),
    ("hub", folder_of("huggingface", layer_norm_eps=-1e-6), "norm_eps="),
    ("timm", folder_of("timm", model_args={"act_layer": "quick_gelu"}), "activation=quick_gelu"),
    ("hub", folder_of("huggingface", mean=0.5, std=[0.5] * 3), r"mean 0\.5"),
    ("timm", folder_of("timm", pretrained_cfg={"mean": [0.5] * 3, "std": [1, 0, 1]}), "not finite"),
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
    real = open_weights(path).load_into(small_model(family, image_size=64), new_head)
    config = ModelConfig(name=family, image_size=64, **FAMILIES[family])
    planned = planned_load(config, 5, path, new_head)
    assert vars(planned) == vars(real)
