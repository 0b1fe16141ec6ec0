"""How many images a worker takes per pass: by the recipe, and by what fits into memory.

A training pass that runs out of memory ends the worker group; the next one takes half the images,
with the same global batches and more accumulation. Torch is not needed.
"""

from typing import Final

from vit_ray.config import Recipe

CPU_LIMIT: Final = 64
"""Images per pass on a CPU; larger passes are no faster there and only take memory."""


def micro_batch_size(recipe: Recipe, world_size: int, limit: int | None = None) -> int:
    """Images per worker and pass for this many workers.

    A number in the recipe is exact for a group of fixed size. In an elastic group, under a limit,
    and for `auto`, it is the maximum, and the largest divisor of the worker's share is taken.

    Args:
        limit: the most that is known to fit.

    Raises:
        ValueError: the batch does not divide among the workers, in passes of the recipe's number in
            a fixed group; with the arithmetic and the nearest valid value.
    """
    share = recipe.train.global_batch_size // world_size
    wanted = recipe.train.micro_batch_size
    is_elastic = not isinstance(recipe.workers.num_workers, int)
    unit = recipe.train.least_pass if wanted == "auto" or is_elastic else wanted
    accumulation_steps(recipe.train.global_batch_size, unit, world_size)
    most = share if wanted == "auto" else min(wanted, share)
    most = most if limit is None else min(most, limit)
    sizes = pass_sizes(recipe, world_size)
    return max((size for size in sizes if size <= most), default=sizes[0])


def pass_sizes(recipe: Recipe, world_size: int) -> list[int]:
    """Images that a worker may take per pass, in ascending order.

    Raises:
        ValueError: the batch does not divide among the workers, in pairs if images are mixed.
    """
    share, least = recipe.train.global_batch_size // world_size, recipe.train.least_pass
    accumulation_steps(recipe.train.global_batch_size, least, world_size)
    return [size for size in range(least, share + 1, least) if share % size == 0]


def accumulation_steps(global_batch_size: int, micro_batch_size: int, num_workers: int) -> int:
    """Passes per optimizer step: global batch / (micro-batch x workers).

    Raises:
        ValueError: it does not divide; the message gives the nearest batch that does.
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
