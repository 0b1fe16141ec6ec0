"""The checkpoint that a starting worker group resumes from: chosen by rank 0, for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from vit_ray.storage import Location
from vit_ray.train.checkpoint import Checkpoint
from vit_ray.train.run_checkpoints import newest_verified_checkpoint

PAUSES_S: Final = (1.0, 5.0, 15.0, 60.0, 120.0)
"""Before each new try of a storage that does not answer; an error would end the run."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that all workers of a group open, and the stream's place that goes with it."""

    step: int | None
    """Of the checkpoint; None = there is none."""
    samples_seen: int
    is_over: bool = False
    """There is nothing left to do."""

    @classmethod
    def of(cls, checkpoint: Checkpoint | None, total_steps: int) -> ResumePoint:
        """The point after a checkpoint; None = the start of the run."""
        if checkpoint is None:
            return cls(None, 0)
        position = checkpoint.position
        is_over = position.progress.is_over(total_steps)
        return cls(position.step, position.samples_seen, is_over)


def choose_resume_point(
    run_folder: Location,
    total_steps: int,
    note: Callable[[str, str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> ResumePoint:
    """The point after the newest checkpoint whose every byte is as written.

    What is newer than the chosen one is set aside: training is about to write the same folders
    again. A storage that is away for some minutes is waited for.

    Args:
        note: called with kind and text of an event for the run's history.

    Raises:
        NoUsableCheckpointError: there are checkpoints, and none of them is good.
        OSError: the storage was away for too long.
    """
    for pause_s in PAUSES_S:
        try:
            return ResumePoint.of(_newest(run_folder, note), total_steps)
        except OSError as error:
            note("storage away", f"{run_folder.path}: {error}")
            sleep(pause_s)
    return ResumePoint.of(_newest(run_folder, note), total_steps)


def _newest(run_folder: Location, note: Callable[[str, str], None]) -> Checkpoint | None:
    return newest_verified_checkpoint(run_folder, lambda text: note("damaged checkpoint", text))
