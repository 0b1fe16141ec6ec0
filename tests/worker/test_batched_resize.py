"""Many regions resized at once, against torch's antialiased `interpolate` of each."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vit_ray.worker.decode import batched_resize
from vit_ray.worker.decode.batched_resize import resize_regions

SHAPES = [(7, 9), (24, 32), (100, 33), (25, 31), (1, 1), (63, 200), (24, 33)]


def regions() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (*shape, 3), generator=generator, dtype=torch.uint8)
        for shape in SHAPES
    ]


def resized(
    regions: list[torch.Tensor], size: tuple[int, int], flips: list[bool] | None = None
) -> torch.Tensor:
    images = torch.zeros((len(regions), *size, 3), dtype=torch.uint8)
    resize_regions(dict(enumerate(regions)), flips or [False] * len(regions), images)
    return images


@pytest.mark.parametrize("most_pixels", [1, 5_000, 1 << 24])
@pytest.mark.parametrize("size", [(24, 32), (16, 16)])
def test_each_is_what_torch_makes_of_it(
    size: tuple[int, int], most_pixels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched_resize, "MOST_PIXELS", most_pixels)
    flips = [i % 2 == 1 for i in range(len(SHAPES))]
    found = resized(regions(), size, flips)
    for image, region, is_flipped in zip(found, regions(), flips, strict=True):
        ppools = region.permute(2, 0, 1)[None].double()
        exact = F.interpolate(ppools, size, mode="bilinear", antialias=True, align_corners=False)
        expected = exact[0].permute(1, 2, 0)
        if is_flipped:
            expected = expected.flip(1)
        # Rounded to a whole number, of weights that are rounded to 1 / 2^16.
        assert (image.double() - expected).abs().max() <= 0.52


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("size", [(24, 32), (224, 224)])
def test_an_image_is_the_same_to_the_last_bit_in_any_company(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    sides = torch.randint(20, 300, (12, 2), generator=generator).tolist()
    photos = [
        torch.randint(0, 256, (high, wide, 3), generator=generator, dtype=torch.uint8)
        for high, wide in sides
    ]
    alone = torch.cat([resized([photo], size) for photo in photos])
    for count in (2, 3, 7, 12):
        pieces = [photos[i : i + count] for i in range(0, len(photos), count)]
        assert torch.equal(torch.cat([resized(piece, size) for piece in pieces]), alone)


@pytest.mark.parametrize("value", [1, 254, 255])
def test_an_even_colour_keeps_its_value(value: int) -> None:
    even = torch.full((1201, 7, 3), value, dtype=torch.uint8)
    assert (resized([even], (16, 16)) == value).all()


def test_images_that_grow_are_not_all_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_resize, "MOST_PIXELS", 2 * 64 * 64)
    rows = [1, 2, 3, 5, 8]
    groups = batched_resize._groups({i: torch.zeros(8, 8, 3) for i in rows}, (64, 64))
    assert [len(group) for group in groups] == [2, 2, 1]


def test_rows_of_no_region_stay_as_they_are() -> None:
    images = torch.full((3, 4, 4, 3), 7, dtype=torch.uint8)
    resize_regions({1: torch.zeros(5, 5, 3, dtype=torch.uint8)}, [False] * 3, images)
    assert images.amax((1, 2, 3)).tolist() == [7, 0, 7]


class Operations(TorchDispatchMode):
    """Counts torch's operations, views aside; the copy of a list of regions is one of them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_grow_with_that_of_images() -> None:
    counts = []
    for repeats in (1, 10):
        with Operations() as operations:
            resized(regions()[:2] * repeats, (16, 16))
        counts.append(operations.count)
    assert counts[0] == counts[1] < 90
