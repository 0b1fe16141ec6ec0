"""3-Augment and colour jitter: operations against formulas in numpy, and who gets which."""

from itertools import permutations
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy import stats

from tests.data.images.test_randaugment import Scripted
from tests.data.pictures import encoded, picture
from tests.recipes import recipe_with
from vit_ray.data.images.augmentations import augmentation_of
from vit_ray.data.images.crops import Augmentation, operations, training_crop
from vit_ray.data.images.three_augment import ColorJitter, ThreeAugment
from vit_ray.data.order.keyed_random import KeyedUniform

IMAGE = picture(3, 40, 48)
GREYS = IMAGE @ np.array([299, 587, 114]) / 1000
NUM_SAMPLES = 3000


def difference(found: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.abs(found.astype(float) - expected).max())


def test_its_three_operations_are_the_published_ones() -> None:
    grey = ThreeAugment()(IMAGE, Scripted(0.1))
    assert difference(grey, np.repeat(GREYS[..., None], 3, axis=2)) <= 1
    solarized = ThreeAugment()(IMAGE, Scripted(0.5))
    np.testing.assert_array_equal(solarized, np.where(IMAGE < 128, IMAGE, 255 - IMAGE))
    # Pillow's Gaussian is three boxes of the same deviation.
    for share, radius in ((0.0, 0.1), (0.5, 1.05), (0.999999, 2.0)):
        blurred = ThreeAugment()(IMAGE, Scripted(0.9, share))
        expected = cv2.GaussianBlur(
            IMAGE.astype(float), (0, 0), radius, borderType=cv2.BORDER_REPLICATE
        )
        assert difference(blurred, expected) < 8
        assert np.abs(blurred - expected).mean() < 0.8


def test_each_operation_has_a_third_of_the_samples() -> None:
    drawn = [ThreeAugment().draw((2, 2), KeyedUniform(0, 0, i, 7)) for i in range(NUM_SAMPLES)]
    assert {len(one) for one in drawn} == {1}
    names = [one[0].name for one in drawn]
    counts = [names.count(name) for name in ("grey", "solarize", "blur")]
    assert stats.chisquare(counts).pvalue > 1e-3
    radii = [number for one in drawn for number in one[0].numbers]
    assert len(radii) == counts[2]
    assert stats.kstest(radii, stats.uniform(0.1, 1.9).cdf).pvalue > 1e-3


def blended(image: NDArray[Any], dull: Any, factor: float) -> NDArray[np.float64]:
    return np.clip(dull + factor * (image - dull), 0, 255)


def test_jitter_blends_with_black_the_mean_and_grey_in_the_drawn_order() -> None:
    # Saturation x 0.7, then brightness x 1.3, then contrast x 1.0.
    found = ColorJitter(0.3)(IMAGE, Scripted(0.9, 0.0, 0.0, 1.0, 0.0, 0.5))
    dull = blended(IMAGE.astype(float), GREYS[..., None], 0.7)
    assert difference(found, blended(dull, 0.0, 1.3)) <= 3  # Pillow cuts fractions off each time
    # Contrast x 0.7 first, and nothing else.
    found = ColorJitter(0.3)(IMAGE, Scripted(0.5, 0.0, 0.0, 0.5, 0.0, 0.5))
    assert difference(found, blended(IMAGE.astype(float), GREYS.mean(), 0.7)) <= 2


def test_orders_and_factors_of_jitter_are_uniform() -> None:
    drawn = [ColorJitter(0.3).draw((2, 2), KeyedUniform(0, 0, i, 8)) for i in range(NUM_SAMPLES)]
    names = [tuple(operation.name for operation in one) for one in drawn]
    counts = [names.count(order) for order in permutations(("brightness", "contrast", "color"))]
    assert sum(counts) == NUM_SAMPLES
    assert stats.chisquare(counts).pvalue > 1e-3
    factors = [operation.numbers[0] for one in drawn for operation in one]
    assert stats.kstest(factors, stats.uniform(0.7, 0.6).cdf).pvalue > 1e-3


def by_pillow(image: Image.Image, name: str, *numbers: str) -> Image.Image:
    """An operation by its name and number alone."""
    if name == "grey":
        return ImageOps.grayscale(image).convert("RGB")
    if name == "solarize":
        return ImageOps.solarize(image)
    if name == "blur":
        return image.filter(ImageFilter.GaussianBlur(float(numbers[0])))
    enhanced: Image.Image = getattr(ImageEnhance, name.title())(image).enhance(float(numbers[0]))
    return enhanced


CHANGED = {"three_augment": True, "color_jitter": 0.3}


def test_a_recipe_decides_it_and_a_sample_keeps_what_it_draws() -> None:
    recipe = recipe_with(data={"augment": CHANGED})
    found = augmentation_of(recipe.model, recipe.data.augment)
    assert (found.three_augment, found.color_jitter) == (ThreeAugment(), ColorJitter(0.3))
    image = encoded(picture(1, 61, 83))
    augment = Augmentation(size=24, three_augment=ThreeAugment(), color_jitter=ColorJitter(0.3))
    keys = [(5, 0, 0), (5, 0, 1), (5, 1, 0), (6, 0, 0)]
    crops = [training_crop(image, augment, key) for key in keys]
    for key, crop in reversed(list(zip(keys, crops, strict=True))):
        np.testing.assert_array_equal(training_crop(image, augment, key), crop)
        done = operations(augment, key)
        assert sorted(one.name for one in done[1:]) == ["brightness", "color", "contrast"]
        changed = Image.fromarray(training_crop(image, Augmentation(size=24), key))
        for one in done:
            changed = by_pillow(changed, *str(one).split())
        np.testing.assert_array_equal(crop, np.asarray(changed))
    drawn = {tuple(map(str, operations(augment, key))) for key in keys}
    assert len(drawn) == 4
