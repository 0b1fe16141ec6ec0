"""Images for display: a row of squares with captions, and facts about each image as JSON.

The facts are `sample`, the image's number; `classes`, the names of the labels; and `predicted`, the
`probability` of that class and `loss`, which are null without a prediction.
"""

import io
import json
import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

UInt8Array = NDArray[np.uint8]

SIDE: Final = 96  # pixels of a square's side in a row
NUM_TRAINING: Final = 24  # training crops in the row of squares
MAX_LABELS: Final = 8  # labels shown for an image
_LINE: Final = 14  # pixels of a line of text


def square(image: UInt8Array, side: int = SIDE) -> UInt8Array:
    """(H, W, 3) scaled to fit (side, side, 3), on black; pixels of a small image stay visible."""
    scaling = Image.Resampling.NEAREST if max(image.shape) < side else Image.Resampling.BOX
    return np.asarray(ImageOps.pad(Image.fromarray(image), (side, side), scaling))


def sheet(images: Sequence[UInt8Array], captions: Sequence[str], title: str) -> Image.Image:
    """A title, and below images with a line of text each, eight in a row."""
    return _grid(images, [[text] for text in captions], side=160, columns=8, title=title)


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
        x, y = number % columns * side, header + number // columns * height
        grid.paste(Image.fromarray(square(np.asarray(image), side)), (x, y))
        for row, line in enumerate(lines):
            text = " ".join(str(line).split())
            while draw.textlength(text, font) > side - 4:
                text = text[:-2]
            draw.text((x + 2, y + side + row * _LINE), text, "black", font)
    return grid


def training_files(
    images: UInt8Array, samples: Sequence[int], labels: NDArray[np.int32], classes: Sequence[str]
) -> dict[str, bytes]:
    """Crops of training images (B, H, W, 3), as `picture`."""
    facts = [
        {
            "sample": int(sample),
            "classes": [classes[label] for label in padded[:MAX_LABELS] if label >= 0],
            "predicted": None,
            "probability": None,
            "loss": None,
        }
        for sample, padded in zip(samples, labels.tolist(), strict=True)
    ]
    return picture("training", list(images), facts)


def picture(
    name: str, images: Sequence[UInt8Array], facts: Sequence[dict[str, Any]]
) -> dict[str, bytes]:
    """The row of squares as JPEG and facts about each as JSON; nothing if there are no images."""
    if not images:
        return {}
    captions = []
    for of_image in facts:
        lines = [f"true: {', '.join(of_image['classes']) or 'no label'}"]
        if of_image["predicted"] is not None:
            lines += [f"pred.: {of_image['predicted']}", f"{of_image['probability']:.1%}"]
        captions.append(lines)
    jpeg = io.BytesIO()
    _grid(images, captions, SIDE, len(images)).save(jpeg, "JPEG", quality=85)
    return {
        f"{name}.jpg": jpeg.getvalue(),
        f"{name}.json": json.dumps(facts, indent=1).encode(),
    }
