"""How many images a worker takes per pass: by the recipe, the memory estimate, and past failures.

A pass that runs out of memory lowers the limit, which is kept in the run's folder together with the
conditions it holds for; the worker group is then restarted from its checkpoint, with the same
global batches and more accumulation. A trial's result is kept there too, so that later attempts
take passes of the same size.
"""

import json
from typing import Final, Literal

from vit_ray.config import Recipe
from vit_ray.config.training_sections import accumulation_steps
from vit_ray.storage import Location

LIMIT_FILE = "micro_batch_limit.json"
_DECIDES_MEMORY: Final = (
    ("optim", "name"),
    ("optim", "frozen"),
    *(("train", key) for key in (
        "precision", "zero_stage", "offload", "activation_checkpointing", "compile", "averaging",
        "loss", "masked_target", "mixup", "cutmix",
    )),
)  # fmt: skip
CPU_MOST = 64  # images; larger passes are no faster on a CPU and only take memory


def micro_batch_size(recipe: Recipe, world_size: int, limit: int | None = None) -> int:
    """Images per worker and pass for this many workers.

    A number in the recipe is exact for a group of fixed size. In an elastic group, under a limit,
    and for `auto`, it is the maximum, and the largest divisor of the worker's share is taken.

    Args:
        limit: the most that is known to fit.

    Raises:
        ValueError: the recipe's number does not divide the batch of a fixed group.
    """
    share = recipe.train.global_batch_size // world_size
    wanted = recipe.train.micro_batch_size
    if isinstance(wanted, int) and isinstance(recipe.workers.num_workers, int):
        accumulation_steps(recipe.train.global_batch_size, wanted, world_size)
    most = share if wanted == "auto" else min(wanted, share)
    most = most if limit is None else min(most, limit)
    sizes = pass_sizes(recipe, world_size)
    return max((size for size in sizes if size <= most), default=sizes[0])


def pass_sizes(recipe: Recipe, world_size: int) -> list[int]:
    """Images that a worker may take per pass, in ascending order.

    Raises:
        ValueError: images are mixed in pairs, and a worker's share is an odd number.
    """
    train = recipe.train
    share, least = train.global_batch_size // world_size, train.least_pass
    if share % least:
        raise ValueError(
            f"train.mixup and train.cutmix mix images in pairs, and the {share} of "
            f"train.global_batch_size={train.global_batch_size} images for each of {world_size} "
            f"workers are not an even number; use a multiple of {least * world_size}"
        )
    return [size for size in range(least, share + 1, least) if share % size == 0]


def limit_key(recipe: Recipe, world_size: int, device: str) -> str:
    """What a limit depends on, as text; under other conditions the run's memory differs."""
    sections = recipe.model_dump(mode="json")
    facts = {f"{part}.{key}": sections[part][key] for part, key in _DECIDES_MEMORY}
    facts |= {"model": sections["model"], "world_size": world_size, "device": device}
    return json.dumps(facts, sort_keys=True)


def trial_key(key: str, share: int) -> str:
    """The same for a trial, whose size divides a worker's `share` of a step's images."""
    return f"{share} images: {key}"


Kind = Literal["limits", "trials"]
"""Limits: the most that fits. Trials: what ranks agreed on after their trials, which does not limit
what a recipe may ask for."""


def known_images(run_folder: Location, kind: Kind, key: str) -> int | None:
    """Images per pass that the run's earlier attempts found under `key`, or None."""
    return _noted(run_folder)[kind].get(key)


def note_images(run_folder: Location, kind: Kind, key: str, images: int) -> None:
    """Have later attempts find `images` under `key`."""
    noted = _noted(run_folder)
    noted[kind][key] = images
    run_folder.child(LIMIT_FILE).write(json.dumps(noted).encode())


def lower_limit(run_folder: Location, key: str, failed: int, least: int = 1) -> int:
    """Note that `failed` images did not fit; returns the new limit, 3/4 of them.

    With this no divisor of the share that is at least 3/4 of what failed is skipped, and 96 images
    come down to one in 11 tries (96, 48, 32, 24, 16, ...).

    Args:
        least: the fewest images per pass.

    Raises:
        ValueError: the fewest did not fit.
    """
    if failed <= least:
        few = "one image per pass does" if least == 1 else "a pair of images per pass does"
        raise ValueError(
            f"{few} not fit into device memory; use train.zero_stage=3, "
            "train.activation_checkpointing=1 or train.offload=true, or a smaller model"
        )
    limit = max(least, failed * 3 // 4)
    note_images(run_folder, "limits", key, limit)
    return limit


def _noted(run_folder: Location) -> dict[str, dict[str, int]]:
    """Images by key; empty if the file is damaged, or lacks the conditions.

    A lost limit costs one more pass that runs out of memory, or one more trial.
    """
    try:
        found = json.loads(run_folder.child(LIMIT_FILE).read())
        return {
            kind: {str(key): max(1, int(images)) for key, images in found.get(kind, {}).items()}
            for kind in ("limits", "trials")
        }
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {"limits": {}, "trials": {}}
