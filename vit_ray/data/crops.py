"""Encoded images to training and evaluation crops: uint8, at the lowest scale that suffices.

A plain JPEG is decoded by OpenCV at 1/1, 1/2, 1/4 or 1/8 scale, the coarsest that still has the
pixels that the crop needs; if it has a restart index, only the segments that the crop touches are
decoded. A training crop is cut at the whole pixels of that scale around its box, an exact crop (of
an evaluation) between them. All other images (CMYK, palette, 16 bits, alpha, other formats) are
decoded by Pillow. EXIF orientation is not applied, as in Pillow's `convert("RGB")` and in the
TensorFlow pipeline of the ViT paper.
"""

import io
import math
import re
from dataclasses import replace
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vit_ray.data.boxes import Augmentation, CropBox, draw_box
from vit_ray.data.images import FORMAT_SUFFIXES
from vit_ray.data.jpeg import decode_jpeg, size_of_jpeg
from vit_ray.data.restart_index import Box, StoredImage, crop_file

__all__ = ["Augmentation", "UInt8Array"]

UInt8Array = NDArray[np.uint8]

IMAGE_FORMATS: Final = tuple(FORMAT_SUFFIXES)
_ADDRESS: Final = re.compile(r" <_io.BytesIO object at 0x\w+>")

_COARSEST: Final = {8: 8.0, 4: 4.0, 2: 2.0, 1: 0.0}
_FINER: Final = {8: 8 * 1.4, 4: 4 * 1.3, 2: 2 * 1.2, 1: 0.0}
"""Least factor by which a crop, or an exact one, shrinks that is decoded at 1/8, 1/4 or 1/2: the
decoder's own averages over 8, 4 or 2 pixels differ from Pillow's filter, most if little shrinking
is left. PSNR of exact crops of 64 pixels: 47.9 dB, and 39 with the coarsest decode."""
_BLURRED_FROM: Final = 1.25
_AVERAGED_FROM: Final = 2.5
"""How shrinking avoids aliasing: only bilinear below the first factor, a 3 x 3 Gaussian before it
up to the second, averaged areas above; the Gaussian takes a third of the time of areas.

PSNR against Pillow's antialiased bilinear resize, mean over training crops of ImageNet photographs:
47.9 dB for sides that shrink by 1 to 1.25, 42.7 to 1.6, 46.0 to 2, 41.5 to 4 and 36.9 above
(bilinear without any of this: 47.9, 39.0, 36.3, 32.5 and 29.4). Over all
training crops of 200 photographs: mean 47.2 dB and worst 30.7 at 224 pixels, 35.6 and 21.0 at 64;
the lowest values are for crops that a coarse decode rounds to its whole pixels. Evaluation crops
are exact (`Augmentation.is_exact`): mean 45.3 dB and worst 32.3 for 224 of 256 pixels, where a cut
at whole pixels has 34.3 and 22.0; 44.8 and 28.9 for 128 of 146; 47.7 and 34.1 for 64 of 73."""


class BadImageError(ValueError):
    """The bytes are not an image that can be decoded; the message says why."""


def decode(image: bytes | memoryview) -> UInt8Array:
    """All pixels of an encoded image as RGB: uint8 (height, width, 3).

    Equals Pillow's `convert("RGB")`, but 16-bit grey is scaled to 8 bits where Pillow clips,
    if any value is above 255.

    Raises:
        BadImageError: the bytes cannot be decoded completely.
    """
    pixels = None if size_of_jpeg(image) is None else decode_jpeg(image)
    return _decode_other(image) if pixels is None else pixels


def crop(
    image: StoredImage | UInt8Array, box: CropBox, augmentation: Augmentation, out: UInt8Array
) -> UInt8Array:
    """Write a rectangle of an image, resized, to `out`, uint8 of `augmentation.shape`.

    Args:
        image: of a file only the part that the crop needs is decoded; or all pixels.

    Raises:
        BadImageError: the bytes cannot be decoded, or are of an image of another size.
    """
    if isinstance(image, StoredImage):
        return _resized(*_decoded(image, box, augmentation), augmentation, out)
    return _resized(_looked_at(image, box, augmentation), box, augmentation, out)


