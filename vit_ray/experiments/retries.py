"""A training among many that fails: once more from its newest checkpoint, and then given up."""

from __future__ import annotations

from vit_ray.config import Recipe
from vit_ray.launch.model_checks import Kind
from vit_ray.launch.pool_training import RunDivergedError, RunFailedError
from vit_ray.launch.run import ParentRun, RunResult, train
from vit_ray.outcomes import EventKind


def train_with_retries(
    recipe: Recipe,
    kind: Kind,
    parent: ParentRun,
    retries: int,
    tags: dict[str, str],
    retried: EventKind,
    until_step: int | None = None,
) -> RunResult:
    """Train; after a failure again from the newest checkpoint, unless the training has diverged.

    Args:
        retried: of the event that each further start is noted by.
        until_step: as in `train`.

    Raises:
        RunDivergedError: it has diverged, which it would do again.
        RunFailedError: it has failed once more than `retries`.
        ValueError: as `train`.
    """
    for left in range(retries, -1, -1):
        try:
            return train(recipe, kind=kind, parent=parent, tags=tags, until_step=until_step)
        except RunFailedError as error:
            if left == 0 or isinstance(error, RunDivergedError):
                raise
            text = f"{recipe.name}: {error}; it is started again from its newest checkpoint"
            parent.run.record.event(retried, text, 0)
    raise AssertionError
