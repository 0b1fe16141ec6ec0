"""A state dict or a file in a model of another resolution, head or objective."""

from pathlib import Path

import pytest
import scipy.ndimage
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.small import other_model, small_model
from vit_ray.models.fitting import fit_state_dict, origin_of
from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.models.weights import load_weights, save_weights

HEAD = ["head.bias", "head.weight"]
LAYER = ["representation.bias", "representation.weight"]
TANH = {"representation": True}


@pytest.mark.parametrize(("old_size", "new_size"), [((32, 32), (24, 56)), ((32, 64), (48, 40))])
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
    changed = f"{old[0]}x{old[1]} to {new[0]}x{new[1]}"
    assert report.resized == [f"positions.0.table {changed}"]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("learned_2d", ["positions.0.columns", "positions.0.rows"]),
        ("relative", [f"blocks.{index}.attention.relative.table" for index in (0, 1)]),
    ],
)
def test_lines_of_positions_keep_their_ends_and_stay_linear(positions, expected):
    source = small_model("ViT", positions=positions)
    model = other_model("ViT", image_size=48, positions=positions)
    report = fit_state_dict(model, source.state_dict())
    assert sorted(line.split()[0] for line in report.resized) == expected
    state, fitted = source.state_dict(), model.state_dict()
    for name in expected:
        zoom = fitted[name].shape[0] / state[name].shape[0]
        wanted = scipy.ndimage.zoom(state[name].numpy(), (zoom, 1), order=1)
        torch.testing.assert_close(fitted[name], torch.from_numpy(wanted), rtol=1e-4, atol=1e-5)


def without_metadata(path: Path) -> None:
    """As timm itself writes it, without the grid."""
    save_file(load_file(path), path)


@pytest.mark.parametrize("layout", ["jax", "timm"])
def test_published_positions_are_of_a_square_image(tmp_path, layout):
    """16 patches are 4 x 4, also for a model that has 2 x 8."""
    path = tmp_path / ("file.npz" if layout == "jax" else "file.safetensors")
    save_weights(small_model("ViT"), path, layout)
    if layout == "timm":
        without_metadata(path)
    model = other_model("ViT", image_size=(16, 64))
    assert load_weights(model, path).resized == ["positions.0.table 4x4 to 2x8"]
    assert not torch.equal(small_model("ViT").positions[0].table, model.positions[0].table)
    assert load_weights(other_model("ViT"), path).resized == []


def test_a_square_number_of_rows_may_hold_a_class_row(tmp_path):
    # 4 x 6 patches and a class token are 25 rows, as many as 5 x 5 patches.
    source, path = small_model("ViT", image_size=(32, 48)), tmp_path / "model.safetensors"
    save_weights(source, path, "timm")
    for _ in range(2):
        model = other_model("ViT", image_size=(32, 48))
        assert load_weights(model, path).resized == []
        assert torch.equal(model.positions[0].table, source.positions[0].table)
        without_metadata(path)


def test_a_config_with_an_oblong_image_is_believed(tmp_path):
    save_weights(other_model("ViT", image_size=(16, 64)), tmp_path, "huggingface")
    without_metadata(tmp_path / "model.safetensors")
    assert load_weights(other_model("ViT", image_size=(16, 64)), tmp_path).resized == []


def test_positions_of_an_oblong_checkpoint_need_its_grid():
    source = small_model("ViT", image_size=(32, 56)).state_dict()
    model = other_model("ViT", image_size=48)
    with pytest.raises(ValueError, match=r"28 patches.*safetensors"):
        fit_state_dict(model, source)
    with pytest.raises(ValueError, match=r"29 rows.* 3 x 3"):
        fit_state_dict(model, source, origin={"grid": (3, 3)})


def test_fine_tuning_drops_both_linear_layers_and_starts_from_zero():
    source = small_model("ViT", representation=True)
    model = other_model("ViT", num_classes=9)
    report = fit_state_dict(model, source.state_dict(), new_head=True)
    assert report.new == HEAD
    assert report.ignored == [*HEAD, *LAYER]
    assert not model.head.weight.any()
    assert torch.equal(model.blocks[1].mlp.expand.weight, source.blocks[1].mlp.expand.weight)


@pytest.mark.parametrize(
    ("source_options", "options", "new"),
    [
        ({}, {}, []),
        ({}, {"num_classes": 9}, HEAD),
        (TANH, TANH, []),
        (TANH, {}, HEAD),
        ({}, TANH, [*HEAD, *LAYER]),
        (TANH, {**TANH, "num_classes": 9}, HEAD),
    ],
)
def test_auto_keeps_a_head_only_where_it_fits_behind_the_same_layers(source_options, options, new):
    source = small_model("ViT", **source_options)
    assert fit_state_dict(other_model("ViT", **options), source.state_dict()).new == new


def test_a_head_that_has_learned_to_read_the_class_token_is_not_kept_without_it():
    source, model = small_model("ViT").state_dict(), other_model("ViT", pool="gap")
    report = fit_state_dict(model, source)
    assert report.ignored == ["class_token.token", *HEAD]
    assert report.new == HEAD
    assert torch.equal(model.positions[0].table, source["positions.0.table"][:, 1:])


@pytest.mark.parametrize(
    ("lost", "source_options", "options", "new_head", "named"),
    [
        ("", TANH, {}, False, "unexpected: representation.weight, representation.bias"),
        ("", {}, {"pool": "gap"}, False, "unexpected: class_token.token"),
        ("head.weight", {}, {}, "auto", "missing: head.weight"),
        ("head.bias", {}, {"num_classes": 9}, False, "missing: head.bias"),
    ],
)
def test_a_head_without_the_layers_before_it_and_half_a_head_are_refused(
    lost, source_options, options, new_head, named
):
    state = small_model("ViT", **source_options).state_dict()
    state.pop(lost, None)
    model = other_model("ViT", **options)
    with pytest.raises(ValueError, match=named):
        fit_state_dict(model, state, new_head)
    assert fit_state_dict(model, state, new_head=True).new == HEAD


def test_a_norm_behind_timms_mean_is_not_taken_for_one_before_it(tmp_path):
    source, path = small_model("ViT", pool="gap"), tmp_path / "model.safetensors"
    save_weights(source, path, "timm")
    tensors = load_file(path)
    behind = {f"fc_norm.{leaf}": tensors.pop(f"norm.{leaf}") for leaf in ("weight", "bias")}
    save_file(tensors | behind, path)
    model, fresh = other_model("ViT", pool="gap"), other_model("ViT", pool="gap").state_dict()
    with pytest.raises(ValueError, match=r"missing: norm.weight, norm.bias\n  unexpected: fc_norm"):
        load_weights(model, path, new_head=False)
    report = load_weights(model, path)
    # A new norm and a new head, as MAE fine-tunes where the norm moves behind the mean.
    assert report.new == [*HEAD, "norm.bias", "norm.weight"]
    assert report.ignored == ["fc_norm.bias", "fc_norm.weight", *HEAD]
    for name, tensor in model.state_dict().items():
        expected = fresh if name in report.new else source.state_dict()
        assert torch.equal(tensor, expected[name]), name
    save_file({**tensors, **behind, "norm.weight": torch.ones(16)}, path)
    with pytest.raises(ValueError, match=r"missing: norm\.bias"):
        load_weights(model, path, new_head=True)


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
