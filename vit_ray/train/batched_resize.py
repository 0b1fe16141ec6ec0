"""Regions of many sizes to images of one size, in a few operations for all of them.

The resize is bilinear and antialiased, as Pillow's and torch's `interpolate`: each side is a matrix
of triangles, as wide as the region is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

# Of the regions that are resized together, each padded to the largest: 200 MB as floats.
MOST_PIXELS: Final = 1 << 24


def resize_regions(
    regions: Sequence[Tensor], size: tuple[int, int], flips: Sequence[bool]
) -> Tensor:
    """uint8 (h, w, 3) each, on one device, to uint8 (B, height, width, 3).

    Args:
        size: height and width of all results in pixels.
        flips: for each, whether it is mirrored left to right.
    """
    device = regions[0].device
    images = torch.empty((len(regions), *size, 3), dtype=torch.uint8, device=device)
    for group in _groups(regions):
        chosen = [regions[i] for i in group]
        made = _resized(chosen, size, torch.tensor([flips[i] for i in group]))
        images[torch.tensor(group).to(device, non_blocking=True)] = made
    return images


def _groups(regions: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of regions of like sizes, padded to at most `MOST_PIXELS`, or one alone."""
    group: list[int] = []
    height = width = 0
    for index in sorted(range(len(regions)), key=lambda i: regions[i].shape[:2]):
        high, wide = regions[index].shape[:2]
        height, width = max(height, high), max(width, wide)
        if group and (len(group) + 1) * height * width > MOST_PIXELS:
            yield group
            group, height, width = [], high, wide
        group.append(index)
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
    low_BHwC = (rows @ padded.flatten(2).float()).reshape(len(regions), size[0], width, 3)
    turned_BwHC = low_BHwC.transpose(1, 2).flatten(2)
    pixels = (columns @ turned_BwHC).reshape(len(regions), size[1], size[0], 3).transpose(1, 2)
    return pixels.round().clamp_(0, 255).to(torch.uint8)


def _triangles(lengths: Tensor, out: int, most: int) -> Tensor:
    """(B, out, most): the share of each of `lengths` (B,) pixels in each that is made of them."""
    scale = (lengths / out)[:, None, None]
    centers = scale * (torch.arange(out, device=lengths.device)[:, None] + 0.5)
    places = torch.arange(most, device=lengths.device)
    weights = 1.0 - (places + 0.5 - centers).abs() / scale.clamp(min=1.0)
    weights = weights.clamp(min=0.0) * (places < lengths[:, None, None])
    return weights / weights.sum(-1, keepdim=True)
