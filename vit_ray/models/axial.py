"""Axial attention (paper D.6, Figure 13): Axial-ViT and AxialResNet50.

The paper leaves details open. Here Axial-ViT has no class token, which would belong to no row and
no column, and averages its tokens. AxialResNet50 is the hybrids' post-activation ResNet-50 (group
norm, standardised 1 x 1 kernels) with position-sensitive axial attention (Wang et al., arXiv
2003.07853) instead of each 3 x 3 convolution: 8 heads, queries and keys of half the width, relative
tables for queries, keys and values that the heads of a layer share, logits scaled by the root of
the key width instead of batch-normalised, a stride by averaging after the attention.
"""

# B images or lines, N tokens, D width, h w grid, H heads, L line length, K key width, V value width

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.catalog import EncoderSize, Grid, ResNetOptions, ResNetSize, VitOptions
from vit_ray.models.counter_random import line_keys, numbered_keys
from vit_ray.models.layers import Head, Linear
from vit_ray.models.positions import normal_table
from vit_ray.models.resnet import ResNetTrunk
from vit_ray.models.vit import Block, VisionTransformer

NUM_AXIAL_HEADS = 8

# A layer on lines (B, L, D).
LineLayer = Callable[[Tensor], Tensor]


def along_both(x_BhwD: Tensor, along_rows: LineLayer, along_columns: LineLayer) -> Tensor:
    """(B, h, w, D) through a layer on rows (B * h, w, D), then one on columns (B * w, h, D)."""
    batch, height, width = x_BhwD.shape[:3]
    rows = along_rows(x_BhwD.reshape(batch * height, width, -1))
    x_BwhD = rows.reshape(batch, height, width, -1).transpose(1, 2)
    columns = along_columns(x_BwhD.flatten(0, 1))
    return columns.reshape(batch, width, height, -1).transpose(1, 2)


class AxialBlock(nn.Module):
    """A block with attention along rows, then a block with attention along columns."""

    def __init__(self, grid: Grid, size: EncoderSize, options: VitOptions) -> None:
        super().__init__()
        self.grid = grid
        self.row = Block(size, options)
        self.column = Block(size, options)

    def forward(self, x_BND: Tensor, keys: Tensor | None = None) -> Tensor:
        """(B, h * w, D) to (B, h * w, D); arguments as in `Block.forward`."""
        row_keys = line_keys(numbered_keys(keys, 0), self.grid[0])
        column_keys = line_keys(numbered_keys(keys, 1), self.grid[1])
        return along_both(
            x_BND.view(x_BND.shape[0], *self.grid, -1),
            lambda x_LND: self.row(x_LND, row_keys),
            lambda x_LND: self.column(x_LND, column_keys),
        ).flatten(1, 2)


class AxialViT(VisionTransformer):
    """A ViT of axial blocks, with the mean of the tokens as its feature."""

    def _block(self, index: int) -> nn.Module:
        return AxialBlock(self.grid, self.size, self.options)


class LineAttention(nn.Module):
    """Position-sensitive attention along lines of fixed length.

    Args:
        width: channels in and out.
        length: L, tokens of a line.
    """

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.key_width = width // (2 * NUM_AXIAL_HEADS)
        self.value_width = width // NUM_AXIAL_HEADS
        self.qk = Linear(width, width)
        self.v = Linear(width, width)
        self.query_table = normal_table(2 * length - 1, self.key_width)
        self.key_table = normal_table(2 * length - 1, self.key_width)
        self.value_table = normal_table(2 * length - 1, self.value_width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        lines = x_BLD.shape[:2]
        qk = self.qk(x_BLD).reshape(*lines, 2 * NUM_AXIAL_HEADS, self.key_width)
        q_BHLK, k_BHLK = qk.transpose(1, 2).chunk(2, dim=1)
        v_BLHV = self.v(x_BLD).reshape(*lines, NUM_AXIAL_HEADS, self.value_width)
        index = torch.arange(self.length, device=x_BLD.device)
        # Row of a table for each (query, key): q - k + L - 1.
        offsets = index[:, None] - index[None, :] + self.length - 1
        logits = q_BHLK @ k_BHLK.transpose(-2, -1)
        logits = logits + torch.einsum("bhqk,qlk->bhql", q_BHLK, self.query_table[offsets])
        logits = logits + torch.einsum("bhlk,qlk->bhql", k_BHLK, self.key_table[offsets])
        weights = torch.softmax(logits * self.key_width**-0.5, dim=-1)
        mixed = weights @ v_BLHV.transpose(1, 2)
        mixed = mixed + torch.einsum("bhql,qlv->bhqv", weights, self.value_table[offsets])
        return mixed.transpose(1, 2).flatten(2)


class AxialAttention2d(nn.Module):
    """Attention along rows, then along columns, then a stride by averaging."""

    def __init__(self, width: int, grid: Grid, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.along_rows = LineAttention(width, grid[1])
        self.along_columns = LineAttention(width, grid[0])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, C, h, w) to (B, C, ceil(h / stride), ceil(w / stride))."""
        x_BhwC = along_both(x_BCHW.permute(0, 2, 3, 1), self.along_rows, self.along_columns)
        x_BCHW = x_BhwC.permute(0, 3, 1, 2)
        if self.stride == 1:
            return x_BCHW
        return F.avg_pool2d(x_BCHW, self.stride, ceil_mode=True, count_include_pad=False)


class AxialResNet(ResNetTrunk):
    """Convolutional root, axial units, mean over space, linear head.

    The relative tables have the length of the lines, so a model is built for one image size.
    """

    def __init__(
        self, size: ResNetSize, num_classes: int, image_size: Grid, options: ResNetOptions
    ) -> None:
        super().__init__(size, image_size, AxialAttention2d)
        self.image_size = image_size
        self.head = Head(size.channels_out, num_classes, options.head_bias)

    def forward(self, images: Tensor) -> Tensor:
        """Float (B, 3, H, W) in [-1, 1] to float32 logits (B, K)."""
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """(B, D), the head's input: the last feature map averaged over space.

        Raises:
            ValueError: if the images have another size than the model was built for.
        """
        if images.shape[-2:] != self.image_size:
            raise ValueError(
                f"images of {images.shape[-2]}x{images.shape[-1]} given to an axial ResNet built "
                f"for {self.image_size[0]}x{self.image_size[1]}; build it with "
                f"image_size=({images.shape[-2]}, {images.shape[-1]})"
            )
        return self.feature_map(images).mean(dim=(2, 3))
