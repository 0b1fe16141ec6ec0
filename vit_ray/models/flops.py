"""Multiply-adds of a forward pass, counted from the sizes, and the training cost of Table 6.

Convention (it reproduces Table 6): a multiply-add is two operations, the backward pass costs twice
the forward, recomputation and the optimiser are not counted. A convolution counts its kernel only
where it overlaps the image, as XLA's cost analysis does. Norms, activations, softmax and pooling
are not counted.

`forward_macs` and `count_exaflops` are the paper's count, for costs: the last block of a ViT is
counted whole. `training_macs` is what a step computes, for MFU and HFU: if the head only sees the
class token, the last block computes only that token; and the images need no gradient.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vit_ray.models.axial import NUM_AXIAL_HEADS
from vit_ray.models.build import build_model
from vit_ray.models.catalog import ImageSize, as_grid, find_spec
from vit_ray.models.layers import same_padding
from vit_ray.models.masked import Target, num_corrupted, num_predictions
from vit_ray.models.recompute import is_recomputed
from vit_ray.models.sizes import EncoderSize, Grid, ResNetSize
from vit_ray.own_parts import is_own

# Classes of JFT-300M: "18k" in the paper, 18,291 in its predecessor (BiT, arXiv 1912.11370).
JFT_CLASSES = 18_291


def forward_macs(name: str, num_classes: int, image_size: ImageSize = 224, **options: Any) -> int:
    """Multiply-adds of one image through a model, with the arguments of `build_model`.

    For a user's own model, those that torch's counter finds in matrix products, convolutions and
    attention, on tensors without values.

    Raises:
        ValueError: as `build_model`; a user's own model does not run without values.
    """
    if not is_own(name):
        return _count(name, num_classes, image_size, options, is_pruned=False).forward
    with torch.device("meta"):
        model = build_model(name, num_classes, image_size, **options).eval()
        images = torch.zeros(1, 3, *as_grid(image_size))
    try:
        # The count of the fused kernel includes the attention weights twice.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            logits = model(images)
    except Exception as error:  # of the user's code
        raise ValueError(
            f"model.name={name}: its multiply-adds cannot be counted: with tensors on the device "
            "meta, which have shapes but no values, its forward pass fails "
            f"({type(error).__name__}: {error}); use no .item(), .numpy() or fixed device in it"
        ) from error
    if tuple(logits.shape) != (1, num_classes):
        raise ValueError(
            f"model.name={name}: for one image it returns {list(logits.shape)}; return logits of "
            f"the shape (images, classes), here [1, {num_classes}]"
        )
    return int(counter.get_total_flops()) // 2


@dataclass(frozen=True)
class TrainingMacs:
    """Multiply-adds of one image in a training step, as computed.

    Attributes:
        recomputed: of the forward pass, repeated in the backward pass (activation checkpointing).
    """

    forward: int
    backward: int
    recomputed: int = 0

    @property
    def model(self) -> int:
        """What the model needs: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """What is computed: the numerator of HFU."""
        return self.model + self.recomputed


def training_macs(
    name: str,
    num_classes: int,
    image_size: ImageSize = 224,
    *,
    recompute_every: int = 0,
    compiles: bool = False,
    masked_target: Target | None = None,
    **options: Any,
) -> TrainingMacs:
    """What a training step computes for one image, with the arguments of `build_model`.

    Args:
        recompute_every: as in `set_activation_checkpointing`.
        compiles: the blocks of a Transformer are compiled, each to one operation, which is
            recomputed whole; torch can stop a recomputation early only between operations.
        masked_target: of masked patch prediction, if that is the objective.

    Raises:
        ValueError: as `build_model`.
    """
    pruned = masked_target is None
    parts = _count(name, num_classes, image_size, options, pruned, masked_target, compiles)
    recomputed = sum(
        unit.macs - unit.tail
        for chain in parts.chains
        for index, unit in enumerate(chain)
        if is_recomputed(index, recompute_every)
    )
    # Each product has two gradients of its own size, but the first needs none for the images.
    return TrainingMacs(parts.forward, 2 * parts.forward - parts.first, recomputed)


class _Unit(NamedTuple):
    """A unit or block that may be recomputed.

    Attributes:
        tail: its last product, if the backward pass needs nothing that comes after it: torch stops
            recomputing before it.
    """

    macs: int
    tail: int = 0


class _Parts(NamedTuple):
    """Multiply-adds of a forward pass.

    Attributes:
        first: the product with the pixels.
        chains: units or blocks in sequence, for counting recomputation.
        last: everything else.
    """

    first: int
    chains: list[list[_Unit]]
    last: int

    @property
    def forward(self) -> int:
        return self.first + sum(unit.macs for chain in self.chains for unit in chain) + self.last


