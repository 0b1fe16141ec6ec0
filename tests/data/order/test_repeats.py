"""Copies of an image in a global batch: each in a round of its own, with other neighbours."""

import math

import numpy as np
import pytest

from vit_ray.data.order.repeats import Repeats


@pytest.mark.parametrize(
    ("batch", "times", "least"),
    [(1536, 3, 1.0), (512, 8, 1.0), (2048, 3, 0.9), (1024, 3, 0.9), (514, 2, 0.9)],
)
def test_images_are_mixed_with_others_in_each_round(batch: int, times: int, least: float) -> None:
    """DeiT's and DeiT III's batches are among them; an odd number of images is, too."""
    images, _ = Repeats(batch, times).drawn(np.arange(batch))
    pairs = [frozenset(pair) for pair in images.reshape(-1, 2).tolist()]
    assert all(len(pair) == 2 for pair in pairs)
    assert len(set(pairs)) >= least * len(pairs)


@pytest.mark.parametrize("times", [2, 3, 5, 16])
@pytest.mark.parametrize("batch", [32, 34, 50, 64, 100, 342, 1000])
def test_a_batch_has_each_copy_of_an_image_once_in_any_part_of_the_run(
    batch: int, times: int
) -> None:
    repeats, step = Repeats(batch, times), 7
    images, copies = repeats.drawn(np.arange(step * batch, (step + 1) * batch))
    assert len({*zip(images.tolist(), copies.tolist(), strict=True)}) == batch
    assert copies.tolist() == sorted(copies.tolist())
    draws = math.ceil(batch / times)
    assert set(images.tolist()) == set(range(step * draws, (step + 1) * draws))
    assert max(copies) < times
    some = range(step * draws + 1, (step + 1) * draws)
    assert repeats.crops_of(some) == range(step * batch, (step + 1) * batch)
    # Near one another in the order, near one another in the batch: in reach of a block.
    distances = np.abs(images - step * draws - np.arange(batch) % draws)
    assert distances[copies == 0].max() == 0
    assert distances.max() < 64
