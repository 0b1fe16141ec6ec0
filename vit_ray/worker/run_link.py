"""A worker's link to the run's record, which lives with the driver.

Metrics and events are sent without waiting for an answer. If the driver has ended, Ray ends this
worker too, so failures of such calls are not errors of the training.
"""

import contextlib
from collections.abc import Mapping
from typing import Final

import ray

from vit_ray.measure.phases import PhaseClock
from vit_ray.outcomes import EventKind
from vit_ray.tracking.recorder import Recorder
from vit_ray.tracking.run_state import beats_between

HANG_REPORT_S: Final = 10.0
RUN_ID_S: Final = 20.0
DELIVERY_S: Final = 120.0
"""Limit for what must arrive, such as a last event: a worker without an answer ends, and its group
restarts."""
SHOW_S: Final = 10.0
"""Limit for a file that training does not depend on."""


class RunLink:
    """One worker's side of the link."""

    def __init__(self, record: Recorder, rank: int, world_size: int = 1) -> None:
        self.record, self.rank, self.world_size = record, rank, world_size
        self._num_beats = rank
        self.clock = PhaseClock()
        """The clock of this attempt."""
        self.log = record.metrics if rank == 0 else lambda step, values: None
        """Takes metrics of a step, which are the same on all ranks; rank 0 sends them."""
        self._tracking_run_id: str | None = None
        self.stop_reason: str | None = None
        """Why the workers were asked to stop, by the last answer to a heartbeat."""
        self.is_resizing = False
        """Whether the driver waits for a checkpoint and the end of this group; on rank 0."""

    def beat(self, step: int) -> None:
        """Send a heartbeat, if it is this rank's turn, and store the requests in the answer."""
        self._num_beats += 1
        is_due = self.rank == 0 or self._num_beats % beats_between(self.world_size) == 0
        if not is_due:
            return
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            orders = self.record.heartbeat(self.rank, step)
            self.stop_reason = orders.stop or self.stop_reason
            self.is_resizing = orders.resizes and self.rank == 0

    def is_ending(self) -> bool:
        """Whether the last heartbeat's answer was to end the run (SIGTERM, Ctrl-C) or the group."""
        return self.stop_reason is not None or self.is_resizing

    def asked_stop_reason(self) -> str:
        """Asked now: another worker's heartbeat may have had the answer first."""
        return self.record.stop_reason() or "another worker was asked to stop"

    def note(self, kind: EventKind, text: str, step: int, wait_s: float = 0.0) -> None:
        """Send an event that all ranks know of, from rank 0; waits `wait_s` until it has arrived.

        An event of a single rank goes to `record` itself.
        """
        if self.rank == 0:
            self.record.event(kind, text, step, wait_s)

    def note_hang(self, reason: str, where: str, threads: str, step: int) -> None:
        """Report that this rank hangs; waits for some seconds at most.

        Args:
            reason: how long it has not moved.
            where: the calls that its training is in; ranks in the same calls are reported once.
            threads: the calls that all its threads are in.
            step: steps completed.
        """
        waited_for: str | None = None
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            waited_for = self.record.hanging(self.rank, self.world_size, where, HANG_REPORT_S)
        if waited_for == "":
            return
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            cause = f" {waited_for}." if waited_for else ""
            text = f"worker {self.rank}: {reason}.{cause} Threads of worker {self.rank}:\n{threads}"
            self.record.event(EventKind.HUNG, text, step, HANG_REPORT_S)

    def keep_file(
        self, name: str, content: bytes, folder: str = "profile", limit_s: float = DELIVERY_S
    ) -> None:
        """Keep a file with the run, in a folder of its artifacts; returns once it has arrived."""
        self.record.content(name, content, folder, limit_s)

    def show_files(self, files: Mapping[str, bytes], folder: str) -> None:
        """As `keep_file`, for files that training does not depend on: failures are ignored."""
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            for name, content in files.items():
                self.keep_file(name, content, folder, SHOW_S)

    def tracking_run_id(self) -> str | None:
        """MLflow's id of the run on rank 0; None if it is not known in time.

        It never changes, so it is asked for until it is known.
        """
        if self.rank == 0 and self._tracking_run_id is None:  # only rank 0's position is kept
            # Training continues without its tracking.
            with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
                self._tracking_run_id = self.record.run_id(RUN_ID_S)
        return self._tracking_run_id
