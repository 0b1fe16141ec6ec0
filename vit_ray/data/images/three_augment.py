"""3-Augment of DeiT III (Touvron et al., arXiv:2204.07118), and colour jitter: uint8 in and out.

All operations are Pillow's, as in the authors' code and in torchvision's for Pillow images.
"""

from dataclasses import dataclass
from typing import Final

from vit_ray.data.images.randaugment import Operation, UInt8Array, applied
from vit_ray.data.order.keyed_random import KeyedUniform

_BLUR_RADII: Final = (0.1, 2.0)  # pixels, as in the authors' augment.py


@dataclass(frozen=True)
class ThreeAugment:
    """One of grey, solarized and blurred, each with probability 1/3."""

    def __call__(self, pixels: UInt8Array, random: KeyedUniform) -> UInt8Array:
        """Changed pixels of the same shape, uint8 (height, width, 3)."""
        return applied(pixels, self.draw(pixels.shape[:2], random))

    def draw(self, _: tuple[int, ...], random: KeyedUniform) -> list[Operation]:
        """The operation for an image, as a list of one."""
        name = ("grey", "solarize", "blur")[random.below(3)]
        return [Operation(name, (random.between(*_BLUR_RADII),) if name == "blur" else ())]


@dataclass(frozen=True)
class ColorJitter:
    """Brightness, contrast and saturation in a random order, as torchvision's `ColorJitter`.

    Attributes:
        strength: each is multiplied by a number from 1 - `strength`, at least 0, to 1 + `strength`.
    """

    strength: float

    def __call__(self, pixels: UInt8Array, random: KeyedUniform) -> UInt8Array:
        """Changed pixels of the same shape, uint8 (height, width, 3)."""
        return applied(pixels, self.draw(pixels.shape[:2], random))

    def draw(self, _: tuple[int, ...], random: KeyedUniform) -> list[Operation]:
        """The operations for an image, in order."""
        left, found = ["brightness", "contrast", "color"], list[Operation]()
        while left:
            name = left.pop(random.below(len(left)))
            factor = random.between(max(0.0, 1.0 - self.strength), 1.0 + self.strength)
            found.append(Operation(name, (factor,)))
        return found
