"""Losses, MixUp and CutMix against torch, scipy and their authors' formulas; frozen parts."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from tests.recipes import recipe_with
from vit_ray.config.training_sections import TrainConfig
from vit_ray.launch import run
from vit_ray.launch.resolved_run import check_batch, check_head_is_trained, check_model
from vit_ray.models import masked
from vit_ray.training.memory_estimate import largest_micro_batch
from vit_ray.training.objective import (
    Mixing,
    build_objective,
    draw_mixing,
    make_loss,
    mix_images,
    normalize,
    symmetric_beta,
)
from vit_ray.training.steps import micro_batch_size

SIZE = (12, 16)
MANY = torch.arange(40_000)


def test_pixels_become_minus_one_to_one_in_channels_first():
    images = torch.zeros(1, 2, 3, 3, dtype=torch.uint8)
    images[0, 1, 2] = torch.tensor([0, 51, 255], dtype=torch.uint8)
    result = normalize(images, torch.float32)
    assert result.shape == (1, 3, 2, 3)
    assert result[0, :, 1, 2].tolist() == pytest.approx([-1.0, -0.6, 1.0], abs=1e-6)


def passed(recipe: Any, samples: list[int], step: int, images: Any = None) -> tuple[Any, ...]:
    """What the loss gives to a model."""
    module = Mock(return_value=torch.zeros(len(samples), 5))
    if images is None:
        images = torch.zeros(len(samples), 4, 4, 3, dtype=torch.uint8)
    labels = torch.zeros(len(samples), 1, dtype=torch.int64)
    make_loss(recipe)(module, images, labels, torch.tensor(samples), step)
    given: tuple[Any, ...] = module.call_args.args
    return given


@pytest.mark.parametrize("rates", [{"dropout": 0.1}, {"stochastic_depth": 0.1, "dropout": 0.0}])
def test_what_is_dropped_is_a_function_of_seed_step_and_sample(rates):
    def keys(seed: int, step: int, samples: list[int]) -> list[int]:
        model = {"name": "ViT-Ti/16", **rates}
        recipe = recipe_with(seed=seed, model=model, train={"precision": "fp32"})
        return passed(recipe, samples, step)[1].tolist()

    whole = keys(1, 2, [7, 8, 9])
    assert keys(1, 2, [9]) + keys(1, 2, [8, 7]) == whole[::-1]
    drawn = [whole, keys(1, 3, [7, 8, 9]), keys(2, 2, [7, 8, 9])]
    assert len({key for one in drawn for key in one}) == 9
    masked_patches = recipe_with(train={"loss": "masked_patch", "precision": "fp32"})
    _, samples, step = passed(masked_patches, [7, 8], 12)
    assert (samples.tolist(), step) == ([7, 8], 12)


@pytest.mark.parametrize("mixing", [{}, {"mixup": 0.8}])
def test_pixels_are_scaled_and_mixed_before_they_are_rounded(mixing):
    images = torch.arange(256, dtype=torch.uint8).view(2, 16, 8, 1).repeat(1, 1, 1, 3)
    whole, rounded = (
        passed(recipe_with(train={"precision": precision, **mixing}), [0, 1], 3, images)[0]
        for precision in ("fp32", "bf16")
    )
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, whole.to(torch.bfloat16))


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


def drawn(samples: torch.Tensor, seed: int = 0, step: int = 0, **train: Any) -> Mixing:
    return draw_mixing(samples, SIZE, TrainConfig(**train), seed, step)


@pytest.mark.parametrize("alpha", [0.2, 0.8, 3.0])
def test_shares_are_beta_distributed(alpha):
    rng = np.random.default_rng(0)
    uniform = torch.from_numpy(rng.uniform(size=(3, 50_000)))
    found = symmetric_beta(torch.tensor(alpha).double(), *uniform).numpy()
    assert stats.kstest(found, stats.beta(alpha, alpha).cdf).pvalue > 1e-3
    own = drawn(MANY, mixup=0.4).own_share  # one for each pair
    assert torch.equal(own[::2], own[1::2])
    assert stats.kstest(own[::2].double().numpy(), stats.beta(0.4, 0.4).cdf).pvalue > 1e-3


def test_half_of_the_pairs_have_each_where_both_are_on():
    weight = drawn(MANY[:8000], mixup=0.8, cutmix=1.0).weight
    is_flat = int((weight.flatten(1).std(1) == 0).sum())  # whole boxes and none are a few more
    both = stats.binomtest(is_flat, 4000, 0.5 + 0.5 * _trivial_boxes())
    assert both.pvalue > 1e-3


def _trivial_boxes() -> float:
    """Share of CutMix's pairs that exchange nothing, with alpha 1: sides below two pixels."""
    weight = drawn(MANY, cutmix=1.0, seed=9).weight
    return float((weight.flatten(1).std(1) == 0).double().mean())


