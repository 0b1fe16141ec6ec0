"""Multiply-adds of a forward pass, counted from the sizes, and the training cost of Table 6.

Convention (the one that reproduces Table 6): a multiply-add is two operations, the backward pass
costs twice the forward, recomputation and the optimiser are not counted. A convolution counts
its kernel only where it lies on the image, as XLA's cost analysis does. Norms, activations,
softmax and pooling are not counted.

`forward_macs` and `count_exaflops` are the paper's count, for costs: the last block of a ViT is
counted whole. `training_macs` is what a step computes, for MFU and HFU: where the class token is
all that the head sees, the last block works out that token alone; and the images need no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from vit_ray.models.masked import Target, num_corrupted, num_predictions
from vit_ray.models.recompute import is_recomputed
from vit_ray.models.sizes import EncoderSize, Grid, ResNetSize

# Classes of JFT-300M: "18k" in the paper, 18,291 in its predecessor (BiT, arXiv 1912.11370).
JFT_CLASSES = 18_291


def forward_macs(name: str, num_classes: int, image_size: ImageSize = 224, **options: Any) -> int:
    """Multiply-adds of one image through a model, with the arguments of `build_model`.

    Raises:
        ValueError: as `build_model`.
    """
    return _count(name, num_classes, image_size, options, is_pruned=False).forward


@dataclass(frozen=True)
class TrainingMacs:
    """Multiply-adds of one image in a training step, as computed."""

    forward: int
    backward: int
    recomputed: int = 0
    """Of the forward pass, done again in the backward pass (activation checkpointing)."""

    @property
    def model(self) -> int:
        """What the model needs: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """What is done: the numerator of HFU."""
        return self.model + self.recomputed


def training_macs(
    name: str,
    num_classes: int,
    image_size: ImageSize = 224,
    *,
    recompute_every: int = 0,
    masked_target: Target | None = None,
    **options: Any,
) -> TrainingMacs:
    """What a training step computes for one image, with the arguments of `build_model`.

    Args:
        recompute_every: as of `set_activation_checkpointing`.
        masked_target: of masked patch prediction, where that is the objective.

    Raises:
        ValueError: as `build_model`.
    """
    parts = _count(name, num_classes, image_size, options, is_pruned=masked_target is None)
    if masked_target is not None:
        size = as_grid(image_size)
        parts = replace(parts, last=_prediction_macs(name, options, size, masked_target))
    recomputed = sum(
        unit.macs - unit.tail
        for chain in parts.chains
        for index, unit in enumerate(chain)
        if is_recomputed(index, recompute_every)
    )
    # Each product has two gradients of its own size, but the first needs none for the images.
    return TrainingMacs(parts.forward, 2 * parts.forward - parts.first, recomputed)


class _Unit(NamedTuple):
    """A unit or block that may be recomputed."""

    macs: int
    tail: int = 0
    """Its last product, where the backward pass needs nothing that comes after it: torch stops
    recomputing before it."""


@dataclass(frozen=True)
class _Parts:
    """Multiply-adds of a forward pass."""

    first: int
    """The product with the pixels."""
    chains: tuple[tuple[_Unit, ...], ...]
    """Units or blocks one after the other, as recomputation counts them."""
    last: int
    """Everything else."""

    @property
    def forward(self) -> int:
        return self.first + sum(unit.macs for chain in self.chains for unit in chain) + self.last


def _count(
    name: str, num_classes: int, image_size: ImageSize, options: dict[str, Any], *, is_pruned: bool
) -> _Parts:
    """`is_pruned`: the last block computes no more than the head sees."""
    spec, rest = find_spec(name, options)
    chosen = checked_options(name, spec, rest)
    return _COUNTERS[type(spec)](spec, num_classes, as_grid(image_size), chosen, is_pruned)


