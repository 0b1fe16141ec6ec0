"""The checkpoint that a starting worker group resumes from: the same for all ranks."""

from collections.abc import Callable

import torch

from vit_ray.checkpoints.checkpoint import Checkpoint
from vit_ray.checkpoints.checkpoint_format import DamagedCheckpointError
from vit_ray.checkpoints.run_checkpoints import checkpoint_to_resume
from vit_ray.storage import Location
from vit_ray.training.collectives import read_by_first
from vit_ray.training.engine import DeepSpeedEngine
from vit_ray.worker.job import UnrecoverableError


def agreed_checkpoint(
    run_folder: Location,
    warn: Callable[[str], object],
    device: torch.device,
    below: int | None = None,
) -> Checkpoint | None:
    """The newest whole checkpoint, as rank 0 finds it; all ranks call it.

    Args:
        warn: on rank 0, called with the reason for each newer one that is passed over.
        below: take one before this step.

    Raises:
        UnrecoverableError: there are checkpoints, but none is whole, or storage does not answer.
    """
    try:
        found: Checkpoint | None = read_by_first(
            lambda: checkpoint_to_resume(run_folder, warn, below), device
        )
    except ValueError as error:
        raise UnrecoverableError(str(error)) from None
    return found


def restore_newest(
    engine: DeepSpeedEngine,
    newest: Checkpoint,
    run_folder: Location,
    warn: Callable[[str], object],
) -> Checkpoint:
    """Restore the checkpoint, or the next older one if a rank finds it damaged; all ranks call it.

    Returns:
        The one that was restored.

    Raises:
        UnrecoverableError: as `agreed_checkpoint`.
    """
    while True:
        try:
            engine.state.restore(newest)
            return newest
        except DamagedCheckpointError as error:
            warn(f"{error}; passed over")
        older = agreed_checkpoint(run_folder, warn, engine.device, below=newest.position.step)
        assert older is not None, "an error says that there is none"
        newest = older
