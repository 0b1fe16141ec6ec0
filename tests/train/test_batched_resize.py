"""Many regions resized at once, against torch's antialiased `interpolate` of each."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vit_ray.train import batched_resize
from vit_ray.train.batched_resize import resize_regions

SHAPES = [(7, 9), (24, 32), (100, 33), (25, 31), (1, 1), (63, 200), (24, 33)]


def regions() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (*shape, 3), generator=generator, dtype=torch.uint8)
        for shape in SHAPES
    ]


@pytest.mark.parametrize("most_pixels", [1, 5_000, 1 << 24])
@pytest.mark.parametrize("size", [(24, 32), (16, 16)])
def test_each_is_what_torch_makes_of_it(
    size: tuple[int, int], most_pixels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched_resize, "MOST_PIXELS", most_pixels)
    flips = [i % 2 == 1 for i in range(len(SHAPES))]
    found = resize_regions(regions(), size, flips)
    for image, region, is_flipped in zip(found, regions(), flips, strict=True):
        planes = region.permute(2, 0, 1)[None].double()
        exact = F.interpolate(planes, size, mode="bilinear", antialias=True, align_corners=False)
        expected = exact[0].permute(1, 2, 0)
        if is_flipped:
            expected = expected.flip(1)
        assert (image.double() - expected).abs().max() <= 0.501  # rounded to a whole number


class Operations(TorchDispatchMode):
    """Counts what is given to the device; views are not."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_grow_with_that_of_images() -> None:
    counts = []
    for repeats in (1, 10):
        with Operations() as operations:
            resize_regions(regions()[:2] * repeats, (16, 16), [False] * 2 * repeats)
        counts.append(operations.count)
    assert counts[0] == counts[1] < 60
