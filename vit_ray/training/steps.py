"""Arithmetic of a run's steps, without torch: the learning rate of a step, and the passes.

These are pure functions, so resuming needs no state. A training pass that runs out of memory ends
the worker group; the next group takes half the images per pass, with the same global batches and
more accumulation.
"""

import math

from vit_ray.config import Recipe
from vit_ray.config.training_sections import OptimConfig


def lr_at(step: int, config: OptimConfig, total_steps: int) -> float:
    """Learning rate of the 0-based `step`: linear warm-up from zero, then the decay.

    Linear and cosine decay run from `learning_rate` after the warm-up to `end_learning_rate`
    at `total_steps`; `steps` multiplies by 0.1 at each share of `total_steps` in `decay_at`;
    `cooldown` is constant, and then falls linearly to `end_learning_rate` over the last
    `cooldown_fraction` of `total_steps`.
    """
    peak, end = config.learning_rate, config.end_learning_rate
    if step < config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    progress = min(1.0, progress)
    if config.schedule == "linear":
        return end + (peak - end) * (1.0 - progress)
    if config.schedule == "cosine":
        return end + (peak - end) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.schedule == "cooldown":
        length = total_steps - cooldown_start(config, total_steps)
        return end + (peak - end) * min(1.0, max(0.0, (total_steps - step) / length))
    if config.schedule == "steps":
        return peak * 0.1 ** sum(step / total_steps >= share for share in config.decay_at)
    return peak


def cooldown_start(config: OptimConfig, total_steps: int) -> int:
    """Steps before the cool-down of `schedule=cooldown`, warm-up included."""
    return total_steps - max(1, round(config.cooldown_fraction * total_steps))


def micro_batch_size(recipe: Recipe, world_size: int, limit: int | None = None) -> int:
    """Images per worker and pass for this many workers.

    A number in the recipe is exact for a group of fixed size. In an elastic group and under a limit
    the number is a maximum: the largest divisor of the worker's share up to it is taken. `auto`
    has no maximum but the limit.

    Args:
        limit: the largest size that is known to fit.

    Raises:
        ValueError: the batch does not divide among the workers, or in a fixed group not into passes
            of the recipe's number; with the arithmetic and the nearest valid value.
    """
    wanted = recipe.train.micro_batch_size
    if wanted != "auto" and isinstance(recipe.workers.num_workers, int):
        accumulation_steps(recipe.train.global_batch_size, wanted, world_size)
        if wanted % recipe.train.pass_multiple:
            raise ValueError(
                f"train.micro_batch_size={wanted}: mixup and cutmix mix images in pairs; use an "
                f"even number such as {wanted + 1}"
            )
    sizes = pass_sizes(recipe, world_size)
    max_size = min(size for size in (sizes[-1], wanted, limit) if isinstance(size, int))
    return max((size for size in sizes if size <= max_size), default=sizes[0])


def pass_sizes(recipe: Recipe, world_size: int) -> list[int]:
    """Images that a worker may take per pass, in ascending order.

    Raises:
        ValueError: the batch does not divide among the workers, in pairs if images are mixed.
    """
    share, min_size = recipe.train.global_batch_size // world_size, recipe.train.pass_multiple
    accumulation_steps(recipe.train.global_batch_size, min_size, world_size)
    return [size for size in range(min_size, share + 1, min_size) if share % size == 0]


def accumulation_steps(global_batch_size: int, micro_batch_size: int, num_workers: int) -> int:
    """Passes per optimizer step: global batch / (micro-batch x workers).

    Raises:
        ValueError: the batch does not divide; the message gives the nearest batch that does.
    """
    per_pass = micro_batch_size * num_workers
    if global_batch_size % per_pass == 0:
        return global_batch_size // per_pass
    passes = f" in passes of {micro_batch_size} (train.micro_batch_size, or pairs of train.mixup)"
    raise ValueError(
        f"train.global_batch_size={global_batch_size} does not divide among {num_workers} workers "
        f"(workers.num_workers){passes if micro_batch_size > 1 else ''}: {global_batch_size} = "
        f"{global_batch_size // per_pass} x {per_pass} + {global_batch_size % per_pass}; the "
        "nearest valid train.global_batch_size is "
        f"{max(1, round(global_batch_size / per_pass)) * per_pass}"
    )
