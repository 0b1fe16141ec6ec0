"""Weights in and out: published layouts, whole round trips, and errors that list the tensors."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BitConfig,
    BitForImageClassification,
    DPTConfig,
    DPTModel,
    ViTConfig,
    ViTForImageClassification,
)

from tests.models.small import FAMILIES, relative_difference, small_model, some_images
from tests.models.weights.published import Arrays, jax_vit_logits
from vit_ray.checkpoints.init_weights import open_weights
from vit_ray.models import build_model
from vit_ray.models.fitting import fit_state_dict, origin_of
from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.models.weights import load_weights, save_weights


def other_model(family: str, **options: Any) -> nn.Module:
    """A fresh model of the same size as `small_model`, with other values."""
    torch.manual_seed(11)
    arguments = {"num_classes": 5, "image_size": 32, **FAMILIES[family], **options}
    return build_model(family, **arguments)


# --- the JAX layout, read by a ViT written from its names alone ---------------------------------


def saved_arrays(model: nn.Module, folder: Path) -> Arrays:
    save_weights(model, folder / "model.npz", "jax")
    with np.load(folder / "model.npz", allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def test_the_jax_layout_of_a_hybrid_gives_the_same_logits_to_code_that_knows_only_its_names(
    tmp_path,
):
    """That of a ViT is held against the same code in `test_published_layouts.py`."""
    model = small_model("R+ViT", image_size=44, representation=True).eval()
    images = some_images(2, (44, 44))
    expected = jax_vit_logits(saved_arrays(model, tmp_path), images, patch=1, depth=2)
    with torch.no_grad():
        # Ours is float32 against float64; a few rounding errors deep.
        assert relative_difference(model(images).double(), expected) < 1e-5


def test_big_vision_spelling_positions_without_a_class_row_and_stacked_blocks(tmp_path):
    model = small_model("ViT").eval()
    with torch.no_grad():
        model.positions[0].table[:, 0] = 0
    arrays = saved_arrays(model, tmp_path)
    blocks: dict[str, list[np.ndarray[Any, Any]]] = {}
    respelled: Arrays = {}
    for name, array in arrays.items():
        name = name.replace("Attention_1/", "Attention_0/").replace("MlpBlock_3/", "MlpBlock_0/")
        name = name.replace("LayerNorm_2/", "LayerNorm_1/")
        if "encoderblock_" in name:
            blocks.setdefault(re.sub(r"encoderblock_\d", "encoderblock", name), []).append(array)
        elif name.endswith("pos_embedding"):
            respelled["pos_embedding"] = array[:, 1:]
        else:
            respelled[name] = array
    respelled.update({name: np.stack(parts) for name, parts in blocks.items()})
    folded_arrays = {f"opt/target/{name}": array for name, array in respelled.items()}
    state = {"opt/0/mu/embedding/kernel": np.ones(3), "opt/0/count": np.ones(()), "step": 7}
    np.savez(tmp_path / "bv.npz", **folded_arrays, **state)
    loaded = other_model("ViT").eval()
    report = load_weights(loaded, tmp_path / "bv.npz")
    assert report.ignored == ["opt (2 of training)", "step (1 of training)"]
    assert torch.equal(loaded(some_images()), model(some_images()))


def test_group_norm_scales_with_leading_axes_are_read(tmp_path):
    model = small_model("R+ViT")
    arrays = saved_arrays(model, tmp_path)
    # The published hybrids were written by a flax whose group norm had (1, 1, 1, C) parameters.
    old = {
        n: a.reshape(1, 1, 1, -1) if "/gn" in n or n[:2] == "gn" else a for n, a in arrays.items()
    }
    np.savez(tmp_path / "old.npz", **old)
    assert_equal_after_loading(model, other_model("R+ViT"), tmp_path / "old.npz")


def assert_equal_after_loading(source: nn.Module, target: nn.Module, path: Path) -> None:
    report = load_weights(target, path)
    assert sorted(report.loaded) == sorted(source.state_dict())
    assert report.resized == report.new == report.ignored == []
    for name, tensor in source.state_dict().items():
        assert tensor.dtype == target.state_dict()[name].dtype
        assert torch.equal(tensor, target.state_dict()[name]), name


# --- round trips ---------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("name", "layout"), [("a.npz", "jax"), ("a.safetensors", "timm")])
def test_others_may_read_what_is_written_as_the_umask_says(name, layout, tmp_path):
    before = os.umask(0o027)
    try:
        save_weights(small_model("ViT"), tmp_path / name, layout)
    finally:
        os.umask(before)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


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


def test_bfloat16_arrays_of_jax_are_read(tmp_path):
    model = small_model("ViT").bfloat16()
    arrays = saved_arrays(model, tmp_path)
    halves = {
        n: torch.from_numpy(a).bfloat16().view(torch.int16).numpy() for n, a in arrays.items()
    }
    np.savez(tmp_path / "half.npz", **{name: half.view("V2") for name, half in halves.items()})
    assert_equal_after_loading(model, other_model("ViT").bfloat16(), tmp_path / "half.npz")


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


# --- peers ---------------------------------------------------------------------------------------


def google_bit_arrays(state: dict[str, Tensor]) -> Arrays:
    """transformers' tensors of a BiT under big_transfer's names, as its `tf2th` reads them."""
    arrays: Arrays = {}
    for name, tensor in state.items():
        found = re.match(r"bit\.encoder\.stages\.(\d+)\.layers\.(\d+)\.(\w+?)(\d?)\.", name)
        place = "resnet"
        if found:
            part = "a/proj" if found[3] == "downsample" else "abc"[int(found[4]) - 1]
            place = f"resnet/block{int(found[1]) + 1}/unit{int(found[2]) + 1:02d}/{part}"
        if tensor.dim() == 4:
            leaf = {"bit.embedder.convolution.weight": "root_block/"}.get(name, "")
            arrays[f"{place}/{leaf}standardized_conv2d/kernel"] = tensor.permute(2, 3, 1, 0).numpy()
        elif name == "classifier.1.weight":
            arrays["resnet/head/conv2d/kernel"] = tensor.T[None, None].numpy()
        elif name == "classifier.1.bias":
            arrays["resnet/head/conv2d/bias"] = tensor.numpy()
        else:
            leaf = "gamma" if name.endswith("weight") else "beta"
            arrays[f"{place}/group_norm/{leaf}"] = tensor.numpy()
    return arrays


@pytest.mark.parametrize("layout", ["jax", "huggingface"])
def test_a_bit_resnet_equals_transformers_with_the_same_weights(layout, tmp_path):
    config = BitConfig(
        depths=[1, 2], hidden_sizes=[256, 512], embedding_size=64, num_labels=5,
        layer_type="preactivation",
    )  # fmt: skip
    torch.manual_seed(3)
    peer = BitForImageClassification(config).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.02))
    # Its kernels are standardised with 1e-8 beside the variance, BiT's with 1e-10.
    for module in peer.modules():
        if type(module).__name__.startswith("WeightStandardizedConv2d"):
            module.eps = 1e-10
    path = tmp_path / "model.npz"
    if layout == "jax":
        np.savez(path, **google_bit_arrays(peer.state_dict()))  # type: ignore[arg-type]
    else:
        path = tmp_path
        peer.save_pretrained(path)
    model = other_model("ResNet").eval()
    report = load_weights(model, path, new_head=False)
    assert (report.new, report.ignored) == ([], [])
    if layout == "jax":
        assert open_weights(str(path)).num_classes == 5
    images = some_images(2, (64, 48))
    with torch.no_grad():
        theirs = peer(images).logits
        assert relative_difference(model(images), theirs) < 1e-5


# timm's names, which our file has, and transformers' names of the same hybrid inside its DPT.
DPT_NAMES = {
    r"patch_embed\.backbone\.stem\.conv": "embeddings.backbone.bit.embedder.convolution",
    r"patch_embed\.backbone\.stem\.norm": "embeddings.backbone.bit.embedder.norm",
    r"patch_embed\.backbone\.stages\.(\d+)\.blocks": (
        r"embeddings.backbone.bit.encoder.stages.\1.layers"
    ),
    r"patch_embed\.proj": "embeddings.projection",
    r"cls_token": "embeddings.cls_token",
    r"pos_embed": "embeddings.position_embeddings",
    r"blocks\.(\d+)\.norm1": r"encoder.layer.\1.layernorm_before",
    r"blocks\.(\d+)\.norm2": r"encoder.layer.\1.layernorm_after",
    r"blocks\.(\d+)\.attn\.proj": r"encoder.layer.\1.attention.output.dense",
    r"blocks\.(\d+)\.mlp\.fc1": r"encoder.layer.\1.intermediate.dense",
    r"blocks\.(\d+)\.mlp\.fc2": r"encoder.layer.\1.output.dense",
    r"norm\.": "layernorm.",
}


def dpt_state(timm: dict[str, Tensor]) -> dict[str, Tensor]:
    """A hybrid's tensors of timm's names under those of transformers' DPT, the head left out."""
    state = {}
    for name, tensor in timm.items():
        if qkv := re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)", name):
            parts = zip(("query", "key", "value"), tensor.chunk(3), strict=True)
            for part, values in parts:
                state[f"encoder.layer.{qkv[1]}.attention.attention.{part}.{qkv[2]}"] = values
        elif not name.startswith("head"):
            found = [(old, new) for old, new in DPT_NAMES.items() if re.match(old, name)]
            assert len(found) == 1, name
            state[re.sub(*found[0], name, count=1)] = tensor
    return state


