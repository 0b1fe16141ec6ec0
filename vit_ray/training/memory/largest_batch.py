"""The largest batch that fits: by the estimate, by passes on the device, and by past failures.

Each rank tries passes by itself before the training starts, with only the model and no collective
operation, so that a rank that runs out of memory does not make others wait. The memory of ZeRO's
state and of the batches is added by the plan's arithmetic.
"""

import bisect
from typing import Final

import torch

from vit_ray.config import Recipe
from vit_ray.measure.activation_memory import drop_gradients
from vit_ray.measure.memory import GIB, Activations, state_memory
from vit_ray.training.memory.memory_estimate import (
    estimate_memory,
    forward_pass,
    prepared_model,
    state_shape,
)
from vit_ray.training.memory.micro_batch import pass_sizes
from vit_ray.training.memory.out_of_memory import largest_that_fits, unless_out_of_memory

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
        ValueError: images are mixed in pairs, and a worker's share is an odd number.
    """
    shape = state_shape(recipe, num_classes, world_size, stage)
    limit_gib = memory_gib * (1 - RESERVED_FRACTION)
    if state_memory(shape, Activations(kept=0, peak=0)).total > limit_gib:
        return None  # for any activations, which take seconds to measure
    sizes = pass_sizes(recipe, world_size)
    fitting = bisect.bisect_right(
        sizes,
        limit_gib,
        key=lambda size: estimate_memory(recipe, num_classes, size, world_size, stage).total,
    )
    return sizes[fitting - 1] if fitting else None


def try_micro_batches(
    recipe: Recipe, num_classes: int, world_size: int, device: torch.device, start: int
) -> int | None:
    """The largest pass size whose training fits into the GPU's memory.

    Args:
        start: the size to try first, an estimate.

    Returns:
        Images per pass, or None if not even the fewest fit.

    Raises:
        ValueError: images are mixed in pairs, and a worker's share is an odd number.
    """
    limit_gib = free_gib(device)
    return largest_that_fits(
        pass_sizes(recipe, world_size),
        start,
        lambda size: fits_training(recipe, num_classes, world_size, size, device, limit_gib),
    )


def free_gib(device: torch.device) -> float:
    """GiB of the GPU's memory, without the part that is kept free."""
    return torch.cuda.mem_get_info(device)[0] / GIB * (1 - RESERVED_FRACTION)


def fits_training(
    recipe: Recipe,
    num_classes: int,
    world_size: int,
    size: int,
    device: torch.device,
    limit_gib: float,
) -> bool:
    """Whether training with `size` images per pass fits: a trial pass, and the plan's state."""
    peak = pass_bytes(recipe, num_classes, size, device)
    if peak is None:
        return False
    shape = state_shape(recipe, num_classes, world_size)
    return state_memory(shape, Activations(kept=peak, peak=peak)).total <= limit_gib


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
