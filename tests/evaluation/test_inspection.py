"""The four figures of inspection: arrays against hand-made and independent ones, and files."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTForImageClassification

from tests.models.small import attention_weights, small_model
from tests.parts import ConvNet
from vit_ray.evaluation.inspection import (
    attention_figures,
    filter_components,
    first_kernel,
    inspect_model,
    position_similarity,
    position_vectors,
)
from vit_ray.models.weights import save_weights


def pictures(count: int = 3, size: tuple[int, int] = (32, 32)) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, *size, 3), dtype=np.uint8)


def test_filter_components_are_ordered_pictures_and_explain_all_together():
    rng = np.random.default_rng(0)
    strong, weak = rng.normal(size=(2, 3, 4, 4))
    weights = rng.normal(size=(2, 40, 1, 1, 1))
    kernel = (5 * weights[0] * strong + weights[1] * weak).astype(np.float32)
    components, variance = filter_components(kernel, count=2)
    assert variance.sum() == pytest.approx(1, abs=1e-5)
    assert variance[0] > 0.8
    likeness = np.corrcoef(components[0].flatten(), strong.transpose(1, 2, 0).flatten())[0, 1]
    assert abs(likeness) > 0.9  # a component has no sign
    assert (components.min(), components.max()) == (0, 1)
    # So many that scikit-learn would choose a solver that draws random numbers.
    many = rng.normal(size=(600, 3, 8, 8)).astype(np.float32)
    first, second = filter_components(many), filter_components(many)
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])
    assert (filter_components(np.ones_like(many[:4]))[1] == 0).all()


def test_the_first_kernel_is_the_one_that_sees_the_pixels():
    assert first_kernel(small_model("ViT")).shape == (32, 3, 8, 8)
    for family in ("R+ViT", "ResNet", "AxialResNet"):
        assert first_kernel(small_model(family)).shape == (64, 3, 7, 7)


def test_a_model_of_ones_own_has_the_figures_that_it_can_have(tmp_path):
    found = inspect_model(ConvNet(3, (32, 32)), pictures(), tmp_path)
    assert isinstance(found["filters"], Path)
    without = inspect_model(torch.nn.Linear(2, 2), pictures(), tmp_path)
    assert without["filters"] == "the model has no convolution of the pixels"
    for figures in (found, without):
        assert "has no attention over the whole image" in str(figures["attention_rollout"])


@pytest.mark.parametrize("positions", ["learned_1d", "learned_2d"])
def test_position_vectors_are_what_patches_get_without_the_class_tokens(positions):
    model = small_model("ViT", image_size=(16, 40), positions=positions)
    vectors = position_vectors(model)
    assert vectors.shape == (2, 5, 32)
    state = model.state_dict()
    if positions == "learned_1d":
        expected = state["positions.0.table"][0, 1 + 5 + 3]
    else:
        expected = torch.cat([state["positions.0.columns"][3], state["positions.0.rows"][1]])
    np.testing.assert_allclose(vectors[1, 3], expected.numpy(), rtol=1e-6)
    assert position_vectors(small_model("ViT", positions="none")) is None


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_distances_and_rollouts_are_those_of_transformers_attention(pool, tmp_path):
    model = small_model("ViT", dropout=0.5, pool=pool).train()
    images = pictures(7)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    if pool == "cls":
        save_weights(model, tmp_path, "huggingface")
        peer = ViTForImageClassification.from_pretrained(tmp_path, attn_implementation="eager")
        with torch.no_grad():
            layers = [a.numpy() for a in peer.eval()(pixels, output_attentions=True).attentions]
    else:
        layers = [weights.numpy() for weights in attention_weights(model.eval(), pixels)]
        model.train()
    places = [(row, column) for row in range(4) for column in range(4)]
    apart = np.array([[8 * math.dist(a, b) for b in places] for a in places])
    expected, paths = np.zeros((2, 4)), []
    for index, layer in enumerate(layers):
        paths.append((layer.mean(axis=1) + np.eye(layer.shape[-1])) / 2)
        for head in range(4):
            patches = layer[:, head, -16:, -16:]
            rows = patches / patches.sum(axis=-1, keepdims=True)
            expected[index, head] = (rows * apart).sum(axis=-1).mean()
    reaching = (paths[1] @ paths[0])[:, :, -16:]
    row = reaching[:, 0] if pool == "cls" else reaching.mean(axis=1)
    distances, rollouts = attention_figures(model, images)
    assert model.training
    np.testing.assert_allclose(distances, expected, rtol=1e-5)
    np.testing.assert_allclose(rollouts, row.reshape(7, 4, 4), rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "missing"),
    [
        ("ViT", {}, set()),
        ("ViT in bf16", {}, set()),
        ("ViT", {"positions": "relative"}, {"position_similarity"}),
        ("Axial-ViT", {}, {"attention_distance", "attention_rollout"}),
        ("ResNet", {}, {"position_similarity", "attention_distance", "attention_rollout"}),
    ],
)
def test_every_figure_that_a_model_has_is_drawn(family, options, missing, tmp_path):
    family, _, precision = family.partition(" in ")
    model = small_model(family, **options).to(torch.bfloat16 if precision else torch.float32)
    results = inspect_model(model, pictures(), tmp_path)
    names = "filters", "position_similarity", "attention_distance", "attention_rollout"
    assert tuple(results) == names
    for name, result in results.items():
        assert isinstance(result, str) == (name in missing)
        if isinstance(result, Path):
            with Image.open(result) as drawn:
                saturation = np.asarray(drawn.convert("HSV"))[..., 1]
            # Colour that is neither paper nor ink: tiles and pictures fill pages, dots do not.
            least = 0.0005 if name == "attention_distance" else 0.2
            assert (saturation > 60).mean() > least


def test_tiles_of_cosines_stand_where_their_patches_do():
    vectors = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    tiles = position_similarity(vectors)
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    assert tiles.shape == (2 + 1 + 2, 3 + 1 + 3 + 1 + 3)
    for row, column in np.ndindex(2, 3):
        tile = tiles[3 * row : 3 * row + 2, 4 * column : 4 * column + 3]
        np.testing.assert_allclose(tile, units @ units[row, column], rtol=1e-4, atol=1e-6)
    assert np.isnan(tiles[2]).all()
    assert np.isnan(tiles[:, [3, 7]]).all()
