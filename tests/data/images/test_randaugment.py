"""RandAugment: each operation against the published formula in numpy, and who gets which."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tests.data.pictures import encoded, picture
from tests.recipes import recipe_with
from vit_ray.data.images import randaugment
from vit_ray.data.images.augmentations import augmentation_of
from vit_ray.data.images.crops import Augmentation, training_crop
from vit_ray.data.images.randaugment import RandAugment
from vit_ray.data.order.keyed_random import KeyedUniform

Pixels = NDArray[np.uint8]
IMAGE = picture(3, 40, 48)
GREYS = IMAGE @ np.array([299, 587, 114]) / 1000


class Scripted(KeyedUniform):
    """Draws what it is told, then 0."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def draw(self) -> float:
        return self._numbers.pop(0) if self._numbers else 0.0


def applied(space: str, index: int, magnitude: float, *numbers: float) -> Pixels:
    """One operation, by its place in the space; the sign is positive where none is told."""
    operations = randaugment._SPACES[space]
    drawn = [(index + 0.5) / len(operations), *([0.0] if space == "timm" else []), *numbers]
    augment = RandAugment(space, layers=1, magnitude=magnitude)  # type: ignore[arg-type]
    return augment(IMAGE, Scripted(*drawn))


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
    height, width = IMAGE.shape[:2]
    inner = sum(
        kernel[i, j] * source[i : height - 2 + i, j : width - 2 + j]
        for i in range(3)
        for j in range(3)
    )
    out[1:-1, 1:-1] = inner
    return out


def moved(rows: int, columns: int, fill: tuple[int, ...]) -> Pixels:
    """Pixel (y, x) from (y + rows, x + columns)."""
    out = np.broadcast_to(np.array(fill, np.uint8), IMAGE.shape).copy()
    height, width = IMAGE.shape[:2]
    for y in range(height):
        for x in range(width):
            if 0 <= y + rows < height and 0 <= x + columns < width:
                out[y, x] = IMAGE[y + rows, x + columns]
    return out


def sheared(by: float) -> Pixels:
    """Pixel centre (y, x) from the nearest of (y, x + by y)."""
    out = np.full(IMAGE.shape, 128, np.uint8)
    for y in range(IMAGE.shape[0]):
        for x in range(IMAGE.shape[1]):
            column = int(np.floor(x + 0.5 + by * (y + 0.5)))
            if 0 <= column < IMAGE.shape[1]:
                out[y, x] = IMAGE[y, column]
    return out


