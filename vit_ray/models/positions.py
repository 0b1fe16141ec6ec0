"""Position embeddings: the variants of Table 8 and D.4, and resampling to another grid.

Each table is in the module whose forward uses it: ZeRO stage 3 gathers a module's parameters only
around the module's forward.
"""

# B images, N tokens (class token first), D width, H heads, K head width

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.catalog import Grid

ResizeMode = Literal["bilinear", "bicubic"]


def normal_table(*shape: int) -> nn.Parameter:
    """New vectors of positions or a mask, with BERT's deviation, as in the reference code."""
    table = nn.Parameter(torch.empty(shape))
    nn.init.normal_(table, std=0.02)
    return table


class ClassToken(nn.Module):
    """One learned vector before the patches, initially zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, patches_BND: Tensor) -> Tensor:
        """(B, N, D) to (B, 1 + N, D)."""
        token = self.token.to(patches_BND.dtype).expand(patches_BND.shape[0], -1, -1)
        return torch.cat([token, patches_BND], dim=1)


class SincosPositions2d(nn.Module):
    """Fixed sines and cosines of column and row (Beyer et al., arXiv:2205.01580); no parameters.

    The class token, if there is one, gets zeros.
    """

    table: Tensor

    def __init__(self, grid: Grid, width: int, has_class_token: bool) -> None:
        super().__init__()
        if width % 4 or width < 8:
            raise ValueError(
                f"positions='sincos_2d' with width={width}: two sines and two cosines take a "
                "quarter of the width each; change width to a multiple of 4 from 8 on"
            )
        table = sincos_table(grid, width)
        if has_class_token:
            table = F.pad(table, (0, 0, 1, 0))
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        return tokens_BND + self.table.to(tokens_BND.dtype)


def sincos_table(grid: Grid, width: int) -> Tensor:
    """float32 (h * w, D): sin and cos of the column, then of the row, at frequencies 1 to 1e-4."""
    count = width // 4
    frequencies = 10_000.0 ** (-torch.arange(count, dtype=torch.float64) / (count - 1))
    rows, columns = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    angles = [index.reshape(-1, 1) * frequencies for index in (columns, rows)]
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], 1).float()


class LearnedPositions1d(nn.Module):
    """A vector for each token in raster order, the class token's first if there is one."""

    def __init__(self, grid: Grid, width: int, has_class_token: bool) -> None:
        super().__init__()
        self.table = normal_table(1, grid[0] * grid[1] + has_class_token, width)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        return tokens_BND + self.table


class LearnedPositions2d(nn.Module):
    """A half-width vector for each column (X) and each row (Y), concatenated per patch.

    The paper does not give the class token's position; here it is another vector, as in 1-D.
    """

    def __init__(self, grid: Grid, width: int, has_class_token: bool) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(
                f"positions='learned_2d' splits the width into halves, but width={width} is odd; "
                "change width to an even number"
            )
        self.columns = normal_table(grid[1], width // 2)
        self.rows = normal_table(grid[0], width // 2)
        self.class_position = normal_table(1, width) if has_class_token else None

    def forward(self, tokens_BND: Tensor) -> Tensor:
        num_rows, num_columns = len(self.rows), len(self.columns)
        x = self.columns.expand(num_rows, -1, -1)
        y = self.rows.unsqueeze(1).expand(-1, num_columns, -1)
        table = torch.cat([x, y], dim=-1).flatten(0, 1)
        if self.class_position is not None:
            table = torch.cat([self.class_position, table])
        return tokens_BND + table


class RelativePositions(nn.Module):
    """1-D relative attention of D.4: the query times a vector of each offset q - k.

    The table has a row for each offset from -(N - 1) to N - 1 and is shared by the heads of a
    layer. The paper does not mention the class token; here it is at position 0 of the sequence,
    just before the first patch, with ordinary offsets.
    """

    def __init__(self, num_tokens: int, head_width: int) -> None:
        super().__init__()
        self.table = normal_table(2 * num_tokens - 1, head_width)

    def forward(self, q_BHNK: Tensor) -> Tensor:
        """Attention bias (B, H, N, N), scaled like the logits.

        With queries of only the first M tokens, (B, H, M, N).
        """
        num_queries, head_width = q_BHNK.shape[-2:]
        row = len(self.table)  # 2N - 1
        start = row // 2  # N - 1
        # Offset q - k runs down the table; the flip makes column d mean k - q + N - 1.
        scores = (q_BHNK * head_width**-0.5) @ self.table.flip(0).T
        # From offsets to keys with views instead of a gather: entry (q, k) is at column k - q + N -
        # 1; in rows padded to 2N its flat index is q (2N - 1) + k + N - 1, which is a row length of
        # 2N - 1 after N - 1 skipped entries.
        flat = F.pad(scores, (0, 1)).flatten(-2)
        missing = start + num_queries * row - flat.shape[-1]
        if missing > 0:  # fewer queries than keys
            flat = F.pad(flat, (0, missing))
        rows = flat[..., start : start + num_queries * row]
        return rows.reshape(*rows.shape[:-1], num_queries, row)[..., : start + 1]


def resize_table(
    table: Tensor, old_grid: Grid, new_grid: Grid, mode: ResizeMode = "bilinear"
) -> Tensor:
    """Resample a 1-D raster table (1, prefix + N, D) to another grid; the prefix stays unchanged.

    Args:
        table: a row of the class token, or none, and then rows of the grid in raster order.
        old_grid: (rows, columns) of the table.
        new_grid: (rows, columns) of the result.
        mode: "bilinear" aligns end points, like `scipy.ndimage.zoom(order=1)` in the reference
            code; "bicubic" samples cell centres, like Hugging Face transformers.

    Raises:
        ValueError: if the table does not hold the old grid.
    """
    num_prefix = table.shape[1] - old_grid[0] * old_grid[1]
    if num_prefix not in (0, 1):
        raise ValueError(
            f"a position table of {table.shape[1]} rows does not hold a grid of {old_grid[0]} x "
            f"{old_grid[1]}, with or without a class token; give the grid it was trained at"
        )
    if old_grid == new_grid:
        return table
    prefix, grid = table[:, :num_prefix], table[:, num_prefix:]
    image = grid.float().reshape(1, *old_grid, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(image, size=new_grid, mode=mode, align_corners=mode == "bilinear")
    raster = resized.permute(0, 2, 3, 1).flatten(1, 2).to(table.dtype)
    return torch.cat([prefix, raster], dim=1)


def resize_line(table: Tensor, length: int) -> Tensor:
    """Resample (old, D) to (length, D) linearly with aligned end points."""
    line = table.float().T.unsqueeze(0)
    resized = F.interpolate(line, size=length, mode="linear", align_corners=True)
    return resized[0].T.to(table.dtype).contiguous()


def square_grid(num_patches: int) -> Grid | None:
    """The grid of a square image with this many patches; None if there is no such grid."""
    side = round(num_patches**0.5)
    return (side, side) if side * side == num_patches else None
