"""Random erasing: which rectangles, against timm's published ranges, and what noise is in them."""

from typing import Any

import numpy as np
from scipy import stats

from tests.data.pictures import encoded, picture
from tests.recipes import recipe_with
from vit_ray.data.images.augmentations import augmentation_of
from vit_ray.data.images.crops import Augmentation, operations, training_crop
from vit_ray.data.images.erasing import RandomErasing
from vit_ray.data.order.keyed_random import KeyedUniform

SIDE, NUM_SAMPLES = 224, 4000


def rectangles(probability: float) -> np.ndarray[Any, Any]:
    erasing = RandomErasing(probability)
    drawn = [erasing.draw((SIDE, SIDE), KeyedUniform(0, 0, i, 9)) for i in range(NUM_SAMPLES)]
    return np.array([one.numbers for few in drawn for one in few])


def test_a_quarter_of_the_images_has_a_rectangle_of_timms_areas_and_aspects() -> None:
    assert stats.binomtest(len(rectangles(0.25)), NUM_SAMPLES, 0.25).pvalue > 1e-3
    top, left, height, width = rectangles(1.0).T
    assert len(top) == NUM_SAMPLES  # ten attempts fit almost always
    assert (top.min(), left.min()) == (0, 0)
    assert (top + height).max() == (left + width).max() == SIDE
    # Areas and logarithms of aspects are uniform but for the few that do not fit, and rounding.
    areas = height * width / SIDE**2
    assert stats.kstest(areas, stats.uniform(0.02, 1 / 3 - 0.02).cdf).statistic < 0.03
    aspects = np.log(height / width)
    spread = np.log(1 / 0.3)
    assert stats.kstest(aspects, stats.uniform(-spread, 2 * spread).cdf).statistic < 0.03
    places = top / (SIDE - height)
    assert stats.kstest(places, stats.uniform().cdf).statistic < 0.05


def test_the_noise_is_normal_after_imagenets_normalization() -> None:
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    ((top, left, height, width),) = (
        one.numbers for one in RandomErasing(1.0).draw((SIDE, SIDE), KeyedUniform(3))
    )
    found = RandomErasing(1.0)(pixels, KeyedUniform(3))
    outside = np.ones((SIDE, SIDE), bool)
    outside[top : top + height, left : left + width] = False
    assert not found[outside].any()
    noise = found[~outside]
    assert len(noise) > 1000
    for channel, (mean, std) in enumerate([(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)]):
        values, cumulated = noise[:, channel], stats.norm(255 * mean, 255 * std).cdf
        levels = np.arange(0, 255)  # of the last one all are at or below
        shares = np.array([(values <= level).mean() for level in levels])
        assert np.abs(shares - cumulated(levels + 0.5)).max() < 1.95 / len(values) ** 0.5
    assert np.abs(np.corrcoef(noise.T) - np.eye(3)).max() < 0.1
    assert abs(np.corrcoef(noise[:-1, 0], noise[1:, 0])[0, 1]) < 0.1


def test_a_sample_keeps_its_rectangle_and_noise_after_all_other_changes() -> None:
    recipe = recipe_with(data={"augment": {"erasing": 1.0}})
    assert augmentation_of(recipe.model, recipe.data.augment).erasing == RandomErasing(1.0)
    image, augment = encoded(picture(1, 61, 83)), Augmentation(size=24, erasing=RandomErasing(1.0))
    keys = [(5, 0, 0), (5, 0, 1), (5, 1, 0), (6, 0, 0)]
    crops = [training_crop(image, augment, key) for key in keys]
    for key, crop in reversed(list(zip(keys, crops, strict=True))):
        np.testing.assert_array_equal(training_crop(image, augment, key), crop)
        (name, *numbers) = str(operations(augment, key)[0]).split()
        top, left, height, width = map(int, numbers)
        plain = training_crop(image, Augmentation(size=24), key)
        changed = np.argwhere((crop != plain).any(axis=2))
        assert name == "erase"
        assert tuple(changed.min(axis=0)) == (top, left)
        assert tuple(changed.max(axis=0)) == (top + height - 1, left + width - 1)
    assert len({str(operations(augment, key)) for key in keys}) == 4