def dpt_hybrid(image_size: int) -> DPTModel:
    backbone = BitConfig(
        depths=[1, 2, 1], hidden_sizes=[256, 512, 1024], layer_type="bottleneck",
        global_padding="same", embedding_dynamic_padding=True,
        out_features=["stage1", "stage2", "stage3"],
    )  # fmt: skip
    config = DPTConfig(
        is_hybrid=True, backbone_config=backbone, image_size=image_size, patch_size=16,
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6,
        backbone_featmap_shape=[1, 1024, image_size // 16, image_size // 16],
        backbone_out_indices=[0, 1, 1, 1], neck_ignore_stages=[0, 1],
    )  # fmt: skip
    peer = DPTModel(config, add_pooling_layer=False).eval()
    for module in peer.modules():
        if isinstance(module, nn.GroupNorm):
            module.eps = 1e-6  # flax's; transformers writes torch's
    return peer


def test_a_hybrid_equals_transformers_with_the_same_weights(tmp_path):
    model = small_model("R+ViT", image_size=80, stages=(1, 2, 1)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 4:
                # Beside a deviation of 1, what either adds to it (1e-5 and 1e-8) is lost.
                parameter.div_(parameter.std((1, 2, 3), keepdim=True))
    save_weights(model, tmp_path / "hybrid.safetensors", "timm")
    saved = load_file(tmp_path / "hybrid.safetensors")
    peer = dpt_hybrid(80)
    peer.load_state_dict(dpt_state(saved))
    images = some_images(2, (80, 80))
    with torch.no_grad():
        hidden = peer(images).last_hidden_state[:, 0]
        theirs = hidden @ saved["head.weight"].T + saved["head.bias"]
        assert relative_difference(model(images), theirs) < 1e-4


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


def test_a_square_number_of_rows_may_hold_a_class_row(tmp_path):
    # 4 x 6 patches and a class token are 25 rows, as many as 5 x 5 patches.
    source, path = small_model("ViT", image_size=(32, 48)), tmp_path / "model.safetensors"
    save_weights(source, path, "timm")
    assert_equal_after_loading(source, other_model("ViT", image_size=(32, 48)), path)
    # As timm itself writes it, without the grid.
    save_file(load_file(path), path)
    assert_equal_after_loading(source, other_model("ViT", image_size=(32, 48)), path)
    model = other_model("ViT", image_size=32)
    load_weights(model, path, source_grid=(4, 6))
    assert torch.equal(model.positions[0].table[:, 0], source.positions[0].table[:, 0])


@pytest.mark.parametrize("new_head", [True, "auto"])
def test_a_norm_behind_timms_mean_is_not_taken_for_one_before_it(new_head, tmp_path):
    source, path = small_model("ViT", pool="gap"), tmp_path / "model.safetensors"
    save_weights(source, path, "timm")
    tensors = load_file(path)
    for leaf in ("weight", "bias"):
        tensors[f"fc_norm.{leaf}"] = tensors.pop(f"norm.{leaf}")
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"missing: norm.weight, norm.bias\n  unexpected: fc_norm"):
        load_weights(other_model("ViT", pool="gap"), path, new_head=False)
    model, fresh = other_model("ViT", pool="gap"), other_model("ViT", pool="gap").state_dict()
    report = load_weights(model, path, new_head=new_head)
    # A new norm and a new head, as MAE fine-tunes where the norm moves behind the mean.
    assert report.new == ["head.bias", "head.weight", "norm.bias", "norm.weight"]
    assert report.ignored == ["fc_norm.bias", "fc_norm.weight", "head.bias", "head.weight"]
    for name, tensor in model.state_dict().items():
        expected = fresh if name in report.new else source.state_dict()
        assert torch.equal(tensor, expected[name]), name


# --- another resolution, another head ------------------------------------------------------------


@pytest.mark.parametrize(
    ("old_size", "new_size"), [((32, 32), (48, 48)), ((32, 32), (24, 56)), ((32, 64), (48, 40))]
)
def test_positions_are_resized_as_scipys_zoom_does(old_size, new_size):
    source = small_model("ViT", image_size=old_size)
    model = other_model("ViT", image_size=new_size)
    report = fit_state_dict(model, source.state_dict(), origin=origin_of(source))
    old, new = source.grid, model.grid
    table = source.positions[0].table.detach()[0]
    grid = table[1:].reshape(*old, -1).numpy()
    zoomed = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    loaded = model.positions[0].table.detach()[0]
    torch.testing.assert_close(loaded[1:], torch.from_numpy(zoomed).flatten(0, 1))
    assert torch.equal(loaded[0], table[0])
    grids = "x".join(map(str, old)), "x".join(map(str, new))
    assert report.resized == ["positions.0.table {} to {}".format(*grids)]


@pytest.mark.parametrize("positions", ["learned_2d", "relative"])
def test_lines_of_positions_keep_their_ends_and_stay_linear(positions):
    source = small_model("ViT", positions=positions)
    model = other_model("ViT", image_size=48, positions=positions)
    report = fit_state_dict(model, source.state_dict())
    resized = [line.split()[0] for line in report.resized]
    state, fitted = source.state_dict(), model.state_dict()
    expected = {
        "learned_2d": ["positions.0.columns", "positions.0.rows"],
        "relative": [f"blocks.{index}.attention.relative.table" for index in (0, 1)],
    }
    assert sorted(resized) == expected[positions]
    for name in resized:
        zoom = fitted[name].shape[0] / state[name].shape[0]
        wanted = scipy.ndimage.zoom(state[name].numpy(), (zoom, 1), order=1)
        torch.testing.assert_close(fitted[name], torch.from_numpy(wanted), rtol=1e-4, atol=1e-5)


def test_positions_of_an_oblong_checkpoint_need_its_grid():
    source = small_model("ViT", image_size=(32, 56))
    model = other_model("ViT", image_size=48)
    with pytest.raises(
        ValueError, match=r"28 patches, which do not form a square; give source_grid"
    ):
        fit_state_dict(model, source.state_dict())
    with pytest.raises(ValueError, match="29 rows does not hold a grid of 3 x 3"):
        fit_state_dict(model, source.state_dict(), origin={"grid": (3, 3)})


def test_fine_tuning_drops_both_linear_layers_and_starts_from_zero():
    source = small_model("ViT", representation=True)
    model = other_model("ViT", num_classes=9)
    report = fit_state_dict(model, source.state_dict(), new_head=True)
    assert report.new == HEAD
    assert report.ignored == [*HEAD, "representation.bias", "representation.weight"]
    assert not model.head.weight.any()
    assert torch.equal(model.blocks[1].mlp.expand.weight, source.blocks[1].mlp.expand.weight)


HEAD = ["head.bias", "head.weight"]
TANH = {"representation": True}


@pytest.mark.parametrize(
    ("source_options", "options", "new"),
    [
        ({}, {}, []),
        ({}, {"num_classes": 9}, HEAD),
        (TANH, TANH, []),
        (TANH, {}, HEAD),
        ({}, TANH, [*HEAD, "representation.bias", "representation.weight"]),
        (TANH, {**TANH, "num_classes": 9}, HEAD),
    ],
)
def test_auto_keeps_a_head_only_where_it_fits_behind_the_same_layers(source_options, options, new):
    source = small_model("ViT", **source_options)
    assert fit_state_dict(other_model("ViT", **options), source.state_dict()).new == new


def test_a_demanded_head_comes_with_the_layer_it_was_trained_behind():
    source = small_model("ViT", representation=True).state_dict()
    with pytest.raises(ValueError, match=r"unexpected: representation.weight, representation.bias"):
        fit_state_dict(other_model("ViT"), source, new_head=False)
    source = small_model("ViT").state_dict()
    model = other_model("ViT", pool="gap")
    with pytest.raises(ValueError, match=r"unexpected: class_token.token"):
        fit_state_dict(model, source, new_head=False)
    report = fit_state_dict(model, source)
    # The head has learned to read the class token.
    assert report.ignored == ["class_token.token", "head.bias", "head.weight"]
    assert report.new == ["head.bias", "head.weight"]
    assert torch.equal(model.positions[0].table, source["positions.0.table"][:, 1:])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("model.npz", "jax"),
        ("model.safetensors", "timm"),
        ("model.safetensors", "vit_ray"),
        ("hub", "huggingface"),
    ],
)
def test_weights_of_other_heads_are_not_taken_for_the_models(name, layout, tmp_path):
    save_weights(small_model("ViT"), tmp_path / name, layout)
    other = "is of a model with num_heads=4, and this one has num_heads=8; build it with num_heads"
    with pytest.raises(ValueError, match=other):
        load_weights(small_model("ViT", num_heads=8), tmp_path / name)


