"""Resizing of a rectangle with fractional corners, close to Pillow's bilinear filter.

That filter weighs the pixels around each output pixel by a triangle as wide as the image shrinks.
Here a short filter is followed by bilinear interpolation; together they are close to that triangle.
Because the rectangle is not rounded to whole pixels, as `crops` does for training, nothing is
stretched or moved.
"""

import math
from functools import lru_cache
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from vit_ray.data.boxes import CropBox

UInt8Array = NDArray[np.uint8]

MOST_SKIPPED: Final = 4
"""Pixels before the rectangle from which it may be resized, so that it starts at a whole one."""
_NEAR: Final = 1 / 12
"""Share of a pixel by which the resized rectangle may be off."""
_STEPS: Final = 64
"""Points per pixel at which the filter is compared with the triangle; shrink factors are rounded to
it."""


def filter_reach(shrink: float, widths: int = 1) -> int:
    """Pixels on each side of one that the filter needs, for an image that shrinks by this factor.

    Args:
        widths: 1 for bilinear, 2 for bicubic, whose filter is twice as wide, also without
            antialiasing.
    """
    if widths > 1:
        return math.ceil(widths * max(shrink, 1.0))
    return max(1, round(shrink)) if shrink > 1 else 0


def resize_exactly(pixels: UInt8Array, box: CropBox, out: UInt8Array) -> UInt8Array:
    """Write a rectangle of some pixels (fractions allowed) resized to `out`, uint8 (h, w, 3)."""
    height, width = out.shape[:2]
    down, across = box.height / height, box.width / width
    rows, columns = _aligned(box.top, down), _aligned(box.left, across)
    if rows is None or columns is None:
        return _warped(_filtered(pixels, down, across), box, out)
    # A plain resize takes a third of the time of a warp.
    (top, above), (left, before) = rows, columns
    bottom = math.ceil(top + (above + height) * down) + filter_reach(down) + 1
    right = math.ceil(left + (before + width) * across) + filter_reach(across) + 1
    region = _filtered(pixels[top:bottom, left:right], down, across)
    made = cv2.resize(region, None, fx=1 / across, fy=1 / down, interpolation=cv2.INTER_LINEAR)
    crop = made[above : above + height, before : before + width]
    if crop.shape != out.shape:  # the last pixel begins beyond the image's middle of it
        return _warped(_filtered(pixels, down, across), box, out)
    out[:] = crop[:, ::-1] if box.is_flipped else crop
    return out


def _aligned(first: float, step: float) -> tuple[int, int] | None:
    """A whole source pixel, and how many output pixels from it the rectangle begins, if close."""
    for skipped in range(int(min(MOST_SKIPPED, first) / step) + 1):
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
    """The filter that makes bilinear interpolation the triangle of a shrink factor, by least
    squares; its sum is 1.

    Bilinear interpolation is a triangle of width 1 around each pixel.
    """
    shrink = shrink_steps / _STEPS
    reach = filter_reach(shrink)
    if not reach:
        return np.ones(1)
    places = np.arange(-(reach + 1) * _STEPS, (reach + 1) * _STEPS + 1) / _STEPS

    def triangle(centre: int, width: float) -> NDArray[np.float64]:
        return np.maximum(0, 1 - np.abs(places - centre) / width) / width

    middle = triangle(0, 1)
    pairs = [triangle(i, 1) + triangle(-i, 1) - 2 * middle for i in range(1, reach + 1)]
    outer = np.linalg.lstsq(np.stack(pairs, axis=1), triangle(0, shrink) - middle, rcond=None)[0]
    return np.concatenate([outer[::-1], [1 - 2 * outer.sum()], outer])


def _warped(pixels: UInt8Array, box: CropBox, out: UInt8Array) -> UInt8Array:
    height, width = out.shape[:2]
    down, across = box.height / height, box.width / width
    left, step = (box.left + box.width, -across) if box.is_flipped else (box.left, across)
    matrix = np.array([[step, 0, left + (step - 1) / 2], [0, down, box.top + (down - 1) / 2]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    cv2.warpAffine(
        pixels, matrix, (width, height), dst=out, flags=flags, borderMode=cv2.BORDER_REPLICATE
    )
    return out
