"""Uniform borders around a picture: letterboxes, frames, and bars along one side."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_LARGEST: Final = 0.35
"""Share of the height or width that a border on one side may have."""
_SPREAD: Final = 5.0
"""Standard deviation in grey levels within a line of a border, with the noise of JPEG."""
_SAME: Final = 10.0
"""Grey levels by which the lines of a border may differ from the outermost one."""
_EDGE: Final = 0.4
"""Share of the pixels inside a border that differ from it: few for an object on a plain sky."""


def without_borders(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The part of an RGB image, as a view, that its uniform borders enclose.

    On each side with a border one more line is removed: it is mixed with the picture.
    """
    top, bottom = _border(pixels), _border(pixels[::-1])
    pixels = pixels[top : len(pixels) - bottom]
    across = pixels.transpose(1, 0, 2)
    left, right = _border(across), _border(across[::-1])
    return pixels[:, left : pixels.shape[1] - right]


def _border(pixels: NDArray[np.uint8]) -> int:
    """How many of the first lines are a border."""
    some = pixels[: int(len(pixels) * _LARGEST)].astype(np.float32)
    means = some.mean(axis=1)
    is_border = (some.std(axis=1) < _SPREAD) & (np.abs(means - means[:1]) < _SAME)
    differs = np.flatnonzero(~is_border.all(axis=1))
    # If lines are uniform up to the limit, the picture has one colour there, and no border.
    if not len(differs) or not differs[0]:
        return 0
    width = int(differs[0]) + 1
    behind = np.abs(pixels[width].astype(np.float32) - means[0]).max(axis=1)
    return width if (behind > 2 * _SAME).mean() >= _EDGE else 0
