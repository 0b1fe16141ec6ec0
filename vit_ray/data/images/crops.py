"""Encoded images to training and evaluation crops: uint8, at the lowest scale that suffices.

A plain JPEG is decoded by OpenCV at 1/1, 1/2, 1/4 or 1/8 scale, the coarsest that still has at
least the pixels that the crop needs. Everything else (CMYK, palette, 16 bits, alpha, other formats)
goes through Pillow. EXIF orientation is not applied, as in Pillow's `convert("RGB")` and in the
TensorFlow pipeline of the ViT paper.
"""

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vit_ray.data.images.jpeg import decode_jpeg, read_header
from vit_ray.data.images.randaugment import RandAugment
from vit_ray.data.order.keyed_random import KeyedUniform

UInt8Array = NDArray[np.uint8]

_CROP_ATTEMPTS: Final = 10
_ADDRESS: Final = re.compile(r" <_io.BytesIO object at 0x\w+>")
_CROP, _RANDAUGMENT = 3, 4
"""Tell the random numbers of the crop from others of the same (seed, epoch, sample)."""

_BLURRED_FROM: Final = 1.25
_AVERAGED_FROM: Final = 2.5
"""How shrinking avoids aliasing: bilinear alone below the first factor, a 3 x 3 Gaussian before it
up to the second, averaged areas above; the Gaussian takes a third of the time of areas.

PSNR against Pillow's antialiased bilinear resize, mean over training crops of ImageNet photographs:
47.9 dB for sides that shrink by 1 to 1.25, 42.7 to 1.6, 46.0 to 2, 41.5 to 4 and 36.9 above
(benchmarks/data_decode.py; bilinear without any of this: 47.9, 39.0, 36.3, 32.5 and 29.4)."""


