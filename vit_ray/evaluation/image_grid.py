"""Many images as one picture: small squares in rows, with lines of text below each."""

import io
import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

UInt8Array = NDArray[np.uint8]

SIDE: Final = 96
"""Pixels of a square's side in a strip."""
_COLUMNS, _LARGE_SIDE = 8, 160
"""Squares in a row of a sheet, and pixels of their sides."""
_LINE: Final = 14
"""Pixels of a line of text."""


def square(image: UInt8Array, side: int = SIDE) -> UInt8Array:
    """(H, W, 3) scaled to fit (side, side, 3), on black; pixels of a small image stay visible."""
    scaling = Image.Resampling.NEAREST if max(image.shape) < side else Image.Resampling.BOX
    return np.asarray(ImageOps.pad(Image.fromarray(image), (side, side), scaling))


def strip(images: Sequence[UInt8Array], captions: Sequence[Sequence[str]] = ()) -> bytes:
    """Images in one row of squares, as JPEG; `captions`: lines of text for each."""
    jpeg = io.BytesIO()
    _grid(images, captions, SIDE, len(images)).save(jpeg, "JPEG", quality=85)
    return jpeg.getvalue()


def sheet(images: Sequence[UInt8Array], captions: Sequence[str], title: str) -> Image.Image:
    """A title, and below it images with a line each, eight in a row."""
    return _grid(images, [[text] for text in captions], _LARGE_SIDE, _COLUMNS, title)


def _grid(
    images: Sequence[UInt8Array],
    captions: Sequence[Sequence[str]],
    side: int,
    columns: int,
    title: str = "",
) -> Image.Image:
    font = ImageFont.load_default(_LINE - 2)
    columns, header = min(columns, max(1, len(images))), 2 * _LINE if title else 0
    height = side + _LINE * max(map(len, captions), default=0)
    width = max(columns * side, math.ceil(font.getlength(title)) + 8)
    grid = Image.new("RGB", (width, header + -(-len(images) // columns) * height), "white")
    draw = ImageDraw.Draw(grid)
    draw.text((4, 4), title, "black", font)
    for number, (image, lines) in enumerate(zip_longest(images, captions, fillvalue=())):
        left, top = number % columns * side, header + number // columns * height
        grid.paste(Image.fromarray(square(np.asarray(image), side)), (left, top))
        for row, line in enumerate(lines):
            text = " ".join(str(line).split())
            while draw.textlength(text, font) > side - 4:
                text = text[:-2]
            draw.text((left + 2, top + side + row * _LINE), text, "black", font)
    return grid
