"""Masked patch prediction: the split, its reproducibility, the targets, the loss."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from tests.models.small import small_model, some_images
from vit_ray.models.masked import MaskedPatchObjective, color_class, draw_corruption

SAMPLES = torch.arange(4000)


def test_half_of_the_patches_are_corrupted_in_every_image():
    corruption = draw_corruption(SAMPLES, num_patches=49, seed=1)
    assert corruption.corrupted.shape == (4000, 24)
    assert all(len(set(row)) == 24 for row in corruption.corrupted[:50].tolist())
    touched = corruption.is_masked | corruption.is_swapped
    inside = torch.zeros_like(touched).scatter(1, corruption.corrupted, True)
    assert not (touched & ~inside).any()
    assert not (corruption.is_masked & corruption.is_swapped).any()


def test_patches_are_drawn_equally_often_and_split_80_10_10_by_chi_square_tests():
    corruption = draw_corruption(torch.arange(20_000), num_patches=16, seed=5)
    counts = np.bincount(corruption.corrupted.flatten().numpy(), minlength=16)
    # Without replacement within an image the counts vary less than a multinomial's: by (1 - 8/16).
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum() / (1 - 8 / 16) * (15 / 16)
    assert 1e-3 < stats.chi2.cdf(statistic, df=15) < 1 - 1e-3
    masked, swapped = int(corruption.is_masked.sum()), int(corruption.is_swapped.sum())
    total = corruption.corrupted.numel()
    observed = [masked, swapped, total - masked - swapped]
    assert stats.chisquare(observed, np.array([0.8, 0.1, 0.1]) * total).pvalue > 1e-3
    # A swapped patch takes any other of its image, and never itself.
    source = draw_corruption(torch.arange(20_000), num_patches=9, seed=5).source
    counts = np.bincount(((source - torch.arange(9)) % 9).flatten().numpy(), minlength=9)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > 1e-3


def test_corruption_depends_on_seed_step_and_sample_and_on_nothing_else():
    whole = draw_corruption(SAMPLES, 49, seed=1, step=2)
    shuffled = torch.randperm(4000, generator=torch.Generator().manual_seed(0))
    for full, part in zip(whole, draw_corruption(SAMPLES[shuffled], 49, 1, 2), strict=True):
        assert torch.equal(full[shuffled], part)
    for seed, step in [(2, 2), (1, 3)]:
        assert not torch.equal(whole.corrupted, draw_corruption(SAMPLES, 49, seed, step).corrupted)
    assert len({tuple(row) for row in whole.corrupted.tolist()}) == 4000


def test_the_mean_colour_has_three_bits_a_channel():
    colors = torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0], [-0.76, 0.0, 0.74], [0.0, -1, -1]])
    # Worked by hand: bins of width 0.25 from -1; (0, 4, 6) and (4, 0, 0) in base 8.
    assert color_class(colors).tolist() == [0, 511, 0 * 64 + 4 * 8 + 6, 4 * 64]


@pytest.mark.parametrize(
    ("family", "target", "first_loss"),
    [
        ("ViT", "mean_color", math.log(512)),
        ("ViT", "downsized", math.log(512)),
        ("Axial-ViT", "full_patch", 1 / 3),
    ],
)
def test_every_target_starts_at_chance_and_is_learned(family, target, first_loss):
    torch.manual_seed(0)
    objective = MaskedPatchObjective(small_model(family), target)
    images, samples = some_images(8), torch.arange(8)
    optimiser = torch.optim.Adam(objective.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = objective(images, samples)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    # Uniform pixels in [-1, 1] have a mean square of 1/3; 12,288 of them, so within 2 %.
    assert losses[0] == pytest.approx(first_loss, rel=0.03)
    assert losses[-1] < 0.9 * losses[0]


def test_each_prediction_is_held_against_the_patch_at_its_own_place():
    model = small_model("ViT").eval()
    objective = MaskedPatchObjective(model, "full_patch")
    torch.nn.init.normal_(objective.prediction.weight)
    images, samples = some_images(3), torch.tensor([7, 8, 9])
    corruption = draw_corruption(samples, 16, seed=0)
    encoded = model.encode(objective.corrupt(model.embed(images), corruption))[:, 1:]
    patches = F.unfold(images, kernel_size=8, stride=8).transpose(1, 2)
    losses = [
        F.mse_loss(objective.prediction(encoded[image, patch]), patches[image, patch]).item()
        for image in range(3)
        for patch in corruption.corrupted[image].tolist()
    ]
    expected = pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert objective(images, samples).item() == expected


def test_patches_of_14_are_downsized_to_cells_that_share_their_borders():
    objective = MaskedPatchObjective(small_model("ViT", patch_size=14, image_size=28), "downsized")
    images, samples = some_images(1, (28, 28)), torch.tensor([0])
    classes = []
    for patch in draw_corruption(samples, 4, seed=0).corrupted[0].tolist():
        top, left = 14 * (patch // 2), 14 * (patch % 2)
        pixels = images[:, :, top : top + 14, left : left + 14]
        # From the first whole or partial pixel of each quarter to the last: 0-4, 3-7, 7-11, 10-14.
        bounds = [(0, 4), (3, 7), (7, 11), (10, 14)]
        cells = [pixels[0, :, a:b, c:d].mean(dim=(1, 2)) for a, b in bounds for c, d in bounds]
        classes.append(color_class(torch.stack(cells)))
    with torch.no_grad():
        objective.prediction.weight.zero_()
        objective.prediction.bias.copy_(20 * F.one_hot(classes[0], 512).flatten())
    logits = 20 * F.one_hot(classes[0], 512).float()
    expected = [F.cross_entropy(logits, target).item() for target in classes]
    assert expected[0] < 1e-3
    assert objective(images, samples).item() == pytest.approx(sum(expected) / len(expected))


def test_the_encoder_sees_mask_tokens_swapped_and_kept_patches():
    objective = MaskedPatchObjective(small_model("ViT"))
    patches = torch.randn(64, 16, 32)
    corruption = draw_corruption(torch.arange(64), 16, seed=0)
    seen = objective.corrupt(patches, corruption)
    for image in range(64):
        for patch in range(16):
            expected = patches[image, patch]
            if corruption.is_masked[image, patch]:
                expected = objective.mask.token
            elif corruption.is_swapped[image, patch]:
                expected = patches[image, corruption.source[image, patch]]
            assert torch.equal(seen[image, patch], expected)


def test_every_trained_parameter_gets_a_gradient_and_the_old_head_is_frozen():
    objective = MaskedPatchObjective(small_model("ViT", representation=True))
    objective.prediction.weight.data.normal_()
    objective(some_images(), torch.arange(2)).backward()
    untrained = {name for name, p in objective.named_parameters() if p.grad is None}
    assert untrained == {
        f"model.{layer}.{leaf}"
        for layer in ("head", "representation")
        for leaf in ("weight", "bias")
    }
    assert all(not dict(objective.named_parameters())[name].requires_grad for name in untrained)


def test_without_samples_it_is_the_model_whose_features_can_be_read():
    objective = MaskedPatchObjective(small_model("ViT"))
    captured: list[torch.Tensor] = []
    objective.head.register_forward_pre_hook(lambda m, inputs: captured.append(inputs[0]))
    images = some_images()
    assert torch.equal(objective(images), objective.model(images))
    assert torch.equal(captured[0], objective.model.features(images))


@pytest.mark.parametrize(
    ("family", "options", "target", "named"),
    [
        ("ResNet", {}, "mean_color", "BitResNet"),
        ("ViT", {"patch_size": 2}, "downsized", "patch_size=2"),
        ("ViT", {"patch_size": 32}, "mean_color", "1 patch"),
        ("R+ViT", {"image_size": 36}, "mean_color", "not whole patches of 8x8"),
    ],
)
def test_what_cannot_be_masked_is_refused(family, options, target, named):
    side = options.get("image_size", 32)
    with pytest.raises(ValueError, match=named):
        MaskedPatchObjective(small_model(family, **options), target)(
            some_images(2, (side, side)), torch.arange(2)
        )