def _prediction_macs(name: str, options: dict[str, Any], image_size: Grid, target: Target) -> int:
    """The predictions of half of the patches, in place of the model's own head."""
    spec, _ = find_spec(name, options)
    if isinstance(spec, HybridVit):
        grid = _resnet_macs(spec.backbone, image_size, True, _middle_conv)[2]
        side = spec.backbone.reduction
    else:
        assert isinstance(spec, PlainVit | PlainAxialVit), "only a ViT predicts patches"
        side = spec.patch_size
        grid = (image_size[0] // side, image_size[1] // side)
    corrupted = num_corrupted(grid[0] * grid[1])
    return corrupted * spec.size.width * num_predictions(target, side)


def training_exaflops(
    name: str,
    num_images: int,
    epochs: float,
    num_classes: int = JFT_CLASSES,
    image_size: ImageSize = 224,
    **options: Any,
) -> float:
    """10^18 operations of pre-training, as `count_exaflops`.

    The tanh representation layer of pre-training is counted where a model can have one, unless
    `representation` is given.
    """
    spec, _ = find_spec(name, options)
    if not isinstance(spec, PlainResNet | PlainAxialResNet):
        options = {"representation": True, **options}
    macs = forward_macs(name, num_classes, image_size, **options)
    return count_exaflops(macs, num_images * epochs)


def count_exaflops(macs: int, images_seen: float) -> float:
    """10^18 operations of training: 6 x multiply-adds x images (Table 6 of the paper).

    Two operations for a multiply-add; the backward pass costs twice the forward.

    Args:
        macs: of one image through the model, as `forward_macs` counts them.
        images_seen: over the whole run, repeats counted.
    """
    return 6 * macs * images_seen / 1e18


def block_macs(size: EncoderSize, num_tokens: int, num_queries: int | None = None) -> int:
    """A block over a sequence: q, k, v and output projections, the MLP, and attention twice.

    Args:
        num_queries: tokens that are wanted; None for all.
    """
    queries = num_tokens if num_queries is None else num_queries
    by_key = 2 * size.width**2
    by_query = 2 * size.width**2 + 2 * size.width * size.mlp_dim + 2 * num_tokens * size.width
    return num_tokens * by_key + queries * by_query


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
) -> tuple[int, tuple[_Unit, ...], Grid]:
    """Root, units, and the size of the map that they make.

    `middle` counts the middle of a unit: a 3 x 3 convolution or attention.
    """
    root, grid = _conv_macs(image_size, (3, size.widths[0]), 7, 2, pads_same)
    grid, units = (-(-grid[0] // 2), -(-grid[1] // 2)), []
    for channels, width, stride in size.units():
        unit = grid[0] * grid[1] * channels * width
        if stride != 1 or channels != 4 * width:
            unit += _conv_macs(grid, (channels, 4 * width), 1, stride, pads_same)[0]
        macs, grid = middle(grid, width, stride, pads_same)
        expansion = grid[0] * grid[1] * width * 4 * width
        # BiT's units end with it; those of the hybrids with a norm, which needs it.
        units.append(_Unit(unit + macs + expansion, 0 if pads_same else expansion))
    return root, tuple(units), grid


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


def _blocks(
    size: EncoderSize, num_patches: int, options: Any, is_pruned: bool
) -> tuple[_Unit, ...]:
    """Blocks of a ViT, with relative attention where it is chosen."""
    num_tokens = _num_tokens(num_patches, options)

    def block(index: int, num_queries: int) -> _Unit:
        macs = block_macs(size, num_tokens, num_queries)
        if options.positions == "relative":
            macs += num_queries * (2 * num_tokens - 1) * size.width
        drops = options.dropout or options.depth_rate(index, size.depth)
        return _Unit(macs, _tail_macs(size, num_queries, drops))

    last = block(size.depth - 1, 1 if is_pruned and options.pool == "cls" else num_tokens)
    return (*(block(index, num_tokens) for index in range(size.depth - 1)), last)


def _num_tokens(num_patches: int, options: Any) -> int:
    return num_patches + int(options.num_class_tokens) + int(options.registers)


def _pool_macs(size: EncoderSize, num_patches: int, options: Any) -> int:
    """A probe's query, keys and values of all tokens, attention of one query, and an MLP."""
    if options.pool != "map":
        return 0
    tokens, width = _num_tokens(num_patches, options), size.width
    return 2 * (tokens + 1) * width**2 + 2 * tokens * width + 2 * width * size.mlp_dim


def _tail_macs(size: EncoderSize, num_tokens: int, drops: float) -> int:
    """The end of an MLP, after which only what drops keeps something for the backward pass."""
    return 0 if drops else num_tokens * size.width * size.mlp_dim


def _vit(spec: PlainVit, num_classes: int, image_size: Grid, options: Any, pruned: bool) -> _Parts:
    num_patches = (image_size[0] // spec.patch_size) * (image_size[1] // spec.patch_size)
    embedding = num_patches * 3 * spec.patch_size**2 * spec.size.width
    blocks = _blocks(spec.size, num_patches, options, pruned)
    head = _head_macs(spec.size.width, num_classes, options.representation)
    return _Parts(embedding, (blocks,), _pool_macs(spec.size, num_patches, options) + head)


def _hybrid(
    spec: HybridVit, num_classes: int, image_size: Grid, options: Any, pruned: bool
) -> _Parts:
    root, units, grid = _resnet_macs(spec.backbone, image_size, True, _middle_conv)
    num_patches = grid[0] * grid[1]
    embedding = num_patches * spec.backbone.channels_out * spec.size.width
    blocks = _blocks(spec.size, num_patches, options, pruned)
    head = _head_macs(spec.size.width, num_classes, options.representation)
    head += _pool_macs(spec.size, num_patches, options)
    return _Parts(root, (units, blocks), embedding + head)


def _resnet(spec: PlainResNet, num_classes: int, image_size: Grid, *_: Any) -> _Parts:
    root, units, _grid = _resnet_macs(spec.size, image_size, False, _middle_conv)
    return _Parts(root, (units,), _head_macs(spec.size.channels_out, num_classes, False))


def _axial_vit(
    spec: PlainAxialVit, num_classes: int, image_size: Grid, options: Any, _: bool
) -> _Parts:
    size = spec.size
    rows, columns = image_size[0] // spec.patch_size, image_size[1] // spec.patch_size
    embedding = rows * columns * 3 * spec.patch_size**2 * size.width
    macs = rows * block_macs(size, columns) + columns * block_macs(size, rows)
    block = _Unit(macs, _tail_macs(size, rows * columns, options.dropout))
    head = _head_macs(size.width, num_classes, options.representation)
    return _Parts(embedding, ((block,) * size.depth,), head)


def _axial_resnet(spec: PlainAxialResNet, num_classes: int, image_size: Grid, *_: Any) -> _Parts:
    root, units, _grid = _resnet_macs(spec.size, image_size, True, _middle_attention)
    return _Parts(root, (units,), _head_macs(spec.size.channels_out, num_classes, False))


_COUNTERS: dict[type[ModelSpec], Callable[..., _Parts]] = {
    PlainVit: _vit,
    HybridVit: _hybrid,
    PlainResNet: _resnet,
    PlainAxialVit: _axial_vit,
    PlainAxialResNet: _axial_resnet,
}
