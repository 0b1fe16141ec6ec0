"""Multiply-adds of a forward pass, counted from the sizes, and the training cost of Table 6.

Convention (the one that reproduces Table 6): a multiply-add is two operations, the backward pass
costs twice the forward, recomputation and the optimiser are not counted. A convolution counts
its kernel only where it lies on the image, as XLA's cost analysis does. Norms, activations,
softmax and pooling are not counted. The last block of a ViT is counted whole, as in Table 6, though
`VisionTransformer.features` works out only the class token of it.
"""

from collections.abc import Callable
from typing import Any

from vit_ray.models.axial import NUM_AXIAL_HEADS
from vit_ray.models.catalog import (
    HybridVit,
    ImageSize,
    ModelSpec,
    PlainAxialResNet,
    PlainAxialVit,
    PlainResNet,
    PlainVit,
    as_grid,
    checked_options,
    find_spec,
)
from vit_ray.models.layers import same_padding
from vit_ray.models.positions import Grid
from vit_ray.models.resnet import ResNetSize
from vit_ray.models.vit import EncoderSize

# Classes of JFT-300M: "18k" in the paper, 18,291 in its predecessor (BiT, arXiv 1912.11370).
JFT_CLASSES = 18_291


def forward_macs(name: str, num_classes: int, image_size: ImageSize = 224, **options: Any) -> int:
    """Multiply-adds of one image through a model, with the arguments of `build_model`.

    Raises:
        ValueError: as `build_model`.
    """
    spec, rest = find_spec(name, options)
    chosen = checked_options(name, spec, rest)
    return _COUNTERS[type(spec)](spec, num_classes, as_grid(image_size), chosen)


def training_exaflops(
    name: str,
    num_images: int,
    epochs: float,
    num_classes: int = JFT_CLASSES,
    image_size: ImageSize = 224,
    **options: Any,
) -> float:
    """10^18 operations of pre-training: 6 x forward multiply-adds x images x epochs.

    The tanh representation layer of pre-training is counted where a model can have one, unless
    `representation` is given.
    """
    spec, _ = find_spec(name, options)
    if not isinstance(spec, PlainResNet | PlainAxialResNet):
        options = {"representation": True, **options}
    macs = forward_macs(name, num_classes, image_size, **options)
    return 6 * macs * num_images * epochs / 1e18


def encoder_macs(size: EncoderSize, num_tokens: int) -> int:
    """Blocks over a sequence: four D x D projections, the MLP, and attention twice over T x T."""
    dense = 4 * size.width**2 + 2 * size.width * size.mlp_dim
    return size.depth * (num_tokens * dense + 2 * num_tokens**2 * size.width)


def valid_taps(size: int, kernel: int, stride: int, before: int, after: int) -> tuple[int, int]:
    """Along one axis: kernel places that lie on the image, summed over outputs; and outputs."""
    outputs = (size + before + after - kernel) // stride + 1
    starts = (index * stride - before for index in range(outputs))
    taps = sum(min(start + kernel, size) - max(start, 0) for start in starts)
    return taps, outputs