def crop_of(
    image: bytes | UInt8Array,
    augmentation: Augmentation,
    rng_key: tuple[int, int, int],
    out: UInt8Array | None = None,
) -> UInt8Array:
    """The augmented crop of an encoded image, or of its pixels, that is in no data set.

    Args:
        rng_key: (seed, epoch, sample); the only source of randomness.
        out: uint8 of `augmentation.shape` to write into.

    Returns:
        `out`, or a new array.

    Raises:
        BadImageError: the bytes cannot be decoded.
    """
    if out is None:
        out = np.empty(augmentation.shape, np.uint8)
    if isinstance(image, bytes):
        size = size_of_jpeg(image)
        source = _decode_other(image) if size is None else StoredImage(image, size)
    else:
        source = image
    size = source.size if isinstance(source, StoredImage) else source.shape[:2]
    crop(source, draw_box(size, augmentation, rng_key), augmentation, out)
    return augmentation.changed(out, rng_key)


def _decoded(
    image: StoredImage, box: CropBox, augmentation: Augmentation
) -> tuple[UInt8Array, CropBox]:
    """The pixels for a crop, and the box in them."""
    if augmentation.border:
        pixels = decode(image.content)
    else:
        # The coarsest scale at which the crop still has the pixels that the output needs.
        shrink = min(box.height / augmentation.height, box.width / augmentation.width)
        least = _FINER if augmentation.is_exact else _COARSEST
        scale = next(scale for scale in (8, 4, 2, 1) if least[scale] <= shrink or scale == 1)
        wanted = _with_surroundings(image, box, augmentation, scale)
        if (region := _jpeg_region(image, wanted, scale)) is not None:
            content, (top, left, bottom, right) = region
            if (part := decode_jpeg(content, scale)) is not None:
                first_row, first, *_ = wanted.bounds(image.size, scale)
                if (first_row, first, scale) == (0, 0, 1):
                    return part[top:bottom, left:right], box
                sides = box.top / scale - first_row, box.left / scale - first
                size = box.height / scale, box.width / scale
                scaled = replace(box, top=sides[0], left=sides[1], height=size[0], width=size[1])
                return part[top:bottom, left:right], scaled
        pixels = _decode_other(image.content)
    _check_size(image, pixels.shape[:2])
    return _looked_at(pixels, box, augmentation), box


def _with_surroundings(
    image: StoredImage, box: CropBox, augmentation: Augmentation, scale: int
) -> CropBox:
    """The region of an image that is read for a crop; for an exact crop, more than the crop."""
    if not augmentation.is_exact:
        return box
    height, width = image.size
    shrinks = box.height / augmentation.height / scale, box.width / augmentation.width / scale
    widths = 2 if augmentation.interpolation == "bicubic" else 1
    below, right = ((filter_reach(shrink, widths) + 1) * scale for shrink in shrinks)
    # A small output is warped in less time than these pixels are decoded.
    skipped = MOST_SKIPPED * scale if max(shrinks) < 2 else 0
    top, left = max(0.0, box.top - skipped - below), max(0.0, box.left - skipped - right)
    bottom = min(height, box.top + box.height + below)
    return CropBox(top, left, bottom - top, min(width, box.left + box.width + right) - left, False)


def _jpeg_region(
    image: StoredImage, box: CropBox, scale: int = 1
) -> tuple[bytes | memoryview | UInt8Array, Box] | None:
    """The JPEG file to decode at 1/`scale` for a crop, and the pixels needed from it.

    None if it is not a plain JPEG; a part of the file if it has a restart index.

    Raises:
        BadImageError: it is an image of another size.
    """
    bounds = box.bounds(image.size, scale)
    if image.index is None:
        size = size_of_jpeg(image.content)
        if size is None:
            return None
        _check_size(image, size)
        return image.content, bounds
    height, width = image.size
    top, left, bottom, right = (side * scale for side in bounds)
    if (top, left) == (0, 0) and bottom >= height and right >= width:
        at = image.index.size_at
        if image.content[at : at + 4] == height.to_bytes(2) + width.to_bytes(2):
            return image.content, bounds  # as a crop's file says its size
    part = crop_file(
        image.content,
        image.index,
        image.size,
        (top, left, min(bottom, height), min(right, width)),
    )
    above, to_left = part.top // scale, part.left // scale
    top, left, bottom, right = bounds
    return part.image, (top - above, left - to_left, bottom - above, right - to_left)