def test_the_heads_of_a_folder_are_those_that_transformers_builds(tmp_path):
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        patch_size=8, image_size=32, num_labels=5,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ValueError, match="num_heads=2, and this one has num_heads=4"):
            load_weights(small_model("ViT"), path)
        load_weights(small_model("ViT", num_heads=2), path)


@pytest.mark.parametrize(
    ("lost", "new_head", "num_classes"), [("head.weight", "auto", 5), ("head.bias", False, 9)]
)
def test_half_a_head_is_an_error_unless_a_fresh_one_is_wanted(lost, new_head, num_classes):
    state = small_model("ViT").state_dict()
    del state[lost]
    model = other_model("ViT", num_classes=num_classes)
    with pytest.raises(ValueError, match=f"missing: {lost}"):
        fit_state_dict(model, state, new_head)
    assert fit_state_dict(model, state, new_head=True).new == ["head.bias", "head.weight"]


@pytest.mark.parametrize(("target", "is_whole"), [("mean_color", True), ("full_patch", False)])
def test_an_objective_starts_from_another_with_its_mask_and_its_prediction(target, is_whole):
    source = MaskedPatchObjective(small_model("ViT"))
    nn.init.normal_(source.prediction.weight)
    objective = MaskedPatchObjective(other_model("ViT"), target)
    report = fit_state_dict(objective, source.state_dict())
    assert torch.equal(
        objective.model.blocks[1].mlp.expand.bias, source.model.blocks[1].mlp.expand.bias
    )
    assert torch.equal(objective.mask.token, source.mask.token) == is_whole
    names = {"mask.token", "prediction.weight", "prediction.bias"}
    assert names <= set(report.loaded if is_whole else report.new)
    assert bool(names & set(report.ignored)) != is_whole


