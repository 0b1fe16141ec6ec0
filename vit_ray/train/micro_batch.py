"""How many images a worker takes per pass: as the recipe says, as memory allows, as it turned out.

A pass that runs out of memory lowers the limit, which is kept in the run's folder; the worker
group is then restarted from its checkpoint, with the same global batches and more accumulation.
"""

from __future__ import annotations

import json

from vit_ray.config import Recipe
from vit_ray.config.training_sections import accumulation_steps
from vit_ray.storage import Location

LIMIT_FILE = "micro_batch_limit.json"
CPU_MOST = 64  # images; larger passes are no faster on a CPU and only take memory


def micro_batch_size(recipe: Recipe, world_size: int, limit: int | None = None) -> int:
    """Images per worker and pass for this many workers.

    A number in the recipe holds for a fixed group. In an elastic group, under a limit, and for
    `auto`, it is the most, and the largest divisor of the worker's share is taken.

    Args:
        limit: what is known to fit at most.

    Raises:
        ValueError: the recipe's number does not divide the batch of a fixed group.
    """
    share = recipe.train.global_batch_size // world_size
    wanted = recipe.train.micro_batch_size
    if isinstance(wanted, int) and isinstance(recipe.workers.num_workers, int):
        accumulation_steps(recipe.train.global_batch_size, wanted, world_size)
    most = share if wanted == "auto" else min(wanted, share)
    most = most if limit is None else min(most, limit)
    return next(size for size in range(most, 0, -1) if share % size == 0)


def read_limit(run_folder: Location) -> int | None:
    """What earlier attempts of the run found to fit at most; None = nothing was too large."""
    file = run_folder.child(LIMIT_FILE)
    return int(json.loads(file.read())["images"]) if file.exists() else None


def lower_limit(run_folder: Location, failed: int) -> int:
    """Remember that `failed` images did not fit; returns the new limit, 3/4 of them.

    With it no divisor of the share is passed over that is as much as 3/4 of what failed, and 96
    images come down to one in 11 tries (96, 48, 32, 24, 16, ...).

    Raises:
        ValueError: a single image did not fit.
    """
    if failed <= 1:
        raise ValueError(
            "one image per pass does not fit into device memory; use train.zero_stage=3, "
            "train.activation_checkpointing=1 or train.offload=true, or a smaller model"
        )
    limit = failed * 3 // 4
    run_folder.child(LIMIT_FILE).write(json.dumps({"images": limit}).encode())
    return limit
