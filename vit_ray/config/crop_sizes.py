"""The size of training crops over a run that changes it by step ("progressive resizing").

Small, cheap images first, the model's own size last (EfficientNetV2, arXiv:2104.00298; FixRes,
arXiv:1906.06423, shows why the last steps need the full size).
"""

import itertools
from dataclasses import dataclass

from vit_ray.config.section import ImageSize


@dataclass(frozen=True)
class CropSizes:
    """`pieces` are (first step, pixels of a side or (height, width)), the first from step 0 on."""

    pieces: tuple[tuple[int, ImageSize], ...]

    def __str__(self) -> str:
        return ", ".join(f"{size} from step {first}" for first, size in self.pieces)

    def shares(self, total_steps: int) -> list[list[object]]:
        """`data.augment.sizes` by which a run of so many steps has them at the same steps."""
        # Of fewer than 10^8 steps eight decimals give each step.
        return [[round(first / total_steps, 8), size] for first, size in self.pieces]

    def lengths(self, steps: float) -> list[tuple[ImageSize, float]]:
        """How many of a run's first steps have each size, in order; only sizes that occur."""
        firsts = [min(first, steps) for first, _ in self.pieces]
        ends = itertools.pairwise([*firsts, steps])
        found = [(size, b - a) for (_, size), (a, b) in zip(self.pieces, ends, strict=True)]
        return [(size, count) for size, count in found if count]


def crop_sizes(
    sizes: tuple[tuple[float, int], ...], image_size: ImageSize, total_steps: int
) -> CropSizes:
    """The crop sizes of a run; a size that no step would have is left out.

    Args:
        sizes: `data.augment.sizes`; none = all crops have the model's size.
        image_size: of the model.
    """
    # Of those that begin at the same step, the last decides.
    pieces = {round(share * total_steps): side for share, side in sizes}
    pieces.pop(total_steps, None)
    found: list[tuple[int, ImageSize]] = []
    for first, size in pieces.items():
        if not found or found[-1][1] != size:
            found.append((first, size))
    return CropSizes(tuple(found) or ((0, image_size),))
