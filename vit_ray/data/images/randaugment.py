"""RandAugment (Cubuk et al., arXiv:1909.13719) of a finished crop: uint8 in, uint8 out.

Two spaces of operations are in use. `tensorflow` is the one of the paper's code, which "How to
train your ViT" took over: 16 operations; each layer applies one, and its strength keeps
growing past a magnitude of 10; some are weaker at a higher one. `timm` is `rand-...-inc1` of timm,
as in DeiT: 15 operations that are all stronger at a higher magnitude, each applied half of the
time, at a magnitude with noise. All operations are Pillow's; the contrast is about the image's own
mean, where TensorFlow's code takes a number that depends on the image's size alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from vit_ray.data.order.keyed_random import KeyedUniform

UInt8Array = NDArray[np.uint8]

_FULL_LEVEL: Final = 10.0
_TRANSLATE_PIXELS, _CUTOUT_PIXELS = 100, 40  # at full level, as for images of 224 pixels
_TRANSLATE_FRACTION: Final = 0.45
_APPLIED_FRACTION: Final = 0.5
_GREY: Final = (128, 128, 128)
_IMAGENET_MEAN: Final = (124, 116, 104)


@dataclass(frozen=True)
class RandAugment:
    """Random operations, one after the other.

    Attributes:
        space: `tensorflow` or `timm`, see above.
        layers: operations for each image.
        magnitude: their strength; 10 is full.
        magnitude_std: of normal noise on it, for each operation; the sum is kept within 0 to 10.
    """

    space: Literal["tensorflow", "timm"]
    layers: int = 2
    magnitude: float = 10.0
    magnitude_std: float = 0.0

    def __call__(self, pixels: UInt8Array, random: KeyedUniform) -> UInt8Array:
        """Changed pixels of the same shape, uint8 (height, width, 3).

        Args:
            random: the only source of randomness.
        """
        image = Image.fromarray(pixels)
        operations = _SPACES[self.space]
        for _ in range(self.layers):
            operation = operations[random.below(len(operations))]
            if self.space == "timm" and random.draw() >= _APPLIED_FRACTION:
                continue
            image = operation(image, self._level(random), random)
        return np.asarray(image)

    def _level(self, random: KeyedUniform) -> float:
        """Share of the full strength."""
        if self.magnitude_std == 0.0:
            return self.magnitude / _FULL_LEVEL
        noise = math.sqrt(-2.0 * math.log(1.0 - random.draw()))
        noise *= math.cos(2.0 * math.pi * random.draw())
        magnitude = self.magnitude + self.magnitude_std * noise
        return min(max(magnitude, 0.0), _FULL_LEVEL) / _FULL_LEVEL


Operation = Callable[[Image.Image, float, KeyedUniform], Image.Image]
"""(image, level, random) to an image of the same size."""


def _signed(value: float, random: KeyedUniform) -> float:
    return value if random.draw() < 0.5 else -value


def _posterize(image: Image.Image, bits: int) -> Image.Image:
    """Without any bits it is black, as in Pillow before 13, which refuses that."""
    return ImageOps.posterize(image, bits) if bits else image.point([0] * 256 * 3)


def _solarize_add(image: Image.Image, level: float, _: Any) -> Image.Image:
    addition = int(level * 110)
    table = [min(255, value + addition) if value < 128 else value for value in range(256)]
    return image.point(table * 3)


def _cutout(image: Image.Image, level: float, random: KeyedUniform) -> Image.Image:
    """Grey out a square around a pixel, as far as it lies in the image."""
    half = int(level * _CUTOUT_PIXELS)
    row, column = random.below(image.height), random.below(image.width)
    cut = image.copy()
    cut.paste(_GREY, (max(0, column - half), max(0, row - half), column + half, row + half))
    return cut


def _enhance(factor: Callable[[float, KeyedUniform], float]) -> tuple[Operation, ...]:
    """Each kind of blending with a duller image; a factor of 1 changes nothing."""
    kinds = (
        ImageEnhance.Color,
        ImageEnhance.Contrast,
        ImageEnhance.Brightness,
        ImageEnhance.Sharpness,
    )

    def of_kind(kind: Any) -> Operation:
        return lambda image, level, random: kind(image).enhance(factor(level, random))

    return tuple(map(of_kind, kinds))


def _moves(
    resample: Image.Resampling, fill: tuple[int, int, int], most_shift: Callable[[int], float]
) -> tuple[Operation, ...]:
    """Rotation, shears and translations.

    Args:
        fill: where no pixel comes from.
        most_shift: pixels of a side that a translation takes at full level.
    """

    def affine(
        matrix: Callable[[Image.Image, float, KeyedUniform], tuple[float, ...]],
    ) -> Operation:
        return lambda image, level, random: image.transform(
            image.size,
            Image.Transform.AFFINE,
            matrix(image, level, random),
            resample,
            fillcolor=fill,
        )

    def shift(side: int, level: float, random: KeyedUniform) -> float:
        return _signed(level * most_shift(side), random)

    return (
        lambda image, level, random: image.rotate(
            _signed(level * 30, random), resample, fillcolor=fill
        ),
        affine(lambda _, level, random: (1, _signed(level * 0.3, random), 0, 0, 1, 0)),
        affine(lambda _, level, random: (1, 0, 0, _signed(level * 0.3, random), 1, 0)),
        affine(lambda image, level, random: (1, 0, shift(image.width, level, random), 0, 1, 0)),
        affine(lambda image, level, random: (1, 0, 0, 0, 1, shift(image.height, level, random))),
    )


_SPACES: Final[dict[str, tuple[Operation, ...]]] = {
    "tensorflow": (
        lambda image, *_: ImageOps.autocontrast(image),
        lambda image, *_: ImageOps.equalize(image),
        lambda image, *_: ImageOps.invert(image),
        lambda image, level, _: _posterize(image, min(8, int(level * 4))),
        lambda image, level, _: ImageOps.solarize(image, int(level * 256)),
        _solarize_add,
        _cutout,
        *_enhance(lambda level, _: level * 1.8 + 0.1),
        *_moves(Image.Resampling.NEAREST, _GREY, lambda _: _TRANSLATE_PIXELS),
    ),
    "timm": (
        lambda image, *_: ImageOps.autocontrast(image),
        lambda image, *_: ImageOps.equalize(image),
        lambda image, *_: ImageOps.invert(image),
        lambda image, level, _: _posterize(image, 4 - int(level * 4)),
        lambda image, level, _: ImageOps.solarize(image, 256 - int(level * 256)),
        _solarize_add,
        *_enhance(lambda level, random: 1.0 + _signed(0.9 * level, random)),
        *_moves(Image.Resampling.BICUBIC, _IMAGENET_MEAN, lambda side: _TRANSLATE_FRACTION * side),
    ),
}
"""The operations of each space, in the order in which they are drawn."""