def test_a_box_is_that_of_the_authors_code():
    """Each is some box of the published `rand_bbox`, and its share is what is left."""
    weight, own = drawn(MANY[:2000], cutmix=1.0)
    for kept, share in zip(weight.numpy(), own[::2].tolist(), strict=True):
        rows, columns = np.nonzero(kept == 0)
        assert share == pytest.approx(1 - len(rows) / kept.size)
        if len(rows):
            box = kept[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            assert not box.any()
    # Sides grow as the root of the area, and centres are uniform: of many boxes the mean share is
    # that of the published function.
    assert float(own.double().mean()) == pytest.approx(_published_mean_share(), abs=0.01)


def _published_mean_share() -> float:
    """`rand_bbox` of github.com/clovaai/CutMix-PyTorch."""
    rng = np.random.default_rng(1)
    height, width = SIZE
    shares = []
    for _ in range(20_000):
        cut = np.sqrt(1.0 - rng.uniform())
        cut_h, cut_w = int(height * cut), int(width * cut)
        cy, cx = rng.integers(height), rng.integers(width)
        y1, y2 = np.clip([cy - cut_h // 2, cy + cut_h // 2], 0, height)
        x1, x2 = np.clip([cx - cut_w // 2, cx + cut_w // 2], 0, width)
        shares.append(1 - (y2 - y1) * (x2 - x1) / (height * width))
    return float(np.mean(shares))


def test_images_and_labels_are_mixed_alike():
    images = torch.randint(0, 256, (8, *SIZE, 3), dtype=torch.uint8)
    mixing = drawn(torch.arange(8), mixup=0.8, cutmix=1.0)
    found = mix_images(normalize(images, torch.float32), mixing.weight).numpy()
    pixels = images.numpy().astype(np.float64) / 127.5 - 1
    for i in range(8):
        weight = mixing.weight[i // 2].numpy()[..., None]
        expected = weight * pixels[i] + (1 - weight) * pixels[i ^ 1]
        assert np.abs(found[i] - expected.transpose(2, 0, 1)).max() < 1e-5
        assert float(mixing.own_share[i]) == pytest.approx(weight.mean(), abs=1e-6)


@pytest.mark.parametrize("mixup", [0.0, 0.8])
@pytest.mark.parametrize(
    ("loss", "smoothing"), [("softmax", 0.0), ("softmax", 0.1), ("sigmoid", 0.0)]
)
def test_the_loss_is_that_of_smoothed_and_mixed_targets(loss, smoothing, mixup):
    """Against torch's cross-entropies with the probabilities themselves, and their gradients.

    With softmax several labels share the probability, and an image without a label costs nothing.
    """
    torch.manual_seed(0)
    train = {"loss": loss, "label_smoothing": smoothing, "mixup": mixup, "precision": "fp32"}
    recipe = recipe_with(seed=4, train=train)
    images = torch.randint(0, 256, (6, 8, 8, 3), dtype=torch.uint8)
    classes = [[0, -1], [1, 2], [2, -1], [3, 1], [4, -1], [-1, -1]]
    samples = torch.tensor([5, 3, 8, 1, 0, 9])
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5))
    targets = torch.zeros(6, 5)
    for image, labels in enumerate(classes):
        known = [label for label in labels if label >= 0]
        targets[image, known] = 1 / len(known) if loss == "softmax" and known else 1.0
        if loss == "softmax" and known:
            targets[image] = targets[image] * (1 - smoothing) + smoothing / 5
    pixels = normalize(images, torch.float32)
    if mixup:
        mixing = draw_mixing(samples, (8, 8), recipe.train, 4, 7)
        pixels, share = mix_images(pixels, mixing.weight), mixing.own_share[:, None]
        targets = share * targets + (1 - share) * targets[[1, 0, 3, 2, 5, 4]]
    logits = module(pixels)
    expected = F.cross_entropy(logits, targets, reduction="none")
    if loss == "sigmoid":
        expected = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    found = make_loss(recipe)(module, images, torch.tensor(classes), samples, 7)
    torch.testing.assert_close(found, expected.mean())
    weights = list(module.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(found, weights),
        torch.autograd.grad(expected.mean(), weights),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_pair_is_mixed_alike_in_any_pass_and_anew_in_each_step_and_seed():
    samples = torch.tensor([11, 4, 7, 90, 3, 2])
    whole = drawn(samples, mixup=0.8)
    assert torch.equal(drawn(samples[2:4], mixup=0.8).own_share, whole.own_share[2:4])
    for other in (drawn(samples, step=1, mixup=0.8), drawn(samples, seed=1, mixup=0.8)):
        assert not torch.isclose(other.own_share, whole.own_share).any()


def mixed_recipe(batch: int, workers: Any = 1, **train: Any) -> Any:
    return recipe_with(
        train={"mixup": 0.8, "global_batch_size": batch, **train}, workers={"num_workers": workers}
    )


def test_passes_have_whole_pairs():
    cases = ((24, 1, 9, 8), (30, 1, 9, 6), (28, 2, 13, 2), (28, 2, 1, 2))
    for batch, world, limit, images in cases:
        assert micro_batch_size(mixed_recipe(batch), world, limit) == images
    assert mixed_recipe(24, (1, 8)).group_sizes == [1, 2, 3, 4, 6]
    small = mixed_recipe(30).with_changes(model={"name": "ViT-Ti/16"})
    assert largest_micro_batch(small, 5, 1, 80) == 30


@pytest.mark.parametrize(
    ("batch", "train", "word"),
    [
        (7, {}, r"global_batch_size is 8$"),
        (12, {"micro_batch_size": 3}, "such as 4"),
        (8, {"loss": "masked_patch"}, "masked_patch"),
        (8, {"mixup": -0.1}, r"train\.mixup"),
    ],
)
def test_an_odd_share_or_pass_is_refused(batch, train, word):
    with pytest.raises(ValueError, match=word):
        check_batch(mixed_recipe(batch, **train), 100)
    with pytest.raises(ValueError, match=r"train\.mixup.* is 8$"):
        check_batch(mixed_recipe(6, 2), 100)


FIXED = ["embedding", "class_token", "positions", "blocks", "norm"]


def tuning_recipe(frozen: list[str], **model: Any) -> Any:
    optim = {"steps": 3, "frozen": frozen}
    return recipe_with(model=model or {"name": "ViT-Ti/16"}, optim=optim)


@pytest.mark.parametrize(
    ("frozen", "model", "word"),
    [
        (["stem"], {}, r"optim\.frozen: 'stem'.*embedding, class_token, pos"),
        (["blocks.9-12"], {}, r"'blocks.9-12'.*blocks\.0-11, norm, head"),
        (["blocks.5-4"], {}, "'blocks.5-4'"),
        (["head.0-1"], {}, "'head.0-1'"),
        (["class_token"], {"name": "ViT-B/16", "pool": "gap"}, "'class_token'"),
        (["blocks"], {"name": "R50x1"}, r"root, units\.0-15, norm, head"),
        ([*FIXED, "head"], {}, "nothing would be trained"),
    ],
)
def test_wrong_parts_are_refused_before_anything_is_opened(frozen, model, word):
    with pytest.raises(ValueError, match=word):
        check_model(tuning_recipe(frozen, **model))


@pytest.mark.parametrize(
    ("kind", "init_from"), [("finetune", "runs/a"), ("sweep_trial", "runs/a"), ("pretrain", None)]
)
def test_a_new_head_that_is_frozen_is_refused(kind, init_from):
    chosen = tuning_recipe(["norm", "head"]).with_changes(init_from=init_from)
    with pytest.raises(ValueError, match="remove head"):
        check_head_is_trained(chosen, kind)
    check_head_is_trained(chosen.with_changes(optim={"frozen": ("norm",)}), kind)
    # The objective has a head of its own, which is not a part of the model.
    check_head_is_trained(chosen.with_changes(train={"loss": "masked_patch"}), kind)
    check_head_is_trained(chosen.with_changes(init_from="runs/a"), "pretrain")


def test_it_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(run, "resolve_run", lambda recipe: None)
    refused = run.prepared_training(tuning_recipe(["norm", "head"]), "pretrain")
    with pytest.raises(ValueError, match="remove head"), refused:
        pass
