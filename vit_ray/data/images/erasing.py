"""Random erasing (Zhong et al., arXiv:1708.04896) of a finished crop: uint8 in, uint8 out.

As timm's `mode=pixel`, which DeiT uses: a rectangle becomes standard normal noise, drawn for each
pixel and channel, in images normalized by ImageNet's mean and deviation. The same noise is added
here before normalization, so values outside of 0 to 255 are clipped.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Final

import numpy as np

from vit_ray.data.images.randaugment import Operation, UInt8Array
from vit_ray.data.order.keyed_random import KeyedUniform

# timm's defaults (`timm/data/random_erasing.py`), which DeiT keeps.
_AREAS: Final = (0.02, 1 / 3)
_LOG_ASPECTS: Final = (math.log(0.3), math.log(1 / 0.3))
_ATTEMPTS: Final = 10
_IMAGENET: Final = ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))
"""Mean and standard deviation of each channel, of pixels in [0, 1]."""


@dataclass(frozen=True)
class RandomErasing:
    """Noise in a rectangle of some images.

    Attributes:
        probability: share of the images that have one.
    """

    probability: float

    def __call__(self, pixels: UInt8Array, random: KeyedUniform) -> UInt8Array:
        """Changed pixels of the same shape, uint8 (height, width, 3)."""
        found = pixels.copy()
        for one in self.draw(pixels.shape[:2], random):
            top, left, height, width = map(int, one.numbers)
            bits = random.words(-(-height * width * 3 // 4)).astype("<u8").view("<u2")
            noise = bits[: height * width * 3].reshape(height, width, 3)
            for channel, levels in enumerate(_noise_levels()):
                found[top : top + height, left : left + width, channel] = levels[
                    noise[..., channel]
                ]
        return found

    def draw(self, size: tuple[int, ...], random: KeyedUniform) -> list[Operation]:
        """Top, left, height and width in pixels of the rectangle, if there is one.

        Args:
            size: height and width.
        """
        if random.draw() >= self.probability:
            return []
        for _ in range(_ATTEMPTS):
            area = random.between(*_AREAS) * size[0] * size[1]
            aspect = math.exp(random.between(*_LOG_ASPECTS))
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if height < size[0] and width < size[1]:
                top, left = random.below(size[0] - height + 1), random.below(size[1] - width + 1)
                return [Operation("erase", (top, left, height, width))]
        return []


@lru_cache(maxsize=1)
def _noise_levels() -> list[UInt8Array]:
    """For each channel the pixel for each of 2^16 equally likely words."""
    normal = NormalDist()
    drawn = np.array([normal.inv_cdf((word + 0.5) / 65536) for word in range(65536)])
    return [
        (255 * (mean + deviation * drawn)).round().clip(0, 255).astype(np.uint8)
        for mean, deviation in _IMAGENET
    ]
