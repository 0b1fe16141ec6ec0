"""Losses against torch's own, and the pixels' range."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import log_softmax

from tests.recipes import recipe_with
from vit_ray.config.training_sections import TrainConfig
from vit_ray.models import masked
from vit_ray.training.objective import (
    build_objective,
    classification_loss,
    make_loss,
    multi_hot,
    normalize,
)


def test_pixels_become_minus_one_to_one_in_channels_first():
    images = torch.zeros(1, 2, 3, 3, dtype=torch.uint8)
    images[0, 1, 2] = torch.tensor([0, 51, 255], dtype=torch.uint8)
    result = normalize(images, torch.float32)
    assert result.shape == (1, 3, 2, 3)
    assert result[0, :, 1, 2].tolist() == pytest.approx([-1.0, -0.6, 1.0], abs=1e-6)


def test_softmax_is_cross_entropy_of_which_several_labels_share_the_probability():
    logits, labels = torch.randn(6, 5), torch.tensor([[0], [1], [2], [3], [4], [0]])
    config = TrainConfig(loss="softmax", label_smoothing=0.1)
    targets = 0.9 * np.eye(5)[labels[:, 0]] + 0.1 / 5
    expected = -(targets * log_softmax(logits.numpy(), axis=1)).sum(1)
    losses = classification_loss(logits, labels, config)
    assert losses.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    logits, labels = torch.randn(1, 4), torch.tensor([[1, 3, -1]])
    halves = torch.tensor([[0.0, 0.5, 0.0, 0.5]])
    expected = -(halves * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(classification_loss(logits, labels, TrainConfig()), expected)


def test_sigmoid_sums_binary_cross_entropies_over_classes():
    logits, labels = torch.randn(3, 4), torch.tensor([[1, -1], [0, 2], [-1, -1]])
    targets = torch.tensor([[0.0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    assert torch.equal(multi_hot(labels, 4), targets)
    expected = sum(
        F.binary_cross_entropy(logits[:, k].sigmoid(), targets[:, k], reduction="none")
        for k in range(4)
    )
    loss = classification_loss(logits, labels, TrainConfig(loss="sigmoid"))
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("labels", "smoothing"), [([[-1], [1]], 0.0), ([[-1], [1]], 0.1), ([[-1, -1], [1, 2]], 0.1)]
)
def test_an_image_without_a_label_costs_nothing_with_softmax(labels, smoothing):
    logits = torch.randn(2, 3, requires_grad=True)
    config = TrainConfig(label_smoothing=smoothing)
    loss = classification_loss(logits, torch.tensor(labels), config)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert loss[0] == 0
    assert not logits.grad[0].any()
    assert loss[1] > 0


@pytest.mark.parametrize("rates", [{"dropout": 0.1}, {"stochastic_depth": 0.1, "dropout": 0.0}])
def test_what_is_dropped_is_a_function_of_seed_step_and_sample(rates):
    def keys(seed: int, step: int, samples: list[int]) -> list[int]:
        given: list[torch.Tensor] = []

        def module(images: torch.Tensor, *its_keys: torch.Tensor) -> torch.Tensor:
            given.extend(its_keys)
            return torch.zeros(len(images), 5)

        model = {"name": "ViT-Ti/16", **rates}
        loss = make_loss(recipe_with(seed=seed, model=model, train={"precision": "fp32"}))
        images = torch.zeros(len(samples), 4, 4, 3, dtype=torch.uint8)
        labels = torch.zeros(len(samples), 1, dtype=torch.int64)
        loss(module, images, labels, torch.tensor(samples), step)  # type: ignore[arg-type]
        return given[0].tolist()

    whole = keys(1, 2, [7, 8, 9])
    assert keys(1, 2, [9]) + keys(1, 2, [8, 7]) == whole[::-1]
    drawn = [whole, keys(1, 3, [7, 8, 9]), keys(2, 2, [7, 8, 9])]
    assert len({key for one in drawn for key in one}) == 9


@pytest.mark.parametrize(("precision", "target"), [("fp32", "mean_color"), ("bf16", "full_patch")])
def test_what_is_predicted_of_masked_patches_is_not_rounded(monkeypatch, precision, target):
    """A mean of 223 is of colour 6 of 8, and bf16's 0.75, to which it rounds, of the last one."""
    given: list[torch.Tensor] = []

    def keep(_: str, predictions: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        given.append(pixels)
        return predictions.float().mean()

    monkeypatch.setattr(masked, "_loss", keep)
    recipe = recipe_with(
        "x",
        model={"name": "ViT-Ti/16", "image_size": 32},
        train={"loss": "masked_patch", "masked_target": target, "precision": precision},
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    module = build_objective(recipe, 10).to(dtype)
    images = torch.full((2, 32, 32, 3), 223, dtype=torch.uint8)
    samples, labels = torch.arange(2), torch.zeros(2, 1)
    make_loss(recipe)(module, images, labels, samples, 0).backward()
    (pixels,) = given
    torch.testing.assert_close(pixels, torch.full_like(pixels, 191 / 255), rtol=0, atol=1e-6)
    assert set(masked.color_class(pixels.mean(dim=(-2, -1))).flatten().tolist()) == {6 * 73}


def test_masked_patches_differ_from_step_to_step():
    steps: list[int] = []

    def module(images: torch.Tensor, samples: torch.Tensor, step: int) -> torch.Tensor:
        steps.append(step)
        return torch.zeros(())

    loss = make_loss(recipe_with("x", train={"loss": "masked_patch", "precision": "fp32"}))
    images = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    for step in (0, 12, 13):
        loss(module, images, torch.zeros(2, 1), torch.arange(2), step)  # type: ignore[arg-type]
    assert steps == [0, 12, 13]


@pytest.mark.parametrize("mixing", [{}, {"mixup": 0.8}])
def test_pixels_are_scaled_and_mixed_before_they_are_rounded(mixing):
    given: list[torch.Tensor] = []

    def module(images: torch.Tensor) -> torch.Tensor:
        given.append(images)
        return torch.zeros(len(images), 5)

    images = torch.arange(256, dtype=torch.uint8).view(2, 16, 8, 1).repeat(1, 1, 1, 3)
    labels = torch.zeros(2, 1, dtype=torch.int64)
    for precision in ("fp32", "bf16"):
        loss = make_loss(recipe_with("x", train={"precision": precision, **mixing}))
        loss(module, images, labels, torch.arange(2), 3)  # type: ignore[arg-type]
    whole, rounded = given
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, whole.to(torch.bfloat16))
