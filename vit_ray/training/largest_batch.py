"""The largest batch that fits: by the estimate, and by one trial on the device.

The trial runs before the training starts, on each rank by itself, with only the model and no
collective operation, so that a rank that runs out of memory does not make others wait. The memory
of ZeRO's state and of the batches is added by the plan's arithmetic.
"""

import bisect
from typing import Final

import torch

from vit_ray.config import Recipe
from vit_ray.measure.memory import GIB, drop_gradients, state_memory, unless_out_of_memory
from vit_ray.training.memory_estimate import (
    estimate_memory,
    forward_pass,
    prepared_model,
    state_shape,
)
from vit_ray.training.steps import pass_sizes

# Kept free for the CUDA context, NCCL's buffers and fragmentation: an assumption, not measured.
RESERVED_FRACTION: Final = 0.05


def largest_micro_batch(
    recipe: Recipe, num_classes: int, world_size: int, memory_gib: float, stage: int | None = None
) -> int | None:
    """The largest divisor of a worker's share of the global batch whose estimate fits.

    Args:
        memory_gib: of the device; 5 % of it are kept free.
        stage: ZeRO stage; None = the recipe's.

    Returns:
        Images per pass, or None if not even one fits.

    Raises:
        ValueError: as `pass_sizes`.
    """
    sizes = pass_sizes(recipe, world_size)
    fitting = bisect.bisect_right(
        sizes,
        memory_gib * (1 - RESERVED_FRACTION),
        key=lambda size: estimate_memory(recipe, num_classes, size, world_size, stage).total,
    )
    return sizes[fitting - 1] if fitting else None


def tried_micro_batch(
    recipe: Recipe, num_classes: int, world_size: int, device: torch.device
) -> int:
    """Images per pass: the estimate for this GPU, halved until a trial of it fits.

    The fewest are not tried: if they do not fit, the first pass of the training reports it.

    Raises:
        ValueError: as `pass_sizes`.
    """
    free_gib, total_gib = (count / GIB for count in torch.cuda.mem_get_info(device))
    sizes = pass_sizes(recipe, world_size)
    size = largest_micro_batch(recipe, num_classes, world_size, total_gib) or sizes[0]
    shape = state_shape(recipe, num_classes, world_size)
    while size > sizes[0]:
        peak = pass_bytes(recipe, num_classes, size, device)
        if peak is not None:
            needed_gib = state_memory(shape, peak).total
            if needed_gib <= free_gib * (1 - RESERVED_FRACTION):
                break
        size = max(half for half in sizes if half <= max(size // 2, sizes[0]))
    return size


def pass_bytes(
    recipe: Recipe, num_classes: int, batch_size: int, device: torch.device
) -> int | None:
    """Most bytes that a forward and backward pass takes, without weights and gradients.

    The pass is eager; that a compiled one takes no more is assumed, not measured. On a CPU, which
    does not count, 0.

    Returns:
        None if it ran out of memory.
    """

    def measured() -> int:
        model = prepared_model(recipe, num_classes, device)
        drop_gradients(model.parameters())  # the plan counts them where they are kept
        is_gpu = device.type == "cuda"
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if is_gpu else 0
        forward = forward_pass(model, recipe, batch_size, device)
        forward().backward()  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated(device) - before if is_gpu else 0

    return unless_out_of_memory(measured, device)
