"""The checkpoint that a starting worker group resumes from: selected by rank 0, for all ranks."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from vit_ray.checkpoints.run_checkpoints import newest_verified_checkpoint
from vit_ray.outcomes import EventKind
from vit_ray.storage import Location

ASK_S: Final = 30.0
"""Interval at which rank 0 sends the others whether the selection is done."""
CHOICE_LIMIT_S: Final = 4 * 3600.0
"""Time limit for reading the newest checkpoint back, and older ones if it is damaged."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that all workers of a group open, and the matching position in the stream."""

    step: int | None
    """Step of the checkpoint; None = there is none."""
    samples_seen: int
    is_over: bool = False
    """There is nothing left to do."""


def choose_resume_point(
    run_folder: Location,
    total_steps: int,
    note: Callable[[EventKind, str], None],
) -> ResumePoint:
    """The point after the newest checkpoint that is intact in every byte.

    Newer ones are set aside: training is about to write the same folders again.

    Args:
        note: called with kind and text of an event for the run's history.

    Raises:
        NoUsableCheckpointError: there are checkpoints, but none of them is valid.
        OSError: the storage was away for too long.
    """
    newest = newest_verified_checkpoint(
        run_folder, lambda text: note(EventKind.CHECKPOINT_DAMAGED, text)
    )
    if newest is None:
        return ResumePoint(None, 0)
    position = newest.position
    is_over = position.progress.is_over(total_steps)
    return ResumePoint(position.step, position.samples_seen, is_over)


class ResumePointChoice:
    """A selection that runs in a thread, while the waiting ranks keep exchanging messages."""

    def __init__(
        self, choose: Callable[[], ResumePoint], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._answers: queue.Queue[ResumePoint | str] = queue.Queue()
        self._clock, self._since_s = clock, clock()
        threading.Thread(
            target=self._choose, args=(choose,), daemon=True, name="resume-point"
        ).start()

    def wait(
        self, note: Callable[[EventKind, str], None], timeout_s: float = ASK_S
    ) -> ResumePoint | str | None:
        """The point, or why there is none; None (and an event) while it is not known."""
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            waited_s = self._clock() - self._since_s
            if waited_s > CHOICE_LIMIT_S:
                return (
                    f"no checkpoint could be selected in {waited_s:.0f} s: storage does not answer"
                )
            note(
                EventKind.STORAGE_SLOW,
                f"has been selecting the checkpoint to resume from for {waited_s:.0f} s",
            )
            return None

    def _choose(self, choose: Callable[[], ResumePoint]) -> None:
        try:
            self._answers.put(choose())
        except Exception as error:  # all ranks end with it
            self._answers.put(str(error) or repr(error))
