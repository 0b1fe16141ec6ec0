"""BiT ResNets (Kolesnikov et al., arXiv 1912.11370).

Pre-activation units, group norm, standardised kernels.
Padding, epsilons and order of layers are those of google-research/big_transfer, so that its
published weights give its logits.
"""

# B images, C channels, K classes

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.layers import Head, StandardizedConv2d
from vit_ray.models.recompute import checked_interval, is_recomputed, run_block

NUM_GROUPS = 32
# big_transfer's `bit_pytorch/models.py`: PyTorch's group norm, and 1e-10 beside the variance.
GROUP_NORM_EPS = 1e-5
KERNEL_EPS = 1e-10


@dataclass(frozen=True)
class ResNetSize:
    """Units per stage, and the factor on every width (64 in the first stage)."""

    stages: tuple[int, ...]
    width_factor: int = 1

    def __post_init__(self) -> None:
        if not self.stages or min(self.stages) < 1:
            raise ValueError(f"stages={self.stages} must name at least one unit in each stage.")
        if self.width_factor < 1:
            raise ValueError(f"width_factor={self.width_factor} must be at least 1.")

    @property
    def widths(self) -> tuple[int, ...]:
        """Inner channels of each stage; a unit gives four times as many."""
        return tuple(64 * self.width_factor * 2**index for index in range(len(self.stages)))


@dataclass(frozen=True)
class ResNetOptions:
    """`head_bias` is the first value of the head's bias (-10 for ImageNet-21k)."""

    head_bias: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.head_bias):
            raise ValueError(f"head_bias={self.head_bias} must be a finite number.")


def standardized(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Module:
    """A convolution of BiT: padded by half its kernel on each side."""
    return StandardizedConv2d(
        channels_in,
        channels_out,
        kernel,
        stride,
        padding=kernel // 2,
        eps=KERNEL_EPS,
        eps_on_deviation=False,
    )


def group_norm(channels: int) -> nn.GroupNorm:
    """Group norm of BiT."""
    return nn.GroupNorm(NUM_GROUPS, channels, eps=GROUP_NORM_EPS)


class PreActivationUnit(nn.Module):
    """Bottleneck with norm and ReLU before each convolution; the stride is on the 3 x 3."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * width
        self.norm1 = group_norm(channels_in)
        self.conv1 = standardized(channels_in, width, 1)
        self.norm2 = group_norm(width)
        self.conv2 = standardized(width, width, 3, stride)
        self.norm3 = group_norm(width)
        self.conv3 = standardized(width, channels_out, 1)
        changes_shape = stride != 1 or channels_in != channels_out
        self.shortcut = (
            standardized(channels_in, channels_out, 1, stride) if changes_shape else None
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) to (B, 4 width, H / stride, W / stride)."""
        active = F.relu(self.norm1(x_BCHW))
        kept = x_BCHW if self.shortcut is None else self.shortcut(active)
        y_BCHW = self.conv1(active)
        y_BCHW = self.conv2(F.relu(self.norm2(y_BCHW)))
        y_BCHW = self.conv3(F.relu(self.norm3(y_BCHW)))
        out: Tensor = y_BCHW + kept
        return out


class BitResNet(nn.Module):
    """Root, stages of pre-activation units, norm, mean over space, linear head."""

    def __init__(self, size: ResNetSize, num_classes: int, options: ResNetOptions) -> None:
        super().__init__()
        self.size = size
        self.options = options
        channels = size.widths[0]
        self.root = standardized(3, channels, 7, stride=2)
        units: list[nn.Module] = []
        for stage, (count, width) in enumerate(zip(size.stages, size.widths, strict=True)):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                units.append(PreActivationUnit(channels, width, stride))
                channels = 4 * width
        self.units = nn.ModuleList(units)
        self.norm = group_norm(channels)
        self.head = Head(channels, num_classes, options.head_bias)
        self._recompute_every = 0

    def forward(self, images: Tensor) -> Tensor:
        """Float (B, 3, H, W) in [-1, 1] to float32 logits (B, K)."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """(B, D) as the head sees them: normalised, rectified, averaged over space."""
        x_BCHW = self.root(images.to(self.norm.weight.dtype))
        # No norm or ReLU before the pool, so that padding with 0 and not -inf matters: as BiT.
        x_BCHW = F.max_pool2d(F.pad(x_BCHW, (1, 1, 1, 1)), kernel_size=3, stride=2)
        for index, unit in enumerate(self.units):
            x_BCHW = run_block(unit, x_BCHW, is_recomputed(index, self._recompute_every))
        pooled: Tensor = torch.mean(F.relu(self.norm(x_BCHW)), dim=(2, 3))
        return pooled

    def set_activation_checkpointing(self, every: int) -> None:
        """Recompute every n-th unit in the backward pass; 0 recomputes none."""
        self._recompute_every = checked_interval(every)