# --- wrong files ---------------------------------------------------------------------------------


def changed(**arrays: Any) -> Callable[[Path], None]:
    """Writes the model's file with these arrays; None takes one away."""

    def write(path: Path) -> None:
        save_weights(small_model("ViT"), path, "jax")
        both = {**np.load(path), **arrays}
        np.savez(path, **{name: array for name, array in both.items() if array is not None})

    return write


KEY_BIAS = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/key/bias"
READ: list[tuple[str, Callable[[Path], Any], str]] = [
    ("model.pth", lambda p: torch.save({"a": torch.zeros(1)}, p), "only .npz and .safetensors"),
    ("pickled.npz", lambda p: np.savez(p, a=np.array([object()], dtype=object)), "cannot be read"),
    ("empty.npz", lambda p: p.touch(), "empty.npz cannot be read"),
    ("none.npz", lambda p: None, "do not exist"),
    ("other.npz", lambda p: np.savez(p, banana=np.zeros(1)), "banana"),
    ("partial.npz", changed(**{KEY_BIAS: None}), "not fit this Vi.*\n.*missing: .*_1.*/key/bias"),
    ("without.npz", changed(cls=None), "missing: class_token.token"),
    ("more.npz", changed(extra=np.zeros(3)), "unexpected: extra"),
    (
        "wider.npz",
        changed(**{"embedding/bias": np.zeros(31)}),
        "of another shape: embedding.projection.bias is 31, the model has 32",
    ),
    ("deeper.npz", lambda p: save_weights(small_model("ViT", depth=3), p), "encoderblock_2"),
    (
        "shared.safetensors",
        lambda p: save_weights(small_model("ViT", positions_at="every_layer_shared"), p, "vit_ray"),
        "build it with positions_at=every_layer_shared",
    ),
    (
        "fixed.safetensors",
        lambda p: save_weights(small_model("ViT", positions="sincos_2d"), p, "vit_ray"),
        "positions=sincos_2d, and this one has positions=learned_1d",
    ),
]


@pytest.mark.parametrize(("name", "write", "named"), READ)
def test_a_file_that_is_not_the_models_is_refused_by_name(name, write, named, tmp_path):
    model = small_model("ViT")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write(tmp_path / name)
    with pytest.raises(ValueError, match=named):
        load_weights(model, tmp_path / name)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


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
    ],
)
def test_what_a_layout_cannot_express_is_not_saved_as_something_else(
    family, options, name, layout, named, tmp_path
):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=named):
        save_weights(small_model(family, **options), tmp_path / name, layout)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
