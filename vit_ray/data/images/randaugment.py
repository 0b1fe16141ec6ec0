"""RandAugment (Cubuk et al., arXiv:1909.13719) of a finished crop: uint8 in, uint8 out.

Two spaces of operations are in use. `tensorflow` is that of the paper's code, also used by "How to
train your ViT": 16 operations; each layer applies one, and its strength keeps growing past a
magnitude of 10; some are weaker at a higher one. `timm` is `rand-...-inc1` of timm, as in DeiT: 15
operations that are all stronger at a higher magnitude, each applied half of the time, at a
magnitude with noise. All operations are Pillow's; the contrast is relative to the image's own mean,
where TensorFlow's code uses a number that depends only on the image's size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

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


class Operation(NamedTuple):
    """One operation of a space, applied to an image."""

    name: str
    numbers: tuple[float, ...]
    """Its arguments: degrees, bits, a factor, pixels; some have none."""

    def __str__(self) -> str:
        return " ".join([self.name, *map(str, self.numbers)])


@dataclass(frozen=True)
class RandAugment:
    """Random operations, applied one after another.

    Attributes:
        space: `tensorflow` or `timm`, see above.
        layers: operations for each image.
        magnitude: their strength; 10 is full.
        magnitude_std: of normal noise on it, for each operation; the sum is limited to 0 to 10.
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
        return applied(pixels, self.draw(pixels.shape[:2], random), *_FILLING[self.space])

    def draw(self, size: tuple[int, ...], random: KeyedUniform) -> list[Operation]:
        """The operations for an image, in order.

        Args:
            size: height and width.
        """
        found, space = list[Operation](), _SPACES[self.space]
        for _ in range(self.layers):
            name = list(space)[random.below(len(space))]
            if self.space == "timm" and random.draw() >= _APPLIED_FRACTION:
                continue
            found.append(Operation(name, space[name](self._level(random), size, random)))
        return found

    def _level(self, random: KeyedUniform) -> float:
        """Share of the full strength."""
        if self.magnitude_std == 0.0:
            return self.magnitude / _FULL_LEVEL
        noise = math.sqrt(-2.0 * math.log(1.0 - random.draw()))
        noise *= math.cos(2.0 * math.pi * random.draw())
        magnitude = self.magnitude + self.magnitude_std * noise
        return min(max(magnitude, 0.0), _FULL_LEVEL) / _FULL_LEVEL


def _signed(value: float, random: KeyedUniform) -> float:
    return value if random.draw() < 0.5 else -value


def _posterize(image: Image.Image, bits: int) -> Image.Image:
    """Without any bits it is black, as in Pillow before 13; later versions refuse that."""
    return ImageOps.posterize(image, bits) if bits else image.point([0] * 256 * 3)


def _solarize_add(image: Image.Image, addition: int) -> Image.Image:
    table = [min(255, value + addition) if value < 128 else value for value in range(256)]
    return image.point(table * 3)


def _cutout(image: Image.Image, half: int, row: int, column: int) -> Image.Image:
    """Grey out a square around a pixel, as far as it is inside the image."""
    cut = image.copy()
    cut.paste(_GREY, (max(0, column - half), max(0, row - half), column + half, row + half))
    return cut


def applied(
    pixels: UInt8Array,
    operations: list[Operation],
    resample: Image.Resampling = Image.Resampling.NEAREST,
    fill: tuple[int, int, int] = _GREY,
) -> UInt8Array:
    """An image after operations of any space, uint8 (height, width, 3).

    Args:
        resample: of operations that move pixels.
        fill: for pixels from outside the image.
    """
    image = Image.fromarray(pixels)
    for name, numbers in operations:
        if name in _APPLY:
            image = _APPLY[name](image, *numbers)
            continue
        (by,) = numbers
        if name == "rotate":
            image = image.rotate(by, resample, fillcolor=fill)
            continue
        matrix = {
            "shear_x": (1, by, 0, 0, 1, 0), "shear_y": (1, 0, 0, by, 1, 0),
            "translate_x": (1, 0, by, 0, 1, 0), "translate_y": (1, 0, 0, 0, 1, by),
        }[name]  # fmt: skip
        affine = Image.Transform.AFFINE
        image = image.transform(image.size, affine, matrix, resample, fillcolor=fill)
    return np.asarray(image)


_APPLY: Final[dict[str, Callable[..., Image.Image]]] = {
    "autocontrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "invert": ImageOps.invert,
    "posterize": _posterize,
    "solarize": ImageOps.solarize,
    "solarize_add": _solarize_add,
    "cutout": _cutout,
    # Blending with a duller image; a factor of 1 changes nothing.
    "color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
}
"""(image, *numbers) to an image of the same size."""
_BLENDED: Final = ("color", "contrast", "brightness", "sharpness")
_FILLING: Final = {
    "tensorflow": (Image.Resampling.NEAREST, _GREY),
    "timm": (Image.Resampling.BICUBIC, _IMAGENET_MEAN),
}

Numbers = Callable[[float, tuple[int, ...], KeyedUniform], tuple[float, ...]]
"""(level, (height, width), random) to the numbers of an operation."""


def _by_level(number: Callable[[float], float]) -> Numbers:
    return lambda level, *_: (number(level),)


def _moves(most_shift: Callable[[int], float]) -> dict[str, Numbers]:
    """Rotation in degrees, shears, and translations in pixels.

    Args:
        most_shift: pixels of a side that a translation takes at full level.
    """
    return {
        "rotate": lambda level, _, random: (_signed(level * 30, random),),
        "shear_x": lambda level, _, random: (_signed(level * 0.3, random),),
        "shear_y": lambda level, _, random: (_signed(level * 0.3, random),),
        "translate_x": lambda level, s, random: (_signed(level * most_shift(s[1]), random),),
        "translate_y": lambda level, s, random: (_signed(level * most_shift(s[0]), random),),
    }


_SPACES: Final[dict[str, dict[str, Numbers]]] = {
    "tensorflow": {
        **dict.fromkeys(("autocontrast", "equalize", "invert"), lambda *_: ()),
        "posterize": _by_level(lambda level: min(8, int(level * 4))),
        "solarize": _by_level(lambda level: int(level * 256)),
        "solarize_add": _by_level(lambda level: int(level * 110)),
        "cutout": lambda level, size, random: (
            int(level * _CUTOUT_PIXELS),
            random.below(size[0]),
            random.below(size[1]),
        ),
        **dict.fromkeys(_BLENDED, _by_level(lambda level: level * 1.8 + 0.1)),
        **_moves(lambda _: _TRANSLATE_PIXELS),
    },
    "timm": {
        **dict.fromkeys(("autocontrast", "equalize", "invert"), lambda *_: ()),
        "posterize": _by_level(lambda level: 4 - int(level * 4)),
        "solarize": _by_level(lambda level: 256 - int(level * 256)),
        "solarize_add": _by_level(lambda level: int(level * 110)),
        **dict.fromkeys(_BLENDED, lambda level, _, random: (1.0 + _signed(0.9 * level, random),)),
        **_moves(lambda side: _TRANSLATE_FRACTION * side),
    },
}
"""The operations of each space, in the order in which they are drawn."""
