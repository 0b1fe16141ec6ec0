"""Many images as one picture for display: small squares in a row or a grid."""

import io
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

UInt8Array = NDArray[np.uint8]
_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

SIDE: Final = 96
"""Pixels of a square's side."""
_COLUMNS: Final = 8
_LARGE: Final = 160
"""Pixels of the side of a sheet's square."""
_LINE: Final = 14
"""Pixels of the line below it, of its letters, and of the gaps."""
_SMALL: Final = 12
"""Pixels of the letters below the squares of a row."""


def square(image: UInt8Array, side: int = SIDE) -> UInt8Array:
    """(H, W, 3) scaled to fit (side, side, 3), on black; pixels of a small image stay visible."""
    scale = side / max(image.shape[:2])
    height, width = (max(1, round(length * scale)) for length in image.shape[:2])
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX
    drawn = Image.new("RGB", (side, side))
    place = (side - width) // 2, (side - height) // 2
    drawn.paste(Image.fromarray(image).resize((width, height), how), place)
    return np.asarray(drawn)


def strip(squares: Sequence[UInt8Array], captions: Sequence[Sequence[str]] = ()) -> bytes:
    """Squares of one size in a row, as JPEG, with lines of text below each.

    Args:
        captions: lines of each square, cut to its width.
    """
    row = Image.fromarray(np.concatenate(squares, axis=1))
    num_lines = max(map(len, captions), default=0)
    image = Image.new("RGB", (row.width, row.height + num_lines * _LINE), "white")
    image.paste(row)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(_SMALL)
    side = row.width // len(squares)
    for number, lines in enumerate(captions):
        for index, text in enumerate(lines):
            place = number * side + 2, row.height + index * _LINE
            draw.text(place, _cut(draw, text, side - 4, font), "black", font)
    drawn = io.BytesIO()
    image.save(drawn, "JPEG", quality=85)
    return drawn.getvalue()


def _cut(draw: ImageDraw.ImageDraw, text: str, width: int, font: _Font) -> str:
    """The beginning of a text in one line that is this many pixels wide, or all of it."""
    text = " ".join(text.split())
    while draw.textlength(text, font) > width:
        text = text[:-2]
    return text


def sheet(images: Sequence[UInt8Array], captions: Sequence[str], title: str) -> Image.Image:
    """A title, and below it images with a line each, eight in a row."""
    columns, height = min(_COLUMNS, len(images)), _LARGE + 2 * _LINE
    rows = -(-len(images) // columns)
    font = ImageFont.load_default(_LINE)
    width = max(columns * _LARGE, math.ceil(font.getlength(title)) + 8)
    drawn = Image.new("RGB", (width, rows * height + 2 * _LINE), "white")
    draw = ImageDraw.Draw(drawn)
    draw.text((4, 4), title, "black", font)
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = number % columns * _LARGE, number // columns * height + 2 * _LINE
        drawn.paste(Image.fromarray(square(image, _LARGE - 4)), (left + 2, top))
        text = _cut(draw, caption, _LARGE - 4, font)
        draw.text((left + 2, top + _LARGE - 2), text, "black", font)
    return drawn
