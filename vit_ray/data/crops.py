"""Training and evaluation crops of encoded images, as uint8.

A plain JPEG is decoded by OpenCV at scale 1/1, 1/2, 1/4 or 1/8, the coarsest that still has the
pixels that the crop needs; with a restart index, only the segments that the crop touches are
decoded. A training crop is cut at whole pixels of that scale around its box; an exact crop (for
evaluation) is cut at fractions of pixels. All other images (CMYK, palette, 16 bits, alpha, other
formats) are decoded by Pillow. EXIF orientation is not applied, as in Pillow's `convert("RGB")` and
in the TensorFlow pipeline of the ViT paper.
"""

import math
from functools import lru_cache
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vit_ray.data.boxes import Augmentation, CropBox, draw_box
from vit_ray.data.images import BadImageError, UInt8Array, decode, decode_by_pillow
from vit_ray.data.jpeg import decode_jpeg, size_of_jpeg
from vit_ray.data.restart_index import Box, StoredImage, crop_file

# Pixels by which resizing of an exact crop may start earlier, to start at a whole pixel.
_MAX_SKIPPED: Final = 4
# Fraction of a pixel by which an exact crop may be off.
_NEAR: Final = 1 / 12
# Points per pixel at which the filter of exact crops is fitted to the triangle; shrink factors are
# rounded to multiples of 1 / _STEPS.
_STEPS: Final = 64
# Minimum shrink factor of a training crop, and of an exact crop, that is decoded at 1/8, 1/4 or
# 1/2: the decoder's averages over 8, 4 or 2 pixels differ from Pillow's filter, most if little
# shrinking is left. PSNR of exact crops of 64 pixels: 47.9 dB, and 39 with the coarsest decode.
_MIN_SHRINK: Final = {8: 8.0, 4: 4.0, 2: 2.0, 1: 0.0}
_MIN_SHRINK_EXACT: Final = {8: 8 * 1.4, 4: 4 * 1.3, 2: 2 * 1.2, 1: 0.0}
# How shrinking avoids aliasing: bilinear alone below the first factor, a 3 x 3 Gaussian before
# bilinear up to the second, averaged areas above; the Gaussian takes a third of the time of areas.
#
# PSNR against Pillow's antialiased bilinear resize, mean over training crops of ImageNet
# photographs: 47.9 dB for sides that shrink by 1 to 1.25, 42.7 to 1.6, 46.0 to 2, 41.5 to 4 and
# 36.9 above (bilinear without any of this: 47.9, 39.0, 36.3, 32.5 and 29.4). Over all training
# crops of 200 photographs: mean 47.2 dB and worst 30.7 at 224 pixels, 35.6 and 21.0 at 64; the
# lowest values are for crops that a coarse decode rounds to its whole pixels. Evaluation crops
# are exact (`Augmentation.is_exact`): mean 45.3 dB and worst 32.3 for 224 of 256 pixels, where a
# cut at whole pixels has 34.3 and 22.0; 44.8 and 28.9 for 128 of 146; 47.7 and 34.1 for 64 of 73.
_BLURRED_FROM: Final = 1.25
_AVERAGED_FROM: Final = 2.5


def crop(
    image: StoredImage | UInt8Array, box: CropBox, augmentation: Augmentation, out: UInt8Array
) -> UInt8Array:
    """Write a rectangle of an image, resized, to `out`, uint8 of `augmentation.shape`.

    Args:
        image: a file, of which only the part that the crop needs is decoded; or all pixels.

    Raises:
        BadImageError: the file cannot be decoded.
    """
    if isinstance(image, StoredImage):
        pixels, box = _decoded(image, box, augmentation)
    else:
        pixels = _within_border(image, box, augmentation)
    height, width = out.shape[:2]
    if augmentation.interpolation == "bicubic":
        edges = None
        if augmentation.is_exact:
            bottom, right = box.top + box.height, box.left + box.width
            edges = box.left, box.top, min(right, pixels.shape[1]), min(bottom, pixels.shape[0])
        made = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC, edges)
        out[:] = np.asarray(made)[:, :: -1 if box.is_flipped else 1]
        return out
    if augmentation.is_exact:
        return _resize_exactly(pixels, box, out)
    shrinks = pixels.shape[0] / height, pixels.shape[1] / width
    method = cv2.INTER_LINEAR
    if max(shrinks) >= _AVERAGED_FROM:
        method = cv2.INTER_AREA
    elif max(shrinks) >= _BLURRED_FROM:
        # Standard deviations in source pixels: best PSNR against Pillow over factors of 1 to 4.
        down, across = (max(0.1, 0.45 * math.sqrt(max(0.0, s * s - 1))) for s in shrinks)
        pixels = cv2.GaussianBlur(pixels, (3, 3), across, sigmaY=down)  # type: ignore[assignment]
    target = np.empty_like(out) if box.is_flipped else out
    cv2.resize(pixels, (width, height), dst=target, interpolation=method)
    if box.is_flipped:
        cv2.flip(target, 1, dst=out)
    return out


