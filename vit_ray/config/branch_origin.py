"""What a branch or a fork went on from, as a text that is noted, shown and recorded with its run.

MLflow keeps it in the tag `vit_ray.branched_from`, from which a report of any later time reads it.
"""

from __future__ import annotations

import re
from typing import Final

NOTE: Final = "branched_from.txt"
"""File beside the checkpoints of a branch or fork that says of which run the first one was."""
TAG: Final = "vit_ray.branched_from"


def origin_of(cell_name: str, step: int, own_step: int | None = None) -> str:
    """The text, of the cell whose checkpoint of a step a branch was given.

    Args:
        own_step: the same place in batches of the branch.
    """
    other = "" if own_step in (None, step) else f" (its own step {own_step})"
    return f"{cell_name} at step {step}{other}"


def step_of(origin: str) -> int | None:
    """The branch's own step in such a text; None of another."""
    found = re.search(r" at step (\d+)(?: \(its own step (\d+)\))?$", origin)
    return int(found[2] or found[1]) if found else None


def own_share(origin: str, global_batch_size: float | None, images_seen: float | None) -> float:
    """Of a training's compute the part that is its own: of a branch that after its first step.

    Args:
        origin: as `origin_of` made it; empty for a training that began at its own start.
        global_batch_size: of the training, in images.
        images_seen: by the training, those before the branch included.

    Returns:
        In [0, 1]. 0 of a branch of which it is not known: its trunk has counted most of it.
    """
    if not origin:
        return 1.0
    step = step_of(origin)
    if step is None or global_batch_size is None or not images_seen:
        return 0.0
    return max(0.0, 1 - step * global_batch_size / images_seen)