def _check_size(image: StoredImage, size: tuple[int, ...]) -> None:
    if size != image.size:
        raise BadImageError(
            f"it has {size[0]} x {size[1]} pixels, but the data set says {image.size[0]} x "
            f"{image.size[1]}"
        )


def open_image(image: bytes | memoryview) -> Image.Image:
    """Pillow's image of a file of `IMAGE_FORMATS`; raises what Pillow raises."""
    return Image.open(io.BytesIO(image), formats=IMAGE_FORMATS)


def pixels_of(image: Image.Image) -> UInt8Array:
    """The pixels of Pillow's image as `decode` gives them; raises what Pillow raises, too.

    Raises:
        BadImageError: they are floats.
    """
    if image.mode.startswith("I;16") or image.mode == "I":
        grey = np.asarray(image)
        # Values that all fit into 8 bits are taken as 8-bit values, as in Pillow.
        eight = (grey.astype(np.int64) >> (8 if grey.max() > 255 else 0)).clip(0, 255)
        return np.repeat(eight.astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise BadImageError("its pixels are floats of unknown range")
    return np.asarray(image.convert("RGB"))


def _decode_other(image: bytes | memoryview) -> UInt8Array:
    if not len(image):
        raise BadImageError("it has no bytes")
    try:
        with open_image(image) as opened:
            return pixels_of(opened)
    except BadImageError:
        raise
    except UnidentifiedImageError:
        raise BadImageError(f"not decodable: it is not one of {', '.join(IMAGE_FORMATS)}") from None
    except Exception as error:  # Pillow's plugins raise anything from SyntaxError to struct.error
        reason = _ADDRESS.sub("", str(error))
        raise BadImageError(f"not decodable: {type(error).__name__}: {reason}") from error


def _looked_at(pixels: UInt8Array, box: CropBox, augmentation: Augmentation) -> UInt8Array:
    """From a whole image within its border the part for a crop; for an exact crop, all of it."""
    height, width, border = *pixels.shape[:2], augmentation.border
    if min(height, width) <= 2 * border:
        raise BadImageError(f"{width}x{height} pixels are nothing but the border of {border}")
    pixels = pixels[border : height - border, border : width - border]
    if augmentation.is_exact:
        return pixels
    top, left, bottom, right = box.bounds(pixels.shape[:2])
    return pixels[top:bottom, left:right]


def _resized(
    crop: UInt8Array, box: CropBox, augmentation: Augmentation, out: UInt8Array
) -> UInt8Array:
    """All of some pixels; for an exact crop, the rectangle `box` of them."""
    height, width = out.shape[:2]
    if augmentation.interpolation == "bicubic":
        edges = None
        if augmentation.is_exact:
            bottom, right = box.top + box.height, box.left + box.width
            edges = box.left, box.top, min(right, crop.shape[1]), min(bottom, crop.shape[0])
        made = Image.fromarray(crop).resize((width, height), Image.Resampling.BICUBIC, edges)
        out[:] = np.asarray(made)[:, :: -1 if box.is_flipped else 1]
        return out
    if augmentation.is_exact:
        return resize_exactly(crop, box, out)
    shrinks = crop.shape[0] / height, crop.shape[1] / width
    method = cv2.INTER_LINEAR
    if max(shrinks) >= _AVERAGED_FROM:
        method = cv2.INTER_AREA
    elif max(shrinks) >= _BLURRED_FROM:
        # Standard deviations in source pixels: best PSNR against Pillow over factors of 1 to 4.
        down, across = (max(0.1, 0.45 * math.sqrt(max(0.0, s * s - 1))) for s in shrinks)
        crop = cv2.GaussianBlur(crop, (3, 3), across, sigmaY=down)  # type: ignore[assignment]
    target = np.empty_like(out) if box.is_flipped else out
    cv2.resize(crop, (width, height), dst=target, interpolation=method)
    if box.is_flipped:
        cv2.flip(target, 1, dst=out)
    return out
