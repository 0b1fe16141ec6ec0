"""Boxes that are cropped, and what follows each crop: functions of size and random numbers.

Boxes of many images are drawn at once; each depends only on the random numbers of that image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.keyed_random import KeyedUniform, KeyedUniforms
from vit_ray.data.randaugment import Operation, RandAugment
from vit_ray.data.restart_index import Box
from vit_ray.own_parts import Part, own_part

if TYPE_CHECKING:  # reading tasks do not load it
    from vit_ray.config.training_sections import AugmentConfig, EvalAugmentConfig, ModelConfig

IntArray = NDArray[np.int64]

_ATTEMPTS: Final = 10
# Changes of a finished crop, in this order, with the last part of the key of their random numbers.
_CHANGES: Final = {"randaugment": 4, "own": 6}
# The last part of the key of a crop's random numbers.
_CROP: Final = 3


@dataclass(frozen=True)
class Augmentation:
    """How an encoded image becomes an array of `size`.

    Attributes:
        kind: `inception_crop` (random area and aspect), `resize_crop` (resize both sides to
            `resize`, random crop of `size`), `center_crop` (shorter side to `resize`, central
            `size`), `resize` (both sides to `size`, aspect ignored).
        size: output side in pixels, or (height, width).
        flip: mirror left to right with probability 1/2.
        resize: see `kind`; in pixels.
        min_area, max_area: range of the crop's area as a fraction of the image.
        min_aspect, max_aspect: range of the crop's width over height.
        border: pixels cut off all four sides before anything else.
        is_exact: for evaluation, the crop is cut at fractions of pixels and resized more precisely;
            otherwise it is cut at the whole pixels around its box.
        interpolation: `bilinear`, by OpenCV and close to Pillow's, or `bicubic`, Pillow's own.
        randaugment: applied to the finished crop; None for no RandAugment.
        own: a custom component that is applied last; None for none.
    """

    kind: Literal["inception_crop", "resize_crop", "center_crop", "resize"] = "inception_crop"
    size: int | tuple[int, int] = 224
    flip: bool = True
    resize: int = 256
    min_area: float = 0.05
    max_area: float = 1.0
    min_aspect: float = 3 / 4
    max_aspect: float = 4 / 3
    border: int = 0
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    randaugment: RandAugment | None = None
    own: Part | None = None
    is_exact: bool = False

    def __post_init__(self) -> None:
        if self.kind in ("resize_crop", "center_crop") and self.resize < max(self.shape[:2]):
            raise ValueError(
                f"augmentation.resize={self.resize} is below augmentation.size={self.size}, so the "
                f"crop would not fit; use at least {max(self.shape[:2])}"
            )

    @property
    def height(self) -> int:
        return self.size if isinstance(self.size, int) else self.size[0]

    @property
    def width(self) -> int:
        return self.size if isinstance(self.size, int) else self.size[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.height, self.width, 3)

    def changed(self, crop: NDArray[np.uint8], rng_key: tuple[int, int, int]) -> NDArray[np.uint8]:
        """A finished crop, changed in place by RandAugment and by the custom component."""
        for name, word in _CHANGES.items():
            if (change := getattr(self, name)) is not None:
                crop[:] = change(crop, KeyedUniform(*rng_key, word))
        return crop

    def operations(self, rng_key: tuple[int, int, int]) -> list[Operation]:
        """The operations of RandAugment that `changed` applies to a crop."""
        if self.randaugment is None:
            return []
        return self.randaugment.draw(self.shape, KeyedUniform(*rng_key, _CHANGES["randaugment"]))


def training_augmentation(model: ModelConfig, augment: AugmentConfig) -> Augmentation:
    """How a model's images are cropped for training, with the default resize of evaluation."""
    randaugment = None
    if augment.randaugment:
        randaugment = RandAugment(augment.randaugment_layers, augment.randaugment_magnitude)
    return Augmentation(
        kind=augment.kind,
        size=model.image_size,
        flip=augment.flip,
        resize=augment.resize or round(max(model.sides) * 8 / 7),
        min_area=augment.min_area,
        max_area=augment.max_area,
        interpolation=augment.interpolation,
        randaugment=randaugment,
        own=own_part(augment.own, "data.augment.own") if augment.own else None,
    )


def evaluation_augmentation(model: ModelConfig, augment: EvalAugmentConfig) -> Augmentation:
    """How a model's images are cropped for evaluation.

    The default resize is 256 for a crop of 224, and in proportion for other sizes.
    """
    return Augmentation(
        kind=augment.kind,
        size=model.image_size,
        flip=False,
        resize=augment.resize or round(max(model.sides) * 8 / 7),
        border=augment.border,
        interpolation=augment.interpolation,
        is_exact=True,
    )


