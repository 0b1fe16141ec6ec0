"""What a branch or a fork went on from, as a text that is noted, shown and recorded with its run.

MLflow keeps it in the tag `vit_ray.branched_from`, from which a report of any later time reads it.
"""

from __future__ import annotations

import re
from typing import Final

NOTE: Final = "branched_from.txt"
"""File beside the checkpoints: whose the first of them was."""
TAG: Final = "vit_ray.branched_from"


def origin_of(cell_name: str, step: int) -> str:
    """The text, of the cell whose checkpoint of a step a branch was given."""
    return f"{cell_name} at step {step}"


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
    step = re.search(r" at step (\d+)$", origin)
    if step is None or global_batch_size is None or not images_seen:
        return 0.0
    return max(0.0, 1 - int(step.group(1)) * global_batch_size / images_seen)
