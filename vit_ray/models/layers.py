"""Layers with the initial values of the paper's reference code, and dropout by image.

Each layer sets its own initial values, so a model may be built inside `deepspeed.zero.Init` or on
the meta device. Source of the values: google-research/vision_transformer, `models_vit.py` and
`models_resnet.py`, and the flax defaults that they use.

With `keys` from `counter_random.sample_keys`, the mask of dropout depends only on the image: it is
equal in any batch, on any worker, and when activations are recomputed. Without keys, torch's
generator draws the mask.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.counter_random import random_uint16

# Standard deviation of a unit normal truncated at +-2, which flax divides by (jax
# variance_scaling).
_TRUNCATED_STD = 0.87962566103423978


def lecun_normal_(kernel: Tensor) -> None:
    """Truncated normal of variance 1 / fan-in, in place; fan-in is every axis but the first."""
    fan_in = kernel[0].numel()
    std = math.sqrt(1.0 / fan_in) / _TRUNCATED_STD
    nn.init.trunc_normal_(kernel, std=std, a=-2 * std, b=2 * std)


class Linear(nn.Linear):
    """A linear layer with an initial kernel by `draw`, and a bias of deviation `bias_std` around 0.

    The encoder has Xavier-uniform kernels; the biases in its MLPs have a deviation of 1e-6.
    """

    def __init__(
        self,
        width_in: int,
        width_out: int,
        draw: Callable[[Tensor], object] = nn.init.xavier_uniform_,
        bias_std: float = 0.0,
    ) -> None:
        self._draw, self._bias_std = draw, bias_std
        super().__init__(width_in, width_out)

    def reset_parameters(self) -> None:
        self._draw(self.weight)
        if self._bias_std:
            nn.init.normal_(self.bias, std=self._bias_std)
        else:
            nn.init.zeros_(self.bias)


def _xavier_of_three_(kernels: Tensor) -> None:
    # One draw for the (3D, D) matrix would have a limit smaller by sqrt(2).
    for kernel in kernels.chunk(3):
        nn.init.xavier_uniform_(kernel)


class QkvLinear(Linear):
    """Query, key and value projections, each D x D, in one matrix multiplication."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 3 * width, _xavier_of_three_)

    def forward(  # type: ignore[override]  # three tensors, and fewer queries than keys
        self, x: Tensor, num_queries: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, num_queries, D), keys and values (B, N, D) of (B, N, D).

        Args:
            x: tokens.
            num_queries: queries only of the first `num_queries` tokens; None for all.
        """
        if num_queries is None:
            q, k, v = F.linear(x, self.weight, self.bias).chunk(3, dim=-1)
            return q, k, v
        width = self.in_features
        q = F.linear(x[:, :num_queries], self.weight[:width], self.bias[:width])
        k, v = F.linear(x, self.weight[width:], self.bias[width:]).chunk(2, dim=-1)
        return q, k, v


class Head(nn.Linear):
    """Zero kernel and bias, and a constant bias; logits are float32 in every precision.

    The constant is added in float32 and not trained: at the paper's -10, neighbouring bfloat16
    numbers are 0.0625 apart, more than the first thousand steps change. It is a number because a
    buffer would be rounded with the weights (-6.9 to -6.90625).
    """

    def __init__(self, width: int, num_classes: int, constant_bias: float = 0.0) -> None:
        super().__init__(width, num_classes)
        self.constant_bias = constant_bias

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        """(..., D) features to float32 (..., K) logits."""
        return F.linear(features, self.weight).float() + self.bias.float() + self.constant_bias


class PatchProjection(nn.Conv2d):
    """Convolution with stride = kernel size, computed as one matrix product over patches."""

    def __init__(self, channels: int, width: int, patch_size: int) -> None:
        super().__init__(channels, width, kernel_size=patch_size, stride=patch_size)

    def reset_parameters(self) -> None:
        lecun_normal_(self.weight)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) to (B, H // P, W // P, D); pixels beyond the last full patch are unused."""
        patches = cut_patches(images.to(self.weight.dtype), self.kernel_size[0])
        return F.linear(patches, self.weight.flatten(1), self.bias)


def cut_patches(images: Tensor, size: int) -> Tensor:
    """Patches flattened channel by channel, row by row.

    Args:
        images: (B, C, H, W).
        size: side of a patch; pixels beyond the last full patch are omitted.

    Returns:
        (B, H // size, W // size, C * size * size).
    """
    batch, channels, height, width = images.shape
    rows, columns = height // size, width // size
    cropped = images[:, :, : rows * size, : columns * size]
    cut = cropped.reshape(batch, channels, rows, size, columns, size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows, columns, channels * size * size)


