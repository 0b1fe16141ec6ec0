"""BiT ResNets (Kolesnikov et al., arXiv 1912.11370).

Pre-activation units, group norm, standardised kernels.
Padding, epsilons and order of layers are those of google-research/big_transfer, so that its
published weights give its logits.
"""

# B images, C channels, K classes

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.layers import Head, StandardizedConv2d
from vit_ray.models.recompute import Chain, Recomputable
from vit_ray.models.sizes import ResNetOptions, ResNetSize

NUM_GROUPS = 32
# big_transfer's `bit_pytorch/models.py` has PyTorch's group norm.
group_norm = partial(nn.GroupNorm, NUM_GROUPS, eps=1e-5)


class PreActivationUnit(nn.Module):
    """Bottleneck with norm and ReLU before each convolution; the stride is on the 3 x 3."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * width
        self.norm1 = group_norm(channels_in)
        self.conv1 = StandardizedConv2d(channels_in, width, 1)
        self.norm2 = group_norm(width)
        self.conv2 = StandardizedConv2d(width, width, 3, stride)
        self.norm3 = group_norm(width)
        self.conv3 = StandardizedConv2d(width, channels_out, 1)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut = StandardizedConv2d(channels_in, channels_out, 1, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) to (B, 4 width, H / stride, W / stride)."""
        active = F.relu(self.norm1(x_BCHW))
        kept = x_BCHW if self.shortcut is None else self.shortcut(active)
        y_BCHW = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return self.conv3(F.relu(self.norm3(y_BCHW))) + kept


class BitResNet(Recomputable):
    """Root, stages of pre-activation units, norm, mean over space, linear head."""

    def __init__(self, size: ResNetSize, num_classes: int, options: ResNetOptions) -> None:
        super().__init__()
        self.size = size
        self.options = options
        self.root = StandardizedConv2d(3, size.widths[0], 7, stride=2)
        self.units = Chain(PreActivationUnit(*unit) for unit in size.units())
        self.norm = group_norm(size.channels_out)
        self.head = Head(size.channels_out, num_classes, options.head_bias)

    def forward(self, images: Tensor) -> Tensor:
        """Float (B, 3, H, W) in [-1, 1] to float32 logits (B, K)."""
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """(B, D) as the head sees them: normalised, rectified, averaged over space."""
        x_BCHW = self.root(images.to(self.norm.weight.dtype))
        # No norm or ReLU before the pool, so that padding with 0 and not -inf matters: as BiT.
        x_BCHW = F.max_pool2d(F.pad(x_BCHW, (1, 1, 1, 1)), kernel_size=3, stride=2)
        return torch.mean(F.relu(self.norm(self.units(x_BCHW))), dim=(2, 3))
