"""Whether two thumbnails show the same picture: confirms that close hashes are no coincidence.

One thumbnail is aligned with the other (a crop moves and scales it), gain and offset of brightness
are fitted, and the share of the pixels that differ most, for example from a text or a logo, is left
out. The rest must agree both relative to the picture's contrast, so that two dull pictures are not
the same, and in grey levels, so that two digits or two logos are not.
"""

import contextlib
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from vit_ray.data.images.perceptual_hash import Crop

SIDE: Final = 64
"""Height and width of the thumbnails in pixels; the aspect of the picture is not kept."""

_BLUR: Final = 1.0
_ERROR_BLUR: Final = 3.0
"""Standard deviations in pixels, for the compared images and for their difference: recompression
and resizing of small pictures change fine detail, which averages out, and two pictures differ in
more.
"""
_COARSE: Final = 3.0
"""Standard deviation in pixels above which structure does not count as fine."""
_LEAST_ALIKE: Final = 0.65
_LEAST_ALIKE_KEPT: Final = 0.78
_LEAST_LEFT: Final = 0.5
"""Correlations and a share of fine structure: 41 pairs of CIFAR-10 that show different objects on a
plain background, and were the same otherwise, are all distinguished by them."""
_LEFT_OUT: Final = 0.1
_LEAST_EXPLAINED: Final = 0.95
_MOST_LEVELS: Final = 5.0
"""Share of the variance, and root mean square in grey levels. None of 250 distinct 8 x 8 digits was
taken for one of 400 others; at 6 levels 2 were, and with 15 % left out 3 at 5 levels."""
_BORDER: Final = 2
_GREY_BELOW: Final = 3.0
_STOP: Final = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 30, 1e-4)
_SCALES: Final = (0.73, 1.08)
_MOST_SHEAR: Final = 0.06
"""Shifts as by a crop, and by a rotation of 3 degrees."""
_WHITE: Final = 255.0
_SATURATED: Final = 250.0
"""Pixels of at least this brightness may be clipped, and are not used for gain and offset."""
_LEAST_FITTED: Final = 0.2
"""Share of the pixels below which gain and offset are fitted to all."""


def shows_the_same(picture: NDArray[np.uint8], other: NDArray[np.uint8], crop: Crop) -> bool:
    """Whether `picture` is `other`, or a crop of it close to the given one.

    Args:
        picture, other: uint8 (64, 64, 3), RGB.
        crop: the part of `other`.
    """
    aligned, inside = _aligned(picture, other, crop), slice(_BORDER, SIDE - _BORDER)
    seen, expected = (
        cv2.GaussianBlur(image, (0, 0), _BLUR)[inside, inside].astype(np.float32)
        for image in (picture, aligned)
    )
    if min(float(np.ptp(image, axis=2).mean()) for image in (seen, expected)) < _GREY_BELOW:
        to_grey = np.array([[0.299], [0.587], [0.114]], np.float32)
        seen, expected = seen @ to_grey, expected @ to_grey
    is_open = seen.max(axis=2) < _SATURATED
    kept = np.ones(seen.shape[:2], bool)
    for _ in range(4):
        # The residual of the best gain and offset for the kept pixels.
        fitted = kept & is_open if (kept & is_open).mean() >= _LEAST_FITTED else kept
        x, y = expected[fitted].ravel(), seen[fitted].ravel()
        centred = x - x.mean()
        gain = max(0.0, float(centred @ (y - y.mean()))) / max(float(centred @ centred), 1e-6)
        fit = y.mean() + np.float32(gain) * (expected - x.mean())
        residual = seen - np.minimum(fit, _WHITE)
        errors = np.square(residual).mean(axis=2)
        kept = errors <= np.quantile(errors, 1 - _LEFT_OUT)
    unexplained = float(np.square(_blurred(residual, kept)[kept]).mean())
    variance = float(_blurred(seen, kept)[kept].var())
    most = _MOST_LEVELS * max(1.0, gain)  # what differs was brightened with the picture
    is_explained = unexplained <= min((1 - _LEAST_EXPLAINED) * variance, most**2)
    return is_explained and _agree_in_detail(picture, aligned)


def _agree_in_detail(picture: NDArray[np.uint8], aligned: NDArray[np.uint8]) -> bool:
    """Whether two pictures have the same fine structure, where they do not differ most.

    Either all of it correlates, or the part left out, such as a text on one of them, holds the
    smaller part of it in both: two different objects on a plain sky differ in everything there is.
    """
    inside = slice(_BORDER, SIDE - _BORDER)
    grey = (cv2.cvtColor(p, cv2.COLOR_RGB2GRAY).astype(np.float32) for p in (picture, aligned))
    one, two = (
        (cv2.GaussianBlur(g, (0, 0), _BLUR) - cv2.GaussianBlur(g, (0, 0), _COARSE))[inside, inside]
        for g in grey
    )
    gain = max(0.0, float((one * two).sum())) / max(float(np.square(two).sum()), 1e-6)
    errors = np.abs(one - np.float32(gain) * two)
    kept = errors <= np.quantile(errors, 1 - _LEFT_OUT)
    shares = [np.square(image[kept]).sum() / np.square(image).sum() for image in (one, two)]
    is_whole = _correlation(one, two) >= _LEAST_ALIKE or min(shares) >= _LEAST_LEFT
    return is_whole and _correlation(one[kept], two[kept]) >= _LEAST_ALIKE_KEPT


def _correlation(one: NDArray[np.float32], two: NDArray[np.float32]) -> float:
    return float(np.corrcoef(one.ravel(), two.ravel())[0, 1])


def _blurred(values: NDArray[np.float32], kept: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Each value's weighted mean with the kept values around it."""
    weights = kept.astype(np.float32)[:, :, None]
    total = cv2.GaussianBlur(values * weights, (0, 0), _ERROR_BLUR)
    weight = cv2.GaussianBlur(weights, (0, 0), _ERROR_BLUR)
    mean = total.reshape(values.shape) / np.maximum(weight, 1e-3)[:, :, None]
    return mean.astype(np.float32)


def _aligned(picture: NDArray[np.uint8], other: NDArray[np.uint8], crop: Crop) -> NDArray[np.uint8]:
    """`other` moved and scaled onto `picture`, by Evangelidis and Psarakis (TPAMI 2008)."""
    top, left, height, width = crop
    start = np.array(
        [
            [width, 0, left * SIDE + (width - 1) / 2],
            [0, height, top * SIDE + (height - 1) / 2],
        ],
        np.float32,
    )
    warp = start
    one, two = (cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY) for pixels in (picture, other))
    with contextlib.suppress(cv2.error):  # the two do not correlate
        _, found = cv2.findTransformECC(one, two, start.copy(), cv2.MOTION_AFFINE, _STOP)
        (across, shear_x, _), (shear_y, down, _) = found
        is_scaled = all(_SCALES[0] < scale < _SCALES[1] for scale in (across, down))
        if is_scaled and max(abs(shear_x), abs(shear_y)) < _MOST_SHEAR:
            warp = found.astype(np.float32)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(  # type: ignore[return-value]
        other, warp, (SIDE, SIDE), flags=flags, borderMode=cv2.BORDER_REPLICATE
    )