def _conv_macs(
    grid: Grid, channels: tuple[int, int], kernel: int, stride: int, pads_same: bool
) -> tuple[int, Grid]:
    """Multiply-adds of a convolution, and the size of its output."""
    macs, outputs = channels[0] * channels[1], []
    for side in grid:
        before, after = same_padding(side, kernel, stride) if pads_same else (kernel // 2,) * 2
        taps, count = valid_taps(side, kernel, stride, before, after)
        macs *= taps
        outputs.append(count)
    return macs, (outputs[0], outputs[1])


def _resnet_macs(
    size: ResNetSize, image_size: Grid, pads_same: bool, middle: "_Middle"
) -> tuple[int, Grid]:
    """Root and units; `middle` counts the middle of a unit: a 3 x 3 convolution or attention."""
    total, grid = _conv_macs(image_size, (3, size.widths[0]), 7, 2, pads_same)
    grid = (-(-grid[0] // 2), -(-grid[1] // 2))
    for channels, width, stride in size.units():
        total += grid[0] * grid[1] * channels * width
        if stride != 1 or channels != 4 * width:
            total += _conv_macs(grid, (channels, 4 * width), 1, stride, pads_same)[0]
        macs, grid = middle(grid, width, stride, pads_same)
        total += macs + grid[0] * grid[1] * width * 4 * width
    return total, grid


_Middle = Callable[[Grid, int, int, bool], tuple[int, Grid]]


def _middle_conv(grid: Grid, width: int, stride: int, pads_same: bool) -> tuple[int, Grid]:
    return _conv_macs(grid, (width, width), 3, stride, pads_same)


def _middle_attention(grid: Grid, width: int, stride: int, pads_same: bool) -> tuple[int, Grid]:
    """Projections and position-sensitive attention along rows and along columns."""
    tokens, macs = grid[0] * grid[1], 0
    keys, values = width // (2 * NUM_AXIAL_HEADS), width // NUM_AXIAL_HEADS
    for length in grid:
        # q k, q r, k r over keys; weights over values and their relative table.
        attention = length * NUM_AXIAL_HEADS * (3 * keys + 2 * values)
        macs += tokens * (2 * width**2 + attention)
    return macs, (-(-grid[0] // stride), -(-grid[1] // stride))


def _head_macs(width: int, num_classes: int, has_representation: bool) -> int:
    return width * num_classes + (width**2 if has_representation else 0)


def _sequence_macs(size: EncoderSize, num_patches: int, num_classes: int, options: Any) -> int:
    """Encoder and head of a ViT, with relative attention where it is chosen."""
    num_tokens = num_patches + (options.pool == "cls")
    macs = encoder_macs(size, num_tokens)
    if options.positions == "relative":
        macs += size.depth * num_tokens * (2 * num_tokens - 1) * size.width
    return macs + _head_macs(size.width, num_classes, options.representation)


def _vit(spec: PlainVit, num_classes: int, image_size: Grid, options: Any) -> int:
    num_patches = (image_size[0] // spec.patch_size) * (image_size[1] // spec.patch_size)
    embedding = num_patches * 3 * spec.patch_size**2 * spec.size.width
    return embedding + _sequence_macs(spec.size, num_patches, num_classes, options)


def _hybrid(spec: HybridVit, num_classes: int, image_size: Grid, options: Any) -> int:
    backbone, grid = _resnet_macs(spec.backbone, image_size, True, _middle_conv)
    num_patches = grid[0] * grid[1]
    embedding = num_patches * spec.backbone.channels_out * spec.size.width
    return backbone + embedding + _sequence_macs(spec.size, num_patches, num_classes, options)


def _resnet(spec: PlainResNet, num_classes: int, image_size: Grid, options: Any) -> int:
    backbone, _ = _resnet_macs(spec.size, image_size, False, _middle_conv)
    return backbone + _head_macs(spec.size.channels_out, num_classes, False)


def _axial_vit(spec: PlainAxialVit, num_classes: int, image_size: Grid, options: Any) -> int:
    size = spec.size
    rows, columns = image_size[0] // spec.patch_size, image_size[1] // spec.patch_size
    embedding = rows * columns * 3 * spec.patch_size**2 * size.width
    blocks = rows * encoder_macs(size, columns) + columns * encoder_macs(size, rows)
    return embedding + blocks + _head_macs(size.width, num_classes, options.representation)


def _axial_resnet(spec: PlainAxialResNet, num_classes: int, image_size: Grid, options: Any) -> int:
    backbone, _ = _resnet_macs(spec.size, image_size, True, _middle_attention)
    return backbone + _head_macs(spec.size.channels_out, num_classes, False)


_COUNTERS: dict[type[ModelSpec], Callable[..., int]] = {
    PlainVit: _vit,
    HybridVit: _hybrid,
    PlainResNet: _resnet,
    PlainAxialVit: _axial_vit,
    PlainAxialResNet: _axial_resnet,
}