def crop_of(
    image: bytes | UInt8Array,
    augmentation: Augmentation,
    rng_key: tuple[int, int, int],
    out: UInt8Array | None = None,
) -> UInt8Array:
    """The augmented crop of an encoded image, or of pixels, without a data set.

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
        source = decode_by_pillow(image) if size is None else StoredImage(image, size)
    else:
        source = image
    size = source.size if isinstance(source, StoredImage) else source.shape[:2]
    crop(source, draw_box(size, augmentation, rng_key), augmentation, out)
    return augmentation.changed(out, rng_key)


def _decoded(
    image: StoredImage, box: CropBox, augmentation: Augmentation
) -> tuple[UInt8Array, CropBox]:
    """The decoded pixels around a crop, and the crop's box in them."""
    # The coarsest scale at which the crop still has the pixels that the output needs.
    shrinks = box.height / augmentation.height, box.width / augmentation.width
    minimum = _MIN_SHRINK_EXACT if augmentation.is_exact else _MIN_SHRINK
    scale = next(scale for scale in (8, 4, 2, 1) if minimum[scale] <= min(shrinks) or scale == 1)
    needed = _with_margin(image, box, augmentation, scale) if augmentation.is_exact else box
    bounds = needed.bounds(image.size, scale)
    region = None if augmentation.border else _jpeg_region(image, bounds, scale)
    if region is not None:
        content, (top, left, bottom, right) = region
        if (part := decode_jpeg(content, scale)) is not None:
            scaled = CropBox(
                box.top / scale - bounds[0],
                box.left / scale - bounds[1],
                box.height / scale,
                box.width / scale,
                box.is_flipped,
            )
            return part[top:bottom, left:right], scaled
    return _within_border(decode(image.content), box, augmentation), box


def _with_margin(
    image: StoredImage, box: CropBox, augmentation: Augmentation, scale: int
) -> CropBox:
    """The pixels that an exact crop needs: those that its filter reaches, decoded at 1/`scale`."""
    shrinks = box.height / augmentation.height / scale, box.width / augmentation.width / scale
    widths = 2 if augmentation.interpolation == "bicubic" else 1
    rows, columns = ((_filter_reach(shrink, widths) + 1) * scale for shrink in shrinks)
    # A small output is warped in less time than these pixels are decoded.
    skipped = _MAX_SKIPPED * scale if max(shrinks) < 2 else 0
    first_row = max(0.0, box.top - skipped - rows)
    first = max(0.0, box.left - skipped - columns)
    last_row = min(image.size[0], box.top + box.height + rows)
    last = min(image.size[1], box.left + box.width + columns)
    return CropBox(first_row, first, last_row - first_row, last - first, False)


def _jpeg_region(
    image: StoredImage, bounds: Box, scale: int
) -> tuple[bytes | memoryview | UInt8Array, Box] | None:
    """The JPEG file to decode at 1/`scale` for some pixels of that scale, and where it has them.

    None if it is not a plain JPEG; a file of a part of it if it has a restart index.
    """
    if image.index is None:
        return None if size_of_jpeg(image.content) is None else (image.content, bounds)
    height, width = image.size
    top, left, bottom, right = (side * scale for side in bounds)
    if (top, left) == (0, 0) and bottom >= height and right >= width:
        return image.content, bounds
    needed = top, left, min(bottom, height), min(right, width)
    part, part_top, part_left = crop_file(image.content, image.index, image.size, needed)
    above, before = part_top // scale, part_left // scale
    top, left, bottom, right = bounds
    return part, (top - above, left - before, bottom - above, right - before)


