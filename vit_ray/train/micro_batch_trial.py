"""The largest micro-batch, found by passes on the worker's own device before the training begins.

Each rank tries by itself, with the bare model and no collective operation, so that one which runs
out of memory keeps no other waiting. The memory of ZeRO's state and of the batches is added
by the plan's arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from vit_ray.config import Recipe
from vit_ray.measure.activation_memory import drop_gradients
from vit_ray.measure.memory import Activations, state_memory
from vit_ray.train.memory_estimate import (
    RESERVED_FRACTION,
    forward_pass,
    prepared_model,
    state_shape,
)
from vit_ray.train.micro_batch import pass_sizes
from vit_ray.train.out_of_memory import largest_that_fits, unless_out_of_memory

GIB = 2**30


def try_micro_batches(
    recipe: Recipe, num_classes: int, world_size: int, device: torch.device, start: int
) -> int | None:
    """The largest of the sizes that a pass may have whose training fits the GPU.

    Args:
        start: where to begin, an estimate.

    Returns:
        Images per pass, or None if not even the fewest fit.

    Raises:
        ValueError: images are mixed in pairs, and a worker's share is an odd number.
    """
    fits = fits_training(recipe, num_classes, world_size, device)
    return largest_that_fits(pass_sizes(recipe, world_size), start, fits)


def fits_training(
    recipe: Recipe,
    num_classes: int,
    world_size: int,
    device: torch.device,
    most_gib: float = math.inf,
) -> Callable[[int], bool]:
    """Whether training with so many images per pass fits the free memory of the GPU: a trial.

    Args:
        most_gib: of the free memory that may be taken.
    """
    shape = state_shape(recipe, num_classes, world_size)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    limit_gib = min(most_gib, free_bytes / GIB * (1 - RESERVED_FRACTION))

    def fits(size: int) -> bool:
        peak = pass_bytes(recipe, num_classes, size, device)
        if peak is None:
            return False
        return state_memory(shape, Activations(kept=peak, peak=peak)).total <= limit_gib

    return fits


def pass_bytes(
    recipe: Recipe, num_classes: int, batch_size: int, device: torch.device
) -> int | None:
    """Most bytes that a forward and backward pass takes, weights and gradients not counted.

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
        forward_pass(model, recipe, batch_size, device)().backward()  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated(device) - before if is_gpu else 0

    return unless_out_of_memory(measured, device)
