"""Resizes regions of many sizes to images of one size in a few operations.

The resize is bilinear and antialiased, like Pillow's and torch's `interpolate`: each side is a
matrix of triangles, as wide as the region is reduced. Weights, and values between the two sides,
are whole numbers small enough that every sum is exact: an image is the same bit by bit next to any
other images, on any device. Matrix products must be in float32, not TF32 (torch's default).

All regions share a few operations. Stacking them costs a GPU one copy each.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

# Limit of pixels that are resized together: of the regions, each padded to the largest, or of the
# output images if those are larger. 100 MB as floats, and a few copies exist at a time.
MOST_PIXELS: Final = 1 << 23

# float32 is exact up to 2^24: pixels below 2^8 and weights that add up to 2^16. Between the sides a
# value has 8 more bits, which are summed separately.
_WEIGHT: Final = 1 << 16
_FRACTION: Final = 1 << 8


def resize_regions(regions: Mapping[int, Tensor], flips: Sequence[bool], images: Tensor) -> None:
    """Make an image of each region.

    Args:
        regions: uint8 (h, w, 3) each, on one device, by the row of `images` that each one fills.
        flips: for each row, whether it is mirrored left to right.
        images: uint8 (B, height, width, 3); other rows stay unchanged.
    """
    size = images.shape[1], images.shape[2]
    for rows in _groups(regions, size):
        made = _resized([regions[i] for i in rows], size, torch.tensor([flips[i] for i in rows]))
        images[torch.tensor(rows).to(images.device, non_blocking=True)] = made


def _groups(regions: Mapping[int, Tensor], size: tuple[int, int]) -> Iterator[list[int]]:
    """Rows of regions with similar sizes, of at most `MOST_PIXELS` together, or one alone."""
    group: list[int] = []
    height = width = 0
    for row in sorted(regions, key=lambda i: regions[i].shape[:2]):
        high, wide = regions[row].shape[:2]
        height, width = max(height, high), max(width, wide)
        if group and (len(group) + 1) * max(height * width, size[0] * size[1]) > MOST_PIXELS:
            yield group
            group, height, width = [], high, wide
        group.append(row)
    if group:
        yield group


def _resized(regions: list[Tensor], size: tuple[int, int], flips: Tensor) -> Tensor:
    device = regions[0].device
    heights = torch.tensor([region.shape[0] for region in regions])
    widths = torch.tensor([region.shape[1] for region in regions])
    height, width = int(heights.max()), int(widths.max())
    padded = torch.zeros((len(regions), height, width, 3), dtype=torch.uint8, device=device)
    places = [padded[i, : r.shape[0], : r.shape[1]] for i, r in enumerate(regions)]
    torch._foreach_copy_(places, regions)
    rows = _triangles(heights.to(device, non_blocking=True), size[0], height)
    columns = _triangles(widths.to(device, non_blocking=True), size[1], width)
    columns = torch.where(
        flips.to(device, non_blocking=True)[:, None, None], columns.flip(1), columns
    )
    low_BHwC = (rows @ padded.flatten(2).float()).view(len(regions), size[0], width, 3)
    low_BHwC = low_BHwC.div_(_WEIGHT // _FRACTION).round_()
    whole_BHwC = torch.floor(low_BHwC / _FRACTION)
    low_BHwC -= whole_BHwC * _FRACTION
    parts_BwHCP = torch.stack((whole_BHwC, low_BHwC), -1).transpose(1, 2)
    sums = (columns @ parts_BwHCP.flatten(2)).view(len(regions), size[1], size[0], 3, 2)
    pixels = (sums[..., 0] + sums[..., 1] / _FRACTION).div_(_WEIGHT).transpose(1, 2)
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def _triangles(lengths: Tensor, out: int, most: int) -> Tensor:
    """(B, out, most): how much each of `lengths` (B,) input pixels contributes to each output
    pixel.

    In whole numbers of `1 / _WEIGHT`, computed in fp64, whose rounding by order of sums is far
    smaller.
    """
    scale = lengths.double()[:, None, None] / out
    centers = scale * (torch.arange(out, device=lengths.device)[:, None] + 0.5)
    places = torch.arange(most, device=lengths.device)
    weights = 1.0 - (places + 0.5 - centers).abs() / scale.clamp(min=1.0)
    weights = weights.clamp(min=0.0) * (places < lengths[:, None, None])
    return (weights / weights.sum(-1, keepdim=True)).mul_(_WEIGHT).round_().float()