def _count(
    name: str,
    num_classes: int,
    image_size: ImageSize,
    options: dict[str, Any],
    is_pruned: bool,
    masked_target: Target | None = None,
    compiles: bool = False,
) -> _Parts:
    """`is_pruned`: the last block computes only what the head needs."""
    spec, sides = find_spec(name, options), as_grid(image_size)
    encoder, chosen = spec.encoder, spec.options
    chains = []
    if spec.resnet is None:
        side = spec.patch_size
        grid = sides[0] // side, sides[1] // side
        pixels = 3 * side**2
    else:
        side, pixels = spec.resnet.reduction, spec.resnet.channels_out
        root, units, grid = _resnet_macs(spec.resnet, sides, spec.is_axial, encoder is None)
        chains.append(units)
    if encoder is None:
        return _Parts(root, chains, pixels * num_classes)
    width, num_patches = encoder.width, grid[0] * grid[1]
    num_tokens = chosen.num_tokens(grid)
    seen = 1 if is_pruned and chosen.pool == "cls" else num_tokens
    blocks = []
    for index in range(encoder.depth):
        queries = seen if index == encoder.depth - 1 else num_tokens
        if spec.is_axial:
            rows, columns = grid
            macs = rows * block_macs(encoder, columns) + columns * block_macs(encoder, rows)
        else:
            macs = block_macs(encoder, num_tokens, queries)
        if chosen.positions == "relative":
            macs += queries * (2 * num_tokens - 1) * width
        # The end of an MLP, after which only masks keep activations for the backward pass.
        drops = chosen.dropout or chosen.depth_rate(index, encoder.depth)
        tail = 0 if drops or compiles else queries * width * encoder.mlp_dim
        blocks.append(_Unit(macs, tail))
    embedding = num_patches * pixels * width
    last = width * num_classes + (width**2 if chosen.representation else 0)
    if masked_target is not None:  # predictions for half of the patches instead of the head
        last = num_corrupted(num_patches) * width * num_predictions(masked_target, side)
    if spec.resnet is None:
        return _Parts(embedding, [blocks], last)
    return _Parts(root, [*chains, blocks], embedding + last)


def training_exaflops(
    name: str,
    num_images: int,
    epochs: float,
    num_classes: int = JFT_CLASSES,
    image_size: ImageSize = 224,
    **options: Any,
) -> float:
    """10^18 operations of pre-training, as `count_exaflops`.

    The tanh representation layer of pre-training is counted if the model can have one, unless
    `representation` is given.
    """
    if find_spec(name, options).encoder is not None:
        options = {"representation": True, **options}
    macs = forward_macs(name, num_classes, image_size, **options)
    return count_exaflops(macs, num_images * epochs)


def count_exaflops(macs: int, images_seen: float) -> float:
    """10^18 operations of training: 6 x multiply-adds x images (Table 6 of the paper).

    Two operations per multiply-add; the backward pass costs twice the forward.

    Args:
        macs: of one image through the model, as `forward_macs` counts them.
        images_seen: over the whole run, repeats counted.
    """
    return 6 * macs * images_seen / 1e18


def block_macs(size: EncoderSize, num_tokens: int, num_queries: int | None = None) -> int:
    """A block on a sequence: q, k, v and output projections, the MLP, and attention twice.

    Args:
        num_queries: tokens that are needed; None for all.
    """
    queries = num_tokens if num_queries is None else num_queries
    by_key = 2 * size.width**2
    by_query = 2 * size.width**2 + 2 * size.width * size.mlp_dim + 2 * num_tokens * size.width
    return num_tokens * by_key + queries * by_query


def _conv_macs(
    grid: Grid, channels: tuple[int, int], kernel: int, stride: int, pads_same: bool
) -> tuple[int, Grid]:
    """Multiply-adds of a convolution where its kernel overlaps the image.

    Returns:
        These, and the size of its output.
    """
    macs, outputs = channels[0] * channels[1], []
    for side in grid:
        before, after = same_padding(side, kernel, stride) if pads_same else (kernel // 2,) * 2
        count = (side + before + after - kernel) // stride + 1
        starts = (index * stride - before for index in range(count))
        macs *= sum(min(start + kernel, side) - max(start, 0) for start in starts)
        outputs.append(count)
    return macs, (outputs[0], outputs[1])


def _resnet_macs(
    size: ResNetSize, image_size: Grid, is_axial: bool, is_alone: bool
) -> tuple[int, list[_Unit], Grid]:
    """Root, units, and the size of the resulting map; `is_alone`: not below a ViT."""
    is_bit = is_alone and not is_axial  # whose padding differs from XLA's
    root, grid = _conv_macs(image_size, (3, size.widths[0]), 7, 2, not is_bit)
    grid, units = (-(-grid[0] // 2), -(-grid[1] // 2)), []
    for channels, width, stride in size.units():
        tokens = grid[0] * grid[1]
        unit = tokens * channels * width
        if stride != 1 or channels != 4 * width:
            unit += _conv_macs(grid, (channels, 4 * width), 1, stride, not is_bit)[0]
        if is_axial:
            # Projections and position-sensitive attention along rows and along columns: q k, q r
            # and k r over keys; weights over values and their relative table.
            keys, values = width // (2 * NUM_AXIAL_HEADS), width // NUM_AXIAL_HEADS
            attention = NUM_AXIAL_HEADS * (3 * keys + 2 * values)
            unit += sum(tokens * (2 * width**2 + length * attention) for length in grid)
            grid = (-(-grid[0] // stride), -(-grid[1] // stride))
        else:
            macs, grid = _conv_macs(grid, (width, width), 3, stride, not is_bit)
            unit += macs
        expansion = grid[0] * grid[1] * width * 4 * width
        # BiT's units end with it; those of the hybrids with a norm, which needs it.
        units.append(_Unit(unit + expansion, expansion if is_bit else 0))
    return root, units, grid