@dataclass(frozen=True)
class CropBox:
    """A rectangle of the source in pixels (fractions allowed), to be resized to the output."""

    top: float
    left: float
    height: float
    width: float
    is_flipped: bool

    def bounds(self, size: tuple[int, int], scale: int = 1) -> Box:
        """The smallest box of whole pixels around the rectangle, in the image at 1/`scale`.

        Args:
            size: height and width of the full-size image, which contains the rectangle.
        """
        factor = 1 / scale
        top, left = self.top * factor, self.left * factor
        bottom, right = top + self.height * factor, left + self.width * factor
        first_row, first = math.floor(top), math.floor(left)
        height, width = -(-size[0] // scale), -(-size[1] // scale)
        last_row = min(height, max(first_row + 1, math.ceil(bottom)))
        return first_row, first, last_row, min(width, max(first + 1, math.ceil(right)))


def draw_boxes(
    sizes: NDArray[np.integer],
    augmentation: Augmentation,
    seed: int,
    epochs: NDArray[np.integer],
    samples: NDArray[np.integer],
) -> list[CropBox]:
    """The boxes of many images, relative to the image without its border.

    Args:
        sizes: (n, 2), height and width of each image.
        epochs, samples: (n,); together with the seed the only source of randomness.
    """
    # Cropping an image that is only border raises an error later.
    height, width = np.maximum(np.asarray(sizes, np.int64) - 2 * augmentation.border, 1).T
    random = KeyedUniforms(seed, epochs, samples, _CROP)
    boxes = _BOXES[augmentation.kind](height, width, augmentation, random)
    return [CropBox(*row) for row in zip(*(column.tolist() for column in boxes), strict=True)]


def draw_box(
    size: tuple[int, int], augmentation: Augmentation, rng_key: tuple[int, int, int]
) -> CropBox:
    """The box of one image; `rng_key` is (seed, epoch, sample)."""
    seed, epoch, sample = rng_key
    (box,) = draw_boxes(np.array([size]), augmentation, seed, np.array([epoch]), np.array([sample]))
    return box


# The attributes of `CropBox`, with one entry per image.
_Boxes = tuple[NDArray[Any], ...]


def _inception_crop(
    height: IntArray, width: IntArray, augmentation: Augmentation, random: KeyedUniforms
) -> _Boxes:
    # Start from the largest central box, which remains if no attempt fits into the image.
    low, high = augmentation.min_aspect, augmentation.max_aspect
    aspect = np.minimum(np.maximum(width / height, low), high)
    box_width = np.minimum(width, np.maximum(1, _rounded(height * aspect)))
    box_height = np.minimum(height, np.maximum(1, _rounded(width / aspect)))
    top, left = (height - box_height) // 2, (width - box_width) // 2
    is_flipped = _flips(augmentation, random, 2 * _ATTEMPTS + 1)
    areas = augmentation.max_area - augmentation.min_area
    log_low, log_high = math.log(low), math.log(high)
    pending = np.arange(len(height))
    for attempt in range(_ATTEMPTS):
        first = 2 * attempt + 1  # an attempt draws two numbers, and three more if it fits
        h, w = height[pending], width[pending]
        area = h * w * (augmentation.min_area + areas * random.draw(first, pending))
        drawn = log_low + (log_high - log_low) * random.draw(first + 1, pending)
        # Not numpy's exp: its last bit depends on the processor.
        aspect = np.array([math.exp(value) for value in drawn.tolist()])
        crop_height, crop_width = _rounded(np.sqrt(area / aspect)), _rounded(np.sqrt(area * aspect))
        fits = (crop_width > 0) & (crop_width <= w) & (crop_height > 0) & (crop_height <= h)
        fitting = pending[fits]
        box_height[fitting], box_width[fitting] = crop_height[fits], crop_width[fits]
        room = (h - crop_height + 1)[fits], (w - crop_width + 1)[fits]
        top[fitting] = _below(room[0], random.draw(first + 2, fitting))
        left[fitting] = _below(room[1], random.draw(first + 3, fitting))
        is_flipped[fitting] = _flips(augmentation, random, first + 4, fitting)
        pending = pending[~fits]
        if not len(pending):
            break
    return top, left, box_height, box_width, is_flipped


def _resize_crop(
    height: IntArray, width: IntArray, augmentation: Augmentation, random: KeyedUniforms
) -> _Boxes:
    per_row, per_column = height / augmentation.resize, width / augmentation.resize
    top = _below(augmentation.resize - augmentation.height + 1, random.draw(1)) * per_row
    left = _below(augmentation.resize - augmentation.width + 1, random.draw(2)) * per_column
    flips = _flips(augmentation, random, 3)
    return top, left, augmentation.height * per_row, augmentation.width * per_column, flips


def _center_crop(
    height: IntArray, width: IntArray, augmentation: Augmentation, random: KeyedUniforms
) -> _Boxes:
    per_pixel = np.minimum(height, width) / augmentation.resize
    crop_height, crop_width = augmentation.height * per_pixel, augmentation.width * per_pixel
    top, left = (height - crop_height) / 2, (width - crop_width) / 2
    return top, left, crop_height, crop_width, _flips(augmentation, random, 1)


def _resize(
    height: IntArray, width: IntArray, augmentation: Augmentation, random: KeyedUniforms
) -> _Boxes:
    corner = np.zeros_like(height)
    return corner, corner, height, width, _flips(augmentation, random, 1)


def _flips(
    augmentation: Augmentation,
    random: KeyedUniforms,
    number: int,
    which: NDArray[np.intp] | slice = slice(None),
) -> NDArray[np.bool_]:
    return augmentation.flip & (random.draw(number, which) < 0.5)


def _below(bound: IntArray | int, drawn: NDArray[np.float64]) -> IntArray:
    return (drawn * bound).astype(np.int64)


def _rounded(values: NDArray[Any]) -> IntArray:
    return np.rint(values).astype(np.int64)  # halves to even, as Python's `round`


_BOXES: Final[dict[str, Callable[[IntArray, IntArray, Augmentation, KeyedUniforms], _Boxes]]] = {
    "inception_crop": _inception_crop,
    "resize_crop": _resize_crop,
    "center_crop": _center_crop,
    "resize": _resize,
}
