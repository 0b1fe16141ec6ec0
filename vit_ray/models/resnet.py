"""BiT ResNets (Kolesnikov et al., arXiv 1912.11370), and the ResNets of hybrids.

BiT has pre-activation units, with the padding, epsilons and order of layers of
google-research/big_transfer. The hybrids' embedding is a post-activation ResNet, as in
google-research/vision_transformer, `models_resnet.py`; the pixels of its feature map are the
patches. With published weights both therefore give the published logits. Both have group norm and
standardised kernels.
"""

# B images, C channels, K classes, h w grid, D width

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.catalog import Grid, ResNetOptions, ResNetSize
from vit_ray.models.layers import Head, PatchProjection, StandardizedConv2d, pad_same

NUM_GROUPS = 32
# PyTorch's group norm, as in big_transfer's `bit_pytorch/models.py`.
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
        shortcut = x_BCHW if self.shortcut is None else self.shortcut(active)
        y_BCHW = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return self.conv3(F.relu(self.norm3(y_BCHW))) + shortcut


class BitResNet(nn.Module):
    """Root, stages of pre-activation units, norm, mean over space, linear head."""

    def __init__(self, size: ResNetSize, num_classes: int, options: ResNetOptions) -> None:
        super().__init__()
        self.size = size
        self.root = StandardizedConv2d(3, size.widths[0], 7, stride=2)
        self.units = nn.Sequential(*(PreActivationUnit(*unit) for unit in size.units()))
        self.norm = group_norm(size.channels_out)
        self.head = Head(size.channels_out, num_classes, options.head_bias)

    def forward(self, images: Tensor) -> Tensor:
        """Float (B, 3, H, W) in [-1, 1] to float32 logits (B, K)."""
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """(B, D), the head's input: normalised, rectified, averaged over space."""
        x_BCHW = self.root(images.to(self.norm.weight.dtype))
        # BiT pads with 0, which differs from -inf: there is no ReLU before the pool.
        x_BCHW = F.max_pool2d(F.pad(x_BCHW, (1, 1, 1, 1)), kernel_size=3, stride=2)
        return torch.mean(F.relu(self.norm(self.units(x_BCHW))), dim=(2, 3))


standardized = partial(StandardizedConv2d, is_flax=True)


class ScaledGroupNorm(nn.GroupNorm):
    """flax's group norm; the initial scale is 0 for the last norm of a unit, otherwise 1."""

    def __init__(self, channels: int, initial_scale: float = 1.0) -> None:
        super().__init__(NUM_GROUPS, channels, eps=1e-6)
        nn.init.constant_(self.weight, initial_scale)


class PostActivationUnit(nn.Module):
    """Bottleneck with norm after each convolution and ReLU after the sum; stride on the middle.

    Args:
        channels_in: input channels; the output has 4 x `width`.
        width: channels inside.
        stride: of the layer in the middle.
        middle: makes that layer.
    """

    def __init__(
        self, channels_in: int, width: int, stride: int, middle: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        channels_out = 4 * width
        self.conv1 = standardized(channels_in, width, 1)
        self.norm1 = ScaledGroupNorm(width)
        self.conv2 = middle()
        self.norm2 = ScaledGroupNorm(width)
        self.conv3 = standardized(width, channels_out, 1)
        self.norm3 = ScaledGroupNorm(channels_out, initial_scale=0.0)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            conv = standardized(channels_in, channels_out, 1, stride)
            parts = [("conv", conv), ("norm", ScaledGroupNorm(channels_out))]
            self.shortcut = nn.Sequential(OrderedDict(parts))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) to (B, 4 width, ceil(H / stride), ceil(W / stride))."""
        shortcut = x_BCHW if self.shortcut is None else self.shortcut(x_BCHW)
        y_BCHW = F.relu(self.norm1(self.conv1(x_BCHW)))
        y_BCHW = F.relu(self.norm2(self.conv2(y_BCHW)))
        return F.relu(shortcut + self.norm3(self.conv3(y_BCHW)))


class ResNetTrunk(nn.Module):
    """Root, norm, pool and units: images to a feature map.

    Args:
        size: units and widths.
        image_size: height and width.
        middle: makes the layer in the middle of a unit, from its width, its feature map's grid and
            its stride; None = a convolution.
    """

    def __init__(
        self,
        size: ResNetSize,
        image_size: Grid,
        middle: Callable[[int, Grid, int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.root = standardized(3, size.widths[0], 7, stride=2)
        self.root_norm = ScaledGroupNorm(size.widths[0])
        grid = (-(-image_size[0] // 4), -(-image_size[1] // 4))
        self.units = nn.Sequential()
        for channels, width, stride in size.units():
            convolution = partial(standardized, width, width, 3, stride)
            layer = partial(middle, width, grid, stride) if middle else convolution
            self.units.append(PostActivationUnit(channels, width, stride, layer))
            grid = (-(-grid[0] // stride), -(-grid[1] // stride))

    def feature_map(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, C, h, w)."""
        x_BCHW = F.relu(self.root_norm(self.root(images.to(self.root.weight.dtype))))
        # After the ReLU, padding with 0 and with -inf is the same.
        return self.units(F.max_pool2d(pad_same(x_BCHW, 3, 2), kernel_size=3, stride=2))


class ResNetEmbedding(ResNetTrunk):
    """Images to a ResNet's feature map, each pixel projected to the encoder's width.

    Three stages reduce a side by 16, four by 32 (paper 4.1), rounded up as by SAME padding.
    """

    def __init__(self, size: ResNetSize, width: int, image_size: Grid) -> None:
        grid = size.grid(image_size)
        super().__init__(size, image_size)
        self.patch_size, self.grid = size.reduction, grid
        self.projection = PatchProjection(size.channels_out, width, patch_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, h, w, D)."""
        return self.projection(self.feature_map(images))
