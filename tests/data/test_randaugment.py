"""RandAugment: each operation against the published formula in numpy, and who gets which."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tests.data.pictures import encoded, picture
from vit_ray.data import randaugment
from vit_ray.data.boxes import Augmentation
from vit_ray.data.crops import crop_of
from vit_ray.data.keyed_random import KeyedUniform
from vit_ray.data.randaugment import RandAugment

Pixels = NDArray[np.uint8]
IMAGE = picture(3, 40, 48)
GREYS = IMAGE @ np.array([299, 587, 114]) / 1000


class Scripted(KeyedUniform):
    """Draws what it is told, then 0."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def draw(self) -> float:
        return self._numbers.pop(0) if self._numbers else 0.0


def applied(index: int, magnitude: float, *numbers: float) -> Pixels:
    """One operation, by its place; the sign is positive where none is told."""
    drawn = [(index + 0.5) / len(randaugment.OPERATIONS), *numbers]
    return RandAugment(layers=1, magnitude=magnitude)(IMAGE, Scripted(*drawn))


def blended(dull: Any, factor: float) -> NDArray[np.float64]:
    return np.clip(dull + factor * (IMAGE.astype(float) - dull), 0, 255)


def autocontrast() -> NDArray[np.float64]:
    low, high = IMAGE.min((0, 1)).astype(float), IMAGE.max((0, 1))
    return np.clip((IMAGE - low) * 255 / (high - low), 0, 255)


def equalized() -> NDArray[np.int64]:
    out = np.empty(IMAGE.shape, np.int64)
    for channel in range(3):
        counts = np.bincount(IMAGE[..., channel].ravel(), minlength=256)
        step = (counts.sum() - counts[counts > 0][-1]) // 255
        before = np.concatenate([[0], np.cumsum(counts)[:-1]])
        out[..., channel] = np.clip((before + step // 2) // step, 0, 255)[IMAGE[..., channel]]
    return out


def smoothed() -> NDArray[np.float64]:
    out, source = IMAGE.astype(float), IMAGE.astype(float)
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    for y in range(1, IMAGE.shape[0] - 1):
        for x in range(1, IMAGE.shape[1] - 1):
            around = source[y - 1 : y + 2, x - 1 : x + 2]
            out[y, x] = np.tensordot(kernel, around, 2)
    return out


Y, X = np.mgrid[: IMAGE.shape[0], : IMAGE.shape[1]]


def taken_from(y: Any, x: Any) -> Pixels:
    """Each pixel from the one in row `y` and column `x`, grey where there is none."""
    is_inside = (y >= 0) & (y < IMAGE.shape[0]) & (x >= 0) & (x < IMAGE.shape[1])
    out = np.full(IMAGE.shape, 128, np.uint8)
    out[is_inside] = IMAGE[y[is_inside], x[is_inside]]
    return out


def sheared(by: float) -> Pixels:
    """Pixel centre (y, x) from the nearest of (y, x + by y)."""
    return taken_from(Y, np.floor(X + 0.5 + by * (Y + 0.5)).astype(int))


SOLARIZED = np.where(IMAGE < 102, IMAGE, 255 - IMAGE)
ADDED = np.where(IMAGE < 128, np.minimum(255, IMAGE.astype(int) + 55), IMAGE)
CUT = IMAGE.copy()
CUT[0:30, 4:44] = 128
# Place, magnitude, further draws, expected pixels, and how far rounding may be off.
CASES: dict[str, tuple[Any, ...]] = {
    "autocontrast": (0, 3, (), autocontrast(), 1),
    "equalize": (1, 3, (), equalized(), 0),
    "invert": (2, 3, (), 255 - IMAGE, 0),
    "posterize, beyond full": (3, 15, (), IMAGE // 4 * 4, 0),
    "solarize": (4, 4, (), SOLARIZED, 0),
    "solarize add": (5, 5, (), ADDED, 0),
    "cutout": (6, 5, (10.5 / 40, 24.5 / 48), CUT, 0),
    "color": (7, 5, (), blended(GREYS[..., None], 1.0), 1),
    "contrast": (8, 10, (), blended(GREYS.mean(), 1.9), 2),
    "brightness": (9, 2, (), blended(0.0, 0.46), 1),
    "sharpness": (10, 10, (), blended(smoothed(), 1.9), 2),
    "shear x, back": (12, 10, (0.9,), sheared(-0.3), 0),
    "translate x": (14, 1, (), taken_from(Y, X + 10), 0),
    "translate y, back": (15, 2, (0.9,), taken_from(Y - 20, X), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_the_published_one(name):
    index, magnitude, numbers, expected, tolerance = CASES[name]
    found = applied(index, magnitude, *numbers)
    difference = np.abs(found.astype(float) - np.asarray(expected))
    assert difference.max() <= tolerance


def test_rotation_turns_about_the_centre_by_up_to_30_degrees():
    square = np.zeros((41, 41, 3), np.uint8)
    square[20, 20], square[20, 35] = 200, 255
    augment = RandAugment(layers=1, magnitude=10)
    found = augment(square, Scripted(11.5 / len(randaugment.OPERATIONS)))[..., 0].astype(int)
    assert found[20, 20] >= 190
    # 15 pixels to the right, 30 degrees against the clock.
    y, x = round(20 - 15 * np.sin(np.pi / 6)), round(20 + 15 * np.cos(np.pi / 6))
    assert found[y - 1 : y + 2, x - 1 : x + 2].max() > 90
    assert found[20, 35] < 30


def test_every_layer_takes_one_operation_of_the_paper():
    found = [RandAugment(2, 15).draw((2, 2), KeyedUniform(0, 0, s, 4)) for s in range(4000)]
    counts = Counter(operation.name for drawn in found for operation in drawn)
    assert {len(drawn) for drawn in found} == {2}
    assert counts.keys() == randaugment.OPERATIONS.keys()
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_a_sample_keeps_its_operations_and_changes_them_in_each_epoch_and_seed():
    image = encoded(picture(1, 61, 83))
    augment = Augmentation("resize", 32, flip=False, randaugment=RandAugment())

    def crops(seed: int, epoch: int, samples: Any) -> list[bytes]:
        return [crop_of(image, augment, (seed, epoch, s)).tobytes() for s in samples]

    first = crops(5, 0, range(20))
    assert crops(5, 0, reversed(range(20)))[::-1] == first
    for other in (crops(5, 1, range(20)), crops(6, 0, range(20)), crops(5, 0, range(20, 40))):
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 4
