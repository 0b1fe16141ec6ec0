"""RandAugment (Cubuk et al., arXiv:1909.13719) of a finished crop: uint8 in, uint8 out.

The operations are those of the paper's code, also used by "How to train your ViT": each layer
applies one of 16. Strength grows with the magnitude, also above 10; a few operations become weaker.
All operations are Pillow's. Contrast is relative to the image's mean, where TensorFlow's code uses
a number that depends only on the image's size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from vit_ray.data.keyed_random import KeyedUniform

UInt8Array = NDArray[np.uint8]

_FULL_LEVEL: Final = 10.0
_TRANSLATE_PIXELS, _CUTOUT_PIXELS = 100, 40  # at full level, as for images of 224 pixels
_GREY: Final = (128, 128, 128)


class Operation(NamedTuple):
    """One operation, applied to an image.

    Attributes:
        numbers: arguments of the operation (degrees, bits, a factor or pixels), or none.
    """

    name: str
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return " ".join([self.name, *map(str, self.numbers)])


@dataclass(frozen=True)
class RandAugment:
    """Random operations, applied one after another.

    Attributes:
        layers: operations for each image.
        magnitude: their strength; 10 is full.
    """

    layers: int = 2
    magnitude: float = 10.0

    def __call__(self, pixels: UInt8Array, random: KeyedUniform) -> UInt8Array:
        """Changed pixels of the same shape, uint8 (height, width, 3).

        Args:
            random: the only source of randomness.
        """
        return applied(pixels, self.draw(pixels.shape[:2], random))

    def draw(self, size: tuple[int, ...], random: KeyedUniform) -> list[Operation]:
        """The operations for an image, in order.

        Args:
            size: height and width.
        """
        operations, level = list[Operation](), self.magnitude / _FULL_LEVEL
        for _ in range(self.layers):
            name = list(OPERATIONS)[random.below(len(OPERATIONS))]
            operations.append(Operation(name, OPERATIONS[name](level, size, random)))
        return operations


def _signed(value: float, random: KeyedUniform) -> float:
    return value if random.draw() < 0.5 else -value


def _posterize(image: Image.Image, bits: int) -> Image.Image:
    # With 0 bits the image is black, as in Pillow before 13; later versions refuse 0 bits.
    return ImageOps.posterize(image, bits) if bits else image.point([0] * 256 * 3)


def _solarize_add(image: Image.Image, addition: int) -> Image.Image:
    table = [min(255, value + addition) if value < 128 else value for value in range(256)]
    return image.point(table * 3)


def _cutout(image: Image.Image, half: int, row: int, column: int) -> Image.Image:
    cut = image.copy()
    cut.paste(_GREY, (max(0, column - half), max(0, row - half), column + half, row + half))
    return cut


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=_GREY)


def applied(pixels: UInt8Array, operations: list[Operation]) -> UInt8Array:
    """An image after operations, uint8 (height, width, 3); pixels from outside it are grey."""
    image = Image.fromarray(pixels)
    for name, numbers in operations:
        image = _APPLY[name](image, *numbers)
    return np.asarray(image)


# Functions of (image, *numbers) that return an image of the same size.
_APPLY: Final[dict[str, Callable[..., Image.Image]]] = {
    "autocontrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "invert": ImageOps.invert,
    "posterize": _posterize,
    "solarize": ImageOps.solarize,
    "solarize_add": _solarize_add,
    "cutout": _cutout,
    # These blend the image with a degenerate one; a factor of 1 changes nothing.
    "color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    "rotate": lambda image, degrees: image.rotate(degrees, fillcolor=_GREY),
    "shear_x": lambda image, factor: _affine(image, 1, factor, 0, 0, 1, 0),
    "shear_y": lambda image, factor: _affine(image, 1, 0, 0, factor, 1, 0),
    "translate_x": lambda image, pixels: _affine(image, 1, 0, pixels, 0, 1, 0),
    "translate_y": lambda image, pixels: _affine(image, 1, 0, 0, 0, 1, pixels),
}

# A function of (level, (height, width), random) that returns the numbers of an operation.
_Numbers = Callable[[float, tuple[int, ...], KeyedUniform], tuple[float, ...]]


def _by_level(number: Callable[[float], float]) -> _Numbers:
    return lambda level, *_: (number(level),)


OPERATIONS: Final[dict[str, _Numbers]] = {
    **dict.fromkeys(("autocontrast", "equalize", "invert"), lambda *_: ()),
    "posterize": _by_level(lambda level: min(8, int(level * 4))),
    "solarize": _by_level(lambda level: int(level * 256)),
    "solarize_add": _by_level(lambda level: int(level * 110)),
    "cutout": lambda level, size, random: (
        int(level * _CUTOUT_PIXELS),
        random.below(size[0]),
        random.below(size[1]),
    ),
    **dict.fromkeys(
        ("color", "contrast", "brightness", "sharpness"),
        _by_level(lambda level: level * 1.8 + 0.1),
    ),
    "rotate": lambda level, _, random: (_signed(level * 30, random),),
    **dict.fromkeys(
        ("shear_x", "shear_y"), lambda level, _, random: (_signed(level * 0.3, random),)
    ),
    **dict.fromkeys(
        ("translate_x", "translate_y"),
        lambda level, _, random: (_signed(level * _TRANSLATE_PIXELS, random),),
    ),
}
"""How the numbers of each operation are drawn; the order determines which is drawn."""