def _within_border(pixels: UInt8Array, box: CropBox, augmentation: Augmentation) -> UInt8Array:
    """The crop's part of an image without its border; for an exact crop, the image without it."""
    height, width, border = *pixels.shape[:2], augmentation.border
    if min(height, width) <= 2 * border:
        raise BadImageError(f"{width}x{height} pixels are nothing but the border of {border}")
    pixels = pixels[border : height - border, border : width - border]
    if augmentation.is_exact:
        return pixels
    top, left, bottom, right = box.bounds(pixels.shape[:2])
    return pixels[top:bottom, left:right]


def _filter_reach(shrink: float, widths: int = 1) -> int:
    """Pixels on each side that the filter needs, for an image that shrinks by this factor.

    Args:
        widths: 1 for bilinear; 2 for bicubic, which needs pixels also without shrinking.
    """
    if widths > 1:
        return math.ceil(widths * max(shrink, 1.0))
    return max(1, round(shrink)) if shrink > 1 else 0


def _resize_exactly(pixels: UInt8Array, box: CropBox, out: UInt8Array) -> UInt8Array:
    """Write a rectangle of some pixels resized to `out`, close to Pillow's bilinear filter.

    Pillow weighs the pixels around each output pixel by a triangle as wide as the shrink factor.
    Here a short filter is followed by bilinear interpolation; together they are close to that
    triangle. The rectangle is not rounded to whole pixels, so nothing is stretched or moved.
    """
    height, width = out.shape[:2]
    down, across = box.height / height, box.width / width
    rows, columns = _aligned(box.top, down), _aligned(box.left, across)
    if rows is not None and columns is not None:
        # A plain resize takes a third of the time of a warp.
        (top, above), (left, before) = rows, columns
        bottom = math.ceil(top + (above + height) * down) + _filter_reach(down) + 1
        right = math.ceil(left + (before + width) * across) + _filter_reach(across) + 1
        region = _filtered(pixels[top:bottom, left:right], down, across)
        made = cv2.resize(region, None, fx=1 / across, fy=1 / down, interpolation=cv2.INTER_LINEAR)
        part = made[above : above + height, before : before + width]
        if part.shape == out.shape:  # at the image's edge, a row or column may be missing
            out[:] = part[:, ::-1] if box.is_flipped else part
            return out
    start, step = (box.left + box.width, -across) if box.is_flipped else (box.left, across)
    matrix = np.array([[step, 0, start + (step - 1) / 2], [0, down, box.top + (down - 1) / 2]])
    cv2.warpAffine(
        _filtered(pixels, down, across),
        matrix,
        (width, height),
        dst=out,
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return out


def _aligned(first: float, step: float) -> tuple[int, int] | None:
    """A whole source pixel, and the number of output pixels between it and the rectangle.

    None if no whole pixel shortly before the rectangle fits.
    """
    for skipped in range(int(min(_MAX_SKIPPED, first) / step) + 1):
        start = first - skipped * step
        if abs(start - round(start)) <= _NEAR:
            return max(0, round(start)), skipped
    return None


def _filtered(pixels: UInt8Array, down: float, across: float) -> UInt8Array:
    if max(down, across) <= 1:
        return pixels
    kernels = _kernel(round(across * _STEPS)), _kernel(round(down * _STEPS))
    return cv2.sepFilter2D(pixels, -1, *kernels, borderType=cv2.BORDER_REPLICATE)  # type: ignore[return-value]


@lru_cache(maxsize=1024)
def _kernel(shrink_steps: int) -> NDArray[np.float64]:
    """The filter, of sum 1, after which bilinear interpolation is close to the wide triangle.

    A least-squares fit: bilinear interpolation is a triangle of width 1 around each pixel.
    """
    shrink = shrink_steps / _STEPS
    reach = _filter_reach(shrink)
    if not reach:
        return np.ones(1)
    points = np.arange(-(reach + 1) * _STEPS, (reach + 1) * _STEPS + 1) / _STEPS

    def triangle(centre: int, width: float) -> NDArray[np.float64]:
        return np.maximum(0, 1 - np.abs(points - centre) / width) / width

    middle = triangle(0, 1)
    pairs = [triangle(i, 1) + triangle(-i, 1) - 2 * middle for i in range(1, reach + 1)]
    outer = np.linalg.lstsq(np.stack(pairs, axis=1), triangle(0, shrink) - middle, rcond=None)[0]
    return np.concatenate([outer[::-1], [1 - 2 * outer.sum()], outer])
