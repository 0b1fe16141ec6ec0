"""Losses against torch's own, and the pixels' range."""

import pytest
import torch
import torch.nn.functional as F

from vit_ray.config.schema import recipe_from_dict
from vit_ray.config.training_sections import TrainConfig
from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.models.vit import VisionTransformer
from vit_ray.train.objective import (
    build_objective,
    classification_loss,
    make_loss,
    multi_hot,
    normalize,
)


def test_pixels_become_minus_one_to_one_in_channels_first() -> None:
    images = torch.zeros(1, 2, 3, 3, dtype=torch.uint8)
    images[0, 1, 2] = torch.tensor([0, 51, 255], dtype=torch.uint8)
    result = normalize(images, torch.float32)
    assert result.shape == (1, 3, 2, 3)
    assert result[0, :, 1, 2].tolist() == pytest.approx([-1.0, -0.6, 1.0], abs=1e-6)


def test_softmax_of_single_labels_is_cross_entropy() -> None:
    logits, labels = torch.randn(6, 5), torch.tensor([[0], [1], [2], [3], [4], [0]])
    config = TrainConfig(loss="softmax", label_smoothing=0.1)
    expected = F.cross_entropy(logits, labels[:, 0], reduction="none", label_smoothing=0.1)
    assert torch.equal(classification_loss(logits, labels, config), expected)


def test_softmax_of_several_labels_shares_the_probability() -> None:
    logits, labels = torch.randn(1, 4), torch.tensor([[1, 3, -1]])
    halves = torch.tensor([[0.0, 0.5, 0.0, 0.5]])
    expected = -(halves * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(classification_loss(logits, labels, TrainConfig()), expected)


def test_sigmoid_sums_binary_cross_entropies_over_classes() -> None:
    logits, labels = torch.randn(3, 4), torch.tensor([[1, -1], [0, 2], [-1, -1]])
    targets = torch.tensor([[0.0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    assert torch.equal(multi_hot(labels, 4), targets)
    expected = sum(
        F.binary_cross_entropy(logits[:, k].sigmoid(), targets[:, k], reduction="none")
        for k in range(4)
    )
    loss = classification_loss(logits, labels, TrainConfig(loss="sigmoid"))
    torch.testing.assert_close(loss, expected)


def test_an_image_without_a_label_costs_nothing_with_softmax() -> None:
    loss = classification_loss(torch.randn(2, 3), torch.tensor([[-1], [1]]), TrainConfig())
    assert loss[0] == 0
    assert loss[1] > 0


@pytest.mark.parametrize("rates", [{"dropout": 0.1}, {"stochastic_depth": 0.1, "dropout": 0.0}])
def test_what_is_dropped_is_a_function_of_seed_step_and_sample(rates: dict[str, float]) -> None:
    def keys(seed: int, step: int, samples: list[int]) -> list[int]:
        given: list[torch.Tensor] = []

        def module(images: torch.Tensor, *its_keys: torch.Tensor) -> torch.Tensor:
            given.extend(its_keys)
            return torch.zeros(len(images), 5)

        tree = {
            "name": "x",
            "seed": seed,
            "model": {"name": "ViT-Ti/16", **rates},
            "train": {"precision": "fp32"},
        }
        loss = make_loss(recipe_from_dict(tree, "test"), num_images=100)
        images = torch.zeros(len(samples), 4, 4, 3, dtype=torch.uint8)
        labels = torch.zeros(len(samples), 1, dtype=torch.int64)
        loss(module, images, labels, torch.tensor(samples), step)  # type: ignore[arg-type]
        return given[0].tolist()

    whole = keys(1, 2, [7, 8, 9])
    assert keys(1, 2, [9]) + keys(1, 2, [8, 7]) == whole[::-1]
    drawn = [whole, keys(1, 3, [7, 8, 9]), keys(2, 2, [7, 8, 9])]
    assert len({key for one in drawn for key in one}) == 9


def test_masked_patches_differ_from_epoch_to_epoch_by_the_step() -> None:
    """100 images in steps of 8: steps 0 to 12 begin in the first epoch, step 13 in the second."""
    epochs: list[int] = []

    def module(images: torch.Tensor, samples: torch.Tensor, epoch: int) -> torch.Tensor:
        epochs.append(epoch)
        return torch.zeros(())

    train = {"loss": "masked_patch", "global_batch_size": 8, "precision": "fp32"}
    loss = make_loss(recipe_from_dict({"name": "x", "train": train}, "test"), num_images=100)
    images = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    for step in (0, 12, 13, 25):
        loss(module, images, torch.zeros(2, 1), torch.arange(2), step)  # type: ignore[arg-type]
    assert epochs == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("loss", "kind"), [("softmax", VisionTransformer), ("masked_patch", MaskedPatchObjective)]
)
def test_the_model_is_built_with_its_objective(loss: str, kind: type) -> None:
    tree = {"name": "x", "train": {"loss": loss}, "model": {"name": "ViT-Ti/16", "image_size": 32}}
    assert type(build_objective(recipe_from_dict(tree, "test"), 10)) is kind
