"""Losses of single images are those of the steps they are kept for, and no step waits for them."""

from collections import Counter

import numpy as np
import torch

from tests.recipes import recipe_with
from tests.train.pretended_device import HostWaits
from vit_ray.train.image_losses import NUM_ORDINARY, ImageLosses
from vit_ray.train.objective import build_objective, make_image_losses, make_loss

IMAGES = 8
MODEL = {
    "name": "ViT",
    "image_size": 8,
    "depth": 1,
    "width": 16,
    "mlp_dim": 16,
    "num_heads": 2,
    "patch_size": 4,
}


def step_of(kept: ImageLosses, step: int) -> None:
    """Two passes, whose losses say which step and image they are of."""
    samples = torch.arange(IMAGES) + step * IMAGES
    for part in samples.split(IMAGES // 2):
        kept.note(part, part / 100.0, step)


def test_the_newest_step_the_one_before_and_some_others_are_kept_whole() -> None:
    kept = ImageLosses()
    for step in range(100):
        step_of(kept, step)
    taken = kept.take()
    assert list(taken)[-2:] == [98, 99]
    assert len(taken) == NUM_ORDINARY + 2
    for step, rows in taken.items():
        wanted = np.arange(step * IMAGES, (step + 1) * IMAGES)
        np.testing.assert_array_equal(rows[:, 0], wanted)
        np.testing.assert_allclose(rows[:, 1], wanted / 100.0, rtol=1e-6)


def test_every_earlier_step_has_the_same_chance() -> None:
    counts: Counter[int] = Counter()
    for seed in range(400):
        kept = ImageLosses(seed)
        for step in range(20):
            step_of(kept, step)
        counts.update(step for step in kept.take() if step < 18)
    assert sum(counts.values()) == 400 * NUM_ORDINARY
    expected = 400 * NUM_ORDINARY / 18  # 178, with a deviation of 10
    assert all(abs(counts[step] - expected) < 50 for step in range(18))


def test_a_spike_is_not_among_the_ordinary_steps() -> None:
    kept = ImageLosses()
    for step in range(NUM_ORDINARY):
        step_of(kept, step)
        if step == 2:
            kept.take()
    assert sorted(kept.take()) == [step for step in range(NUM_ORDINARY) if step != 2]


def test_losses_are_noted_on_the_device_without_a_wait_and_their_mean_is_the_loss() -> None:
    recipe = recipe_with(model=MODEL, train={"global_batch_size": IMAGES, "precision": "fp32"})
    model, kept = build_objective(recipe, 3), ImageLosses()
    images = torch.randint(0, 256, (IMAGES, 8, 8, 3), dtype=torch.uint8)
    labels, samples = torch.arange(IMAGES)[:, None] % 3, torch.arange(IMAGES)
    noted = make_loss(recipe, kept.note)
    waits = HostWaits()
    with waits:
        loss = noted(model, images, labels, samples, 5)
    assert waits.names == []
    assert torch.equal(loss, make_loss(recipe)(model, images, labels, samples, 5))
    ((step, rows),) = kept.take().items()
    assert step == 5
    np.testing.assert_allclose(rows[:, 1].mean(), float(loss.detach()), rtol=1e-6)


def test_losses_of_masked_patches_are_those_whose_mean_is_trained() -> None:
    for target in ("mean_color", "full_patch"):
        train = {"loss": "masked_patch", "masked_target": target, "precision": "fp32"}
        recipe = recipe_with(model=MODEL, train={"global_batch_size": IMAGES, **train})
        model = build_objective(recipe, 3)
        images = torch.randint(0, 256, (IMAGES, 8, 8, 3), dtype=torch.uint8)
        labels, samples = torch.zeros(IMAGES, 1, dtype=torch.int64), torch.arange(IMAGES)
        losses = make_image_losses(recipe)(model, images, labels, samples, 2)
        assert losses.shape == (IMAGES,)
        wanted = make_loss(recipe)(model, images, labels, samples, 2)
        torch.testing.assert_close(losses.mean(), wanted)