class StandardizedConv2d(nn.Conv2d):
    """Convolution whose kernel has mean 0 and deviation 1 per output channel; no bias.

    Like BiT it pads by half the kernel on each side and adds 1e-10 to the variance (big_transfer's
    `bit_pytorch/models.py`).

    Args:
        is_flax: like the backbone of hybrids it pads as XLA's SAME, output ceil(size / stride), and
            adds 1e-5 to the deviation.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel_size: int,
        stride: int = 1,
        is_flax: bool = False,
    ) -> None:
        self.pads_same = self.eps_on_deviation = is_flax
        self.eps = 1e-5 if is_flax else 1e-10
        padding = 0 if is_flax else kernel_size // 2
        super().__init__(channels_in, channels_out, kernel_size, stride, padding, bias=False)

    def reset_parameters(self) -> None:
        lecun_normal_(self.weight)  # the scale only sets the size of the first gradients

    def forward(self, images: Tensor) -> Tensor:
        if self.pads_same:
            images = pad_same(images, self.kernel_size[0], self.stride[0])
        kernel = self.weight.float()
        variance, mean = torch.var_mean(kernel, dim=(1, 2, 3), keepdim=True, correction=0)
        if self.eps_on_deviation:
            scale = 1.0 / (variance.sqrt() + self.eps)
        else:
            scale = torch.rsqrt(variance + self.eps)
        standardized = ((kernel - mean) * scale).to(self.weight.dtype)
        return F.conv2d(images, standardized, None, self.stride, self.padding)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Padding before and after along one axis, as XLA's SAME: an odd pixel is after."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def pad_same(images: Tensor, kernel: int, stride: int) -> Tensor:
    """Pads (B, C, H, W) with zeros: windows of `kernel` then have ceil(size / stride) outputs."""
    rows, columns = (same_padding(side, kernel, stride) for side in images.shape[-2:])
    padding = (*columns, *rows)
    return F.pad(images, padding) if any(padding) else images  # padding by 0 would copy


class Dropout(nn.Dropout):
    """Dropout of activations, one mask for each image."""

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Same shape as x (B, ...).

        Args:
            x: activations.
            keys: int64 (B,), other keys than in all other layers; None = torch's generator.
        """
        if keys is None or not self.training or self.p == 0.0:
            return super().forward(x)
        return keyed_dropout(x, keys, self.p)


class StochasticDepth(nn.Module):
    """Drops a residual branch for whole images (Huang et al., arXiv:1603.09382).

    In other images the branch is scaled up by 1 / (1 - rate), so that evaluation needs no change.
    The rate, rounded to a multiple of 2^-16 below 1, is a tensor: blocks of different rates share
    compiled code.
    """

    levels: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        levels = _levels(rate)
        self.is_active = levels > 0
        self.register_buffer("levels", torch.tensor(levels), persistent=False)

    def forward(self, branch: Tensor, keys: Tensor | None = None) -> Tensor:
        """Same shape as `branch` (B, ...).

        Args:
            branch: will be added to the residual stream.
            keys: int64 (B,), as in `Dropout.forward`.
        """
        if not (self.training and self.is_active):
            return branch
        if keys is None:
            numbers = torch.randint(-(2**15), 2**15, branch.shape[:1], device=branch.device)
        else:
            numbers = random_uint16(keys, 1)[:, 0]
        scale = torch.where(numbers >= self.levels - 2**15, 2**16 / (2**16 - self.levels), 0.0)
        return (branch * scale.view(-1, *[1] * (branch.dim() - 1))).to(branch.dtype)


def keyed_dropout(x: Tensor, keys: Tensor, rate: float) -> Tensor:
    """Dropout of x (B, ...): number i of an image's key decides on its element i.

    The rate is rounded to a multiple of 2^-16 below 1, and the scale is that of the rounded rate.
    """
    levels = _levels(rate)
    numbers = random_uint16(keys, math.prod(x.shape[1:]))
    is_kept = (numbers >= levels - 2**15).reshape(x.shape)
    return torch.where(is_kept, x * (2**16 / (2**16 - levels)), 0.0)


def _levels(rate: float) -> int:
    # How many of 2^16 numbers drop an element; never all, since the scale would be infinite.
    return min(round(rate * 2**16), 2**16 - 1)
