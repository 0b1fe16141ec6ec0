"""The origin of a branch or fork, as a text that is noted, shown and recorded with its run.

MLflow keeps it in the tag `vit_ray.branched_from`; later reports read it from there.
"""

import re
from typing import Final

NOTE: Final = "branched_from.txt"
"""File next to the checkpoints of a branch or fork that names the run of its first checkpoint."""
TAG: Final = "vit_ray.branched_from"


def origin_of(cell_name: str, step: int) -> str:
    """The text for a branch that starts from `cell_name`'s checkpoint at `step`."""
    return f"{cell_name} at step {step}"


def step_of(origin: str) -> int | None:
    """The step in such a text; None if it has none."""
    found = re.search(r" at step (\d+)$", origin)
    return int(found[1]) if found else None


def own_share(origin: str, global_batch_size: float | None, images_seen: float | None) -> float:
    """The share of a training's compute that is its own: for a branch, the steps after its start.

    Args:
        origin: as `origin_of` made it; empty for a training that began at step 0.
        global_batch_size: of the training, in images.
        images_seen: by the training, those before the branch included.

    Returns:
        In [0, 1]. 0 for a branch whose start is unknown: its parent run has counted most of it.
    """
    if not origin:
        return 1.0
    step = step_of(origin)
    if step is None or global_batch_size is None or not images_seen:
        return 0.0
    return max(0.0, 1 - step * global_batch_size / images_seen)