class BadImageError(ValueError):
    """The bytes are not an image that can be decoded; the message says why."""


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
        min_area, max_area: range of the crop's share of the image.
        min_aspect, max_aspect: range of the crop's width over height.
        border: pixels cut off all four sides before anything else.
        randaugment: what is done to the finished crop; None for nothing.
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
    randaugment: RandAugment | None = None

    def __post_init__(self) -> None:
        if self.kind not in _BOXES:
            raise ValueError(f"augmentation.kind={self.kind!r}; allowed are {sorted(_BOXES)}.")
        if min(self.height, self.width) < 1:
            raise ValueError(f"augmentation.size={self.size}; give at least 1 pixel a side.")
        if self.kind in ("resize_crop", "center_crop") and self.resize < max(self.shape[:2]):
            raise ValueError(
                f"augmentation.resize={self.resize} is below augmentation.size={self.size}, so the "
                f"crop would not fit; use at least {max(self.shape[:2])}."
            )
        if not 0 < self.min_area <= self.max_area <= 1:
            raise ValueError(
                f"augmentation.min_area={self.min_area}, max_area={self.max_area}; "
                f"keep 0 < min_area <= max_area <= 1."
            )
        if not 0 < self.min_aspect <= self.max_aspect:
            raise ValueError(
                f"augmentation.min_aspect={self.min_aspect}, max_aspect={self.max_aspect}; "
                f"keep 0 < min_aspect <= max_aspect."
            )

    @property
    def height(self) -> int:
        """Output height in pixels."""
        return self.size if isinstance(self.size, int) else self.size[0]

    @property
    def width(self) -> int:
        """Output width in pixels."""
        return self.size if isinstance(self.size, int) else self.size[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the output array."""
        return (self.height, self.width, 3)


@dataclass(frozen=True)
class CropBox:
    """A rectangle of the source in pixels (fractions allowed), to be resized to the output."""

    top: float
    left: float
    height: float
    width: float
    is_flipped: bool

    def rescaled(self, factor: float) -> "CropBox":
        """The same rectangle in an image whose sides are `factor` times the source's."""
        return CropBox(
            self.top * factor,
            self.left * factor,
            self.height * factor,
            self.width * factor,
            self.is_flipped,
        )

    def bounds(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Whole pixels that hold the rectangle: top, left, bottom, right, the last two exclusive.

        Args:
            height, width: of the image, which the rectangle never leaves.
        """
        top, left = math.floor(self.top), math.floor(self.left)
        bottom = min(height, max(top + 1, math.ceil(self.top + self.height)))
        right = min(width, max(left + 1, math.ceil(self.left + self.width)))
        return top, left, bottom, right


def decode(image: bytes) -> UInt8Array:
    """All pixels of an encoded image as RGB: uint8 (height, width, 3).

    Equals Pillow's `convert("RGB")`, but 16-bit grey is scaled to 8 bits where Pillow clips,
    if any value is above 255.

    Raises:
        BadImageError: if the bytes cannot be decoded whole.
    """
    header = read_header(image)
    pixels = None if header is None else decode_jpeg(image, header)
    return _decode_other(image) if pixels is None else pixels


def training_crop(
    image: bytes,
    augmentation: Augmentation,
    rng_key: tuple[int, int, int],
    out: UInt8Array | None = None,
) -> UInt8Array:
    """Decode what the augmentation needs of an encoded image, and resize it.

    Args:
        rng_key: (seed, epoch, sample); the only source of randomness.
        out: uint8 of `augmentation.shape` to write into.

    Returns:
        `out`, or a new array.

    Raises:
        BadImageError: if the bytes cannot be decoded.
    """
    if out is None:
        out = np.empty(augmentation.shape, np.uint8)
    pixels, box = _pixels_for_crop(image, augmentation, rng_key)
    _cut(pixels, box, out)
    if augmentation.randaugment is not None:
        out[:] = augmentation.randaugment(out, KeyedUniform(*rng_key, _RANDAUGMENT))
    return out


def crop_of_pixels(pixels: UInt8Array, augmentation: Augmentation) -> UInt8Array:
    """The crop of an image that is decoded already, uint8 (height, width, 3); as `training_crop`.

    Where the augmentation is random, it takes the same numbers for every image.
    """
    pixels = _within_border(pixels, augmentation.border)
    height, width = pixels.shape[:2]
    box = _BOXES[augmentation.kind](height, width, augmentation, KeyedUniform(0, 0, 0, _CROP))
    return _cut(pixels, box, np.empty(augmentation.shape, np.uint8))


@dataclass(frozen=True)
class DeviceCrop:
    """A plain JPEG that has yet to be decoded, and which pixels of it make the crop.

    `box` is top, left, bottom, right; the last two exclusive.
    """

    box: tuple[int, int, int, int]
    is_flipped: bool


def crop_of_jpeg(
    image: bytes, augmentation: Augmentation, rng_key: tuple[int, int, int]
) -> DeviceCrop | None:
    """The crop that `training_crop` takes; None for what is no plain JPEG, or has a border."""
    assert augmentation.randaugment is None, "a device only cuts"
    header = None if augmentation.border else read_header(image)
    if header is None:
        return None
    random = KeyedUniform(*rng_key, _CROP)
    box = _BOXES[augmentation.kind](header.height, header.width, augmentation, random)
    return DeviceCrop(box.bounds(header.height, header.width), box.is_flipped)


def _pixels_for_crop(
    image: bytes, augmentation: Augmentation, rng_key: tuple[int, int, int]
) -> tuple[UInt8Array, CropBox]:
    """Pixels that hold the crop, as few and as coarse as will do, and its place in them."""
    choose_box = _BOXES[augmentation.kind]
    header = None if augmentation.border else read_header(image)
    if header is not None:
        random = KeyedUniform(*rng_key, _CROP)
        box = choose_box(header.height, header.width, augmentation, random)
        scale = _coarsest_scale(box, augmentation)
        pixels = decode_jpeg(image, header, scale, math.ceil(box.top + box.height) + scale)
        if pixels is not None:
            return pixels, box.rescaled(1 / scale)
    border = augmentation.border
    pixels = _within_border(decode(image), border) if border else _decode_other(image)
    height, width = pixels.shape[:2]
    return pixels, choose_box(height, width, augmentation, KeyedUniform(*rng_key, _CROP))


def _within_border(pixels: UInt8Array, border: int) -> UInt8Array:
    """The image without its outermost pixels, as a view."""
    height, width = pixels.shape[:2]
    if min(height, width) <= 2 * border:
        raise BadImageError(f"{width}x{height} pixels are nothing but the border of {border}")
    return pixels[border : height - border, border : width - border]


def _decode_other(image: bytes) -> UInt8Array:
    try:
        with Image.open(io.BytesIO(image)) as opened:
            if opened.mode.startswith("I;16") or opened.mode == "I":
                return _from_16_bits(np.asarray(opened))
            if opened.mode == "F":
                raise BadImageError("its pixels are floats, whose range nobody tells")
            return np.asarray(opened.convert("RGB"))
    except BadImageError:
        raise
    except Exception as error:  # Pillow's plugins raise anything from SyntaxError to struct.error
        reason = _ADDRESS.sub("", str(error))
        raise BadImageError(f"not decodable: {type(error).__name__}: {reason}") from error


def _from_16_bits(grey: NDArray[np.integer]) -> UInt8Array:
    """Files whose values all fit into 8 bits are taken to mean them, as Pillow does."""
    bits = 8 if grey.max() > 255 else 0
    eight = (grey.astype(np.int64) >> bits).clip(0, 255).astype(np.uint8)
    return np.repeat(eight[:, :, None], 3, axis=2)


def _inception_crop(
    height: int, width: int, augmentation: Augmentation, random: KeyedUniform
) -> CropBox:
    for _ in range(_CROP_ATTEMPTS):
        area = height * width * random.between(augmentation.min_area, augmentation.max_area)
        low, high = math.log(augmentation.min_aspect), math.log(augmentation.max_aspect)
        aspect = math.exp(random.between(low, high))
        crop_width = round(math.sqrt(area * aspect))
        crop_height = round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = random.below(height - crop_height + 1)
            left = random.below(width - crop_width + 1)
            return CropBox(top, left, crop_height, crop_width, _is_flipped(augmentation, random))
    return _largest_central(height, width, augmentation, random)


def _largest_central(
    height: int, width: int, augmentation: Augmentation, random: KeyedUniform
) -> CropBox:
    aspect = min(max(width / height, augmentation.min_aspect), augmentation.max_aspect)
    crop_width = min(width, max(1, round(height * aspect)))
    crop_height = min(height, max(1, round(width / aspect)))
    top, left = (height - crop_height) // 2, (width - crop_width) // 2
    return CropBox(top, left, crop_height, crop_width, _is_flipped(augmentation, random))


def _resize_crop(
    height: int, width: int, augmentation: Augmentation, random: KeyedUniform
) -> CropBox:
    per_row, per_column = height / augmentation.resize, width / augmentation.resize
    top = random.below(augmentation.resize - augmentation.height + 1) * per_row
    left = random.below(augmentation.resize - augmentation.width + 1) * per_column
    is_flipped = _is_flipped(augmentation, random)
    return CropBox(
        top, left, augmentation.height * per_row, augmentation.width * per_column, is_flipped
    )


def _center_crop(
    height: int, width: int, augmentation: Augmentation, random: KeyedUniform
) -> CropBox:
    per_pixel = min(height, width) / augmentation.resize
    crop_height = augmentation.height * per_pixel
    crop_width = augmentation.width * per_pixel
    top, left = (height - crop_height) / 2, (width - crop_width) / 2
    return CropBox(top, left, crop_height, crop_width, _is_flipped(augmentation, random))


def _resize(height: int, width: int, augmentation: Augmentation, random: KeyedUniform) -> CropBox:
    return CropBox(0, 0, height, width, _is_flipped(augmentation, random))


def _is_flipped(augmentation: Augmentation, random: KeyedUniform) -> bool:
    return augmentation.flip and random.draw() < 0.5


def _coarsest_scale(box: CropBox, augmentation: Augmentation) -> int:
    """The largest of 8, 4, 2, 1 at which the crop still has all the pixels of the output."""
    shrink = min(box.height / augmentation.height, box.width / augmentation.width)
    return next(scale for scale in (8, 4, 2, 1) if scale <= max(shrink, 1))


def _cut(pixels: UInt8Array, box: CropBox, out: UInt8Array) -> UInt8Array:
    top, left, bottom, right = box.bounds(*pixels.shape[:2])
    crop = pixels[top:bottom, left:right]
    if box.is_flipped:
        cv2.flip(_resized(crop, np.empty_like(out)), 1, dst=out)
    else:
        _resized(crop, out)
    return out


def _resized(crop: UInt8Array, out: UInt8Array) -> UInt8Array:
    height, width = out.shape[:2]
    down, across = crop.shape[0] / height, crop.shape[1] / width
    method = cv2.INTER_LINEAR
    if max(down, across) >= _AVERAGED_FROM:
        method = cv2.INTER_AREA
    elif max(down, across) >= _BLURRED_FROM:
        blurred = cv2.GaussianBlur(crop, (3, 3), _blur_for(across), sigmaY=_blur_for(down))
        crop = blurred  # type: ignore[assignment]
    cv2.resize(crop, (width, height), dst=out, interpolation=method)
    return out


def _blur_for(shrink: float) -> float:
    """Standard deviation in source pixels; chosen by PSNR against Pillow over factors of 1 to 4."""
    return max(0.1, 0.45 * math.sqrt(max(0.0, shrink * shrink - 1)))


_BoxChooser = Callable[[int, int, Augmentation, KeyedUniform], CropBox]
_BOXES: Final[dict[str, _BoxChooser]] = {
    "inception_crop": _inception_crop,
    "resize_crop": _resize_crop,
    "center_crop": _center_crop,
    "resize": _resize,
}