SOLARIZED = np.where(IMAGE < 102, IMAGE, 255 - IMAGE)
ADDED = np.where(IMAGE < 128, np.minimum(255, IMAGE.astype(int) + 55), IMAGE)
CUT = IMAGE.copy()
CUT[0:30, 4:44] = 128
# Space, place in it, magnitude, further draws, expected pixels, and how far rounding may be off.
CASES: dict[str, tuple[Any, ...]] = {
    "autocontrast": ("tensorflow", 0, 3, (), autocontrast(), 1),
    "equalize": ("tensorflow", 1, 3, (), equalized(), 0),
    "invert": ("tensorflow", 2, 3, (), 255 - IMAGE, 0),
    "posterize": ("tensorflow", 3, 5, (), IMAGE // 64 * 64, 0),
    "posterize, beyond full": ("tensorflow", 3, 15, (), IMAGE // 4 * 4, 0),
    "posterize, far beyond": ("tensorflow", 3, 30, (), IMAGE, 0),
    "solarize": ("tensorflow", 4, 4, (), SOLARIZED, 0),
    "solarize, beyond full": ("tensorflow", 4, 15, (), IMAGE, 0),
    "solarize add": ("tensorflow", 5, 5, (), ADDED, 0),
    "cutout": ("tensorflow", 6, 5, (10.5 / 40, 24.5 / 48), CUT, 0),
    "color": ("tensorflow", 7, 5, (), blended(GREYS[..., None], 1.0), 1),
    "color, dull": ("tensorflow", 7, 0, (), blended(GREYS[..., None], 0.1), 2),
    "contrast": ("tensorflow", 8, 10, (), blended(GREYS.mean(), 1.9), 2),
    "brightness": ("tensorflow", 9, 2, (), blended(0.0, 0.46), 1),
    "sharpness": ("tensorflow", 10, 10, (), blended(smoothed(), 1.9), 2),
    "shear x": ("tensorflow", 12, 10, (), sheared(0.3), 0),
    "shear x, back": ("tensorflow", 12, 10, (0.9,), sheared(-0.3), 0),
    "translate x": ("tensorflow", 14, 1, (), moved(0, 10, (128,) * 3), 0),
    "translate y, back": ("tensorflow", 15, 2, (0.9,), moved(-20, 0, (128,) * 3), 0),
    "posterize to nothing": ("tensorflow", 3, 2, (), IMAGE * 0, 0),
    "timm's posterize to nothing": ("timm", 3, 10, (), IMAGE * 0, 0),
    "timm's posterize": ("timm", 3, 9, (), IMAGE // 128 * 128, 0),
    "timm's solarize": ("timm", 4, 10, (), 255 - IMAGE, 0),
    "timm's brightness": ("timm", 8, 5, (), blended(0.0, 1.45), 1),
    "timm's brightness, darker": ("timm", 8, 5, (0.9,), blended(0.0, 0.55), 1),
    "timm's translate y": ("timm", 14, 5, (), moved(9, 0, (124, 116, 104)), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_the_published_one(name: str) -> None:
    space, index, magnitude, numbers, expected, tolerance = CASES[name]
    found = applied(space, index, magnitude, *numbers)
    difference = np.abs(found.astype(float) - np.asarray(expected))
    assert difference.max() <= tolerance, name


@pytest.mark.parametrize("space", ["tensorflow", "timm"])
def test_rotation_turns_about_the_centre_by_up_to_30_degrees(space: str) -> None:
    index = 11 if space == "tensorflow" else 10
    square = np.zeros((41, 41, 3), np.uint8)
    square[20, 20], square[20, 35] = 200, 255
    augment = RandAugment(space, layers=1, magnitude=10)  # type: ignore[arg-type]
    count = len(randaugment._SPACES[space])
    draws = [(index + 0.5) / count, *([0.0] if space == "timm" else [])]
    found = augment(square, Scripted(*draws))[..., 0].astype(int)
    assert found[20, 20] >= 190
    # 15 pixels to the right, 30 degrees against the clock.
    y, x = round(20 - 15 * np.sin(np.pi / 6)), round(20 + 15 * np.cos(np.pi / 6))
    assert found[y - 1 : y + 2, x - 1 : x + 2].max() > 90
    assert found[20, 35] < 30


def test_spaces_have_16_and_15_operations() -> None:
    assert [len(randaugment._SPACES[name]) for name in ("tensorflow", "timm")] == [16, 15]


class Counted:
    """Notes which operations of a space are drawn, and at which level."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, space: str, augment: RandAugment) -> None:
        self.taken: list[tuple[int, float]] = []
        names = list(randaugment._SPACES[space])
        spied = {name: self._spy(index) for index, name in enumerate(names)}
        monkeypatch.setitem(randaugment._SPACES, space, spied)
        for sample in range(4000):
            augment.draw((2, 2), KeyedUniform(0, 0, sample, 4))

    def _spy(self, index: int) -> Any:
        def numbers(level: float, *_: Any) -> tuple[float, ...]:
            self.taken.append((index, level))
            return ()

        return numbers


def test_every_layer_takes_one_operation_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Counted(monkeypatch, "tensorflow", RandAugment("tensorflow", 2, 15)).taken
    assert len(found) == 8000
    assert stats.chisquare(np.bincount([i for i, _ in found], minlength=16)).pvalue > 1e-3
    assert {level for _, level in found} == {1.5}


def test_timms_are_applied_half_of_the_time_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Counted(monkeypatch, "timm", RandAugment("timm", 2, 7, 0.5)).taken
    assert stats.binomtest(len(found), 8000, 0.5).pvalue > 1e-3
    levels = 10 * np.array([level for _, level in found])
    assert stats.kstest(levels, stats.norm(7, 0.5).cdf).pvalue > 1e-3


def test_noise_ends_at_full_strength(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Counted(monkeypatch, "timm", RandAugment("timm", 2, 10, 5.0)).taken
    levels = np.array([level for _, level in found])
    assert levels.max() == 1.0
    assert levels.min() >= 0.0
    assert 0.45 < np.mean(levels == 1.0) < 0.55


def test_a_sample_keeps_its_operations_and_changes_them_in_each_epoch_and_seed() -> None:
    image = encoded(picture(1, 61, 83))
    augment = Augmentation("resize", 32, flip=False, randaugment=RandAugment("tensorflow"))
    plain = training_crop(image, Augmentation("resize", 32, flip=False), (5, 0, 0))

    def crops(seed: int, epoch: int, samples: Any) -> list[bytes]:
        return [training_crop(image, augment, (seed, epoch, s)).tobytes() for s in samples]

    first = crops(5, 0, range(20))
    assert crops(5, 0, reversed(range(20)))[::-1] == first
    assert sum(crop != plain.tobytes() for crop in first) > 15
    for other in (crops(5, 1, range(20)), crops(6, 0, range(20)), crops(5, 0, range(20, 40))):
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 4


def test_the_crop_is_the_one_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(randaugment._SPACES, "tensorflow", {"color": lambda *_: (1.0,)})
    image = encoded(picture(1, 61, 83))
    augment = Augmentation(size=24, randaugment=RandAugment("tensorflow"))
    for sample in range(5):
        key = (5, 0, sample)
        plain = training_crop(image, Augmentation(size=24), key)
        assert np.array_equal(training_crop(image, augment, key), plain)


def augment_recipe(augment: dict[str, Any], **data: Any) -> Any:
    return recipe_with(data={"augment": augment, **data})


def test_a_recipe_decides_it() -> None:
    chosen = {
        "randaugment": "timm",
        "randaugment_layers": 3,
        "randaugment_magnitude": 9.0,
        "randaugment_magnitude_std": 0.5,
    }
    loaded = augment_recipe(chosen)
    found = augmentation_of(loaded.model, loaded.data.augment).randaugment
    assert found == RandAugment("timm", 3, 9.0, 0.5)
    assert augmentation_of(loaded.model, loaded.data.eval_augment).randaugment is None


@pytest.mark.parametrize(
    ("augment", "data", "message"),
    [
        (
            {"randaugment": "torch"},
            {},
            r"data\.augment\.randaugment='torch'.*'tensorflow' or 'timm'",
        ),
        ({"randaugment_layers": 0}, {}, r"data\.augment\.randaugment_layers=0"),
        ({"randaugment_magnitude": 31.0}, {}, r"data\.augment\.randaugment_magnitude=31"),
        (
            {"randaugment": "timm", "randaugment_magnitude": 12.0},
            {},
            r"data\.augment: randaugment_magnitude=12\.0 is above 10",
        ),
        ({"randaugment": "timm"}, {"decode": "device"}, r"data: augment\.randaugment=timm.*host"),
    ],
)
def test_wrong_values_are_refused(augment: Any, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        augment_recipe(augment, **data)
