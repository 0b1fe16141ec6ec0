"""The hybrids' embedding: a post-activation ResNet whose feature-map pixels are the patches.

Order of layers, padding and epsilons are those of google-research/vision_transformer,
`models_resnet.py`, so that its published R50+ViT weights give its logits.
"""

# B images, C channels, h w grid, D width

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from vit_ray.models.layers import PatchProjection, StandardizedConv2d, pad_same
from vit_ray.models.recompute import Chain
from vit_ray.models.resnet import NUM_GROUPS
from vit_ray.models.sizes import Grid, ResNetSize
from vit_ray.models.vit import GridEmbedding

# flax's group norm, and 1e-5 beside the deviation of the kernel.
GROUP_NORM_EPS = 1e-6
KERNEL_EPS = 1e-5


def standardized(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Module:
    """A convolution of the hybrids' backbone: padded as XLA's SAME."""
    return StandardizedConv2d(
        channels_in,
        channels_out,
        kernel,
        stride,
        padding="same",
        eps=KERNEL_EPS,
        eps_on_deviation=True,
    )


class ScaledGroupNorm(nn.GroupNorm):
    """Group norm whose scale starts at a given value: 0 for the last of a unit, else 1."""

    def __init__(self, channels: int, initial_scale: float = 1.0) -> None:
        super().__init__(NUM_GROUPS, channels, eps=GROUP_NORM_EPS)
        nn.init.constant_(self.weight, initial_scale)


class PostActivationUnit(nn.Module):
    """Bottleneck with norm after each convolution and ReLU after the sum; stride on the 3 x 3.

    Args:
        channels_in: what it takes; it gives 4 x `width`.
        width: channels inside.
        stride: of the layer in the middle.
        middle: makes that layer, where it is not a 3 x 3 convolution.
    """

    def __init__(
        self,
        channels_in: int,
        width: int,
        stride: int,
        middle: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        channels_out = 4 * width
        self.conv1 = standardized(channels_in, width, 1)
        self.norm1 = ScaledGroupNorm(width)
        self.conv2 = middle() if middle else standardized(width, width, 3, stride)
        self.norm2 = ScaledGroupNorm(width)
        self.conv3 = standardized(width, channels_out, 1)
        self.norm3 = ScaledGroupNorm(channels_out, initial_scale=0.0)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut = Shortcut(channels_in, channels_out, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) to (B, 4 width, ceil(H / stride), ceil(W / stride))."""
        kept = x_BCHW if self.shortcut is None else self.shortcut(x_BCHW)
        y_BCHW = F.relu(self.norm1(self.conv1(x_BCHW)))
        y_BCHW = F.relu(self.norm2(self.conv2(y_BCHW)))
        y_BCHW = self.norm3(self.conv3(y_BCHW))
        return F.relu(kept + y_BCHW)


def rectify_and_pool(x_BCHW: Tensor) -> Tensor:
    """What stands between the root's norm and the first unit: half of each side is left."""
    # After the ReLU, padding with 0 and with -inf is the same.
    return F.max_pool2d(pad_same(F.relu(x_BCHW), 3, 2), kernel_size=3, stride=2)


class Shortcut(nn.Module):
    """1 x 1 convolution and norm where a unit changes the shape."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv = standardized(channels_in, channels_out, 1, stride)
        self.norm = ScaledGroupNorm(channels_out)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C', ceil(H / stride), ceil(W / stride))."""
        out: Tensor = self.norm(self.conv(x_BCHW))
        return out


class ResNetEmbedding(GridEmbedding):
    """Images to a ResNet feature map, each pixel projected to the encoder's width.

    Three stages reduce a side by 16, four by 32 (paper 4.1), rounding up as SAME padding does.
    """

    def __init__(self, size: ResNetSize, width: int, image_size: Grid) -> None:
        super().__init__()
        self.size = size
        self.patch_size = size.reduction
        self.grid = size.grid(image_size)
        self.root = standardized(3, size.widths[0], 7, stride=2)
        self.root_norm = ScaledGroupNorm(size.widths[0])
        self.units = Chain(PostActivationUnit(*unit) for unit in size.units())
        self.projection = PatchProjection(size.channels_out, width, patch_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, h, w, D)."""
        x_BCHW = self.root_norm(self.root(images.to(self.projection.weight.dtype)))
        grid_BhwD: Tensor = self.projection(self.units(rectify_and_pool(x_BCHW)))
        return grid_BhwD

    def set_activation_checkpointing(self, every: int) -> None:
        """Recompute every n-th unit in the backward pass; 0 recomputes none."""
        self.units.set_activation_checkpointing(every)
