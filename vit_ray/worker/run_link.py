"""A worker's link to the run's record and to its control, which live with the driver.

Metrics and events are sent without waiting for an answer. If the driver has ended, Ray ends this
worker too, so failures of such calls are not errors of the training.
"""

import contextlib
import math
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

import ray

from vit_ray.measure.goodput import Work, WorkClock
from vit_ray.outcomes import EventKind, Failure, WorkerPlace

HANG_REPORT_S: Final = 10.0
RUN_ID_S: Final = 20.0
DELIVERY_S: Final = 120.0
"""Limit for what must arrive: a worker that gets no answer ends, and its group restarts."""
SHOW_S: Final = 10.0
"""Limit for a file that training does not depend on."""
_BEATS_AT_A_TIME: Final = 128
"""In a large group: a heartbeat takes 1.4 ms of CPU in the process that records the run."""


def beats_between(world_size: int) -> int:
    """A rank above 0 sends a heartbeat once in this many beats (one a second) of its watchdog.

    Some rank of a large group still learns of a request within a second, and the ranks agree on it.
    """
    return math.ceil(world_size / _BEATS_AT_A_TIME)


class Orders(NamedTuple):
    """The answer to a heartbeat."""

    stop: str | None
    """Why to checkpoint and end; None = continue."""
    saves: int
    """Checkpoints that were requested since the run was opened."""


class RecordsRun(Protocol):
    """The record of a run, as workers use it.

    If `wait_s` is above 0, wait that long until it has arrived; RayError or RuntimeError if it has
    not.
    """

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Metrics of a step, which are the same on all ranks."""

    def event(self, kind: EventKind, text: str, step: int, wait_s: float = 0.0) -> None:
        """An entry of the run's history."""

    def content(self, name: str, content: bytes, folder: str, wait_s: float) -> None:
        """A file to keep with the run, in a folder of its artifacts."""

    def run_id(self, wait_s: float) -> str | None:
        """MLflow's id of the run; None while MLflow is away."""

    def work(self, work: Work, wait_s: float = 0.0) -> None:
        """What an attempt has completed so far; replaces what it had before."""

    def place_wait(self, begin_s: float, end_s: float) -> None:
        """The worker group has waited for its place; Unix times."""


class ControlsRun(Protocol):
    """The control of a run, as its workers and their policies use it.

    Calls wait for an answer; RayError or RuntimeError if there is none.
    """

    def heartbeat(self, rank: int, step: int, *introduction: str) -> Orders | None:
        """A worker is at `step`; None: no news, as after the end.

        Args:
            introduction: host, node, detail and group, as in `WorkerPlace`, when an attempt
                begins.
        """

    def places(self) -> dict[int, WorkerPlace]:
        """Places of the workers that have introduced themselves since the last failure, by rank."""

    def hanging(self, rank: int, world_size: int, where: str, wait_s: float) -> str | None:
        """Which workers the others wait for; empty if that was reported before, None: not known."""

    def stop_reason(self) -> str | None:
        """Why the run was asked to stop, asked now."""

    def request_save(self) -> None:
        """Ask the workers for a checkpoint at once."""

    def fail(self, failure: Failure) -> None:
        """End the workers because a restart would not help."""

    def failure(self) -> Failure | None:
        """The argument of `fail`, if it was called."""


class RunLink:
    """One worker's side of the link."""

    def __init__(
        self,
        record: RecordsRun,
        control: ControlsRun,
        rank: int,
        world_size: int = 1,
        *introduction: str,
    ) -> None:
        """`introduction`: host, node, detail and group, as in `WorkerPlace`."""
        self._record, self.control, self.rank = record, control, rank
        self._world_size, self._num_beats = world_size, rank
        self.clock = WorkClock(world_size)
        """The clock of this attempt."""
        self._sent = self.clock.work
        self._introduction = introduction
        """Sent until it has arrived: a heartbeat is small."""
        self.log = record.metrics if rank == 0 else lambda step, values: None
        """Takes metrics of a step, which are the same on all ranks; rank 0 sends them."""
        self._tracking_run_id: str | None = None
        self.stop_reason: str | None = None
        """Why the workers were asked to stop, by the last answer to a heartbeat."""
        self._saves_requested = 0
        # Before the first answer it is not known how many were requested in earlier attempts.
        self._saves_seen: int | None = None

    def beat(self, step: int) -> None:
        """Send a heartbeat, if it is this rank's turn, and store the requests in the answer."""
        self._num_beats += 1
        is_due = self.rank == 0 or self._num_beats % beats_between(self._world_size) == 0
        if not (is_due or self._introduction):
            return
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            orders = self.control.heartbeat(self.rank, step, *self._introduction)
            if orders is not None:
                self._introduction = ()
                self.stop_reason = orders.stop or self.stop_reason
                self._saves_requested = orders.saves
                if self._saves_seen is None:
                    self._saves_seen = orders.saves

        if self.rank == 0:
            self.send_work()

    def send_work(self, wait_s: float = 0.0) -> None:
        """Send what this attempt has completed, if that has changed."""
        if self.clock.work is not self._sent:
            self._sent = self.clock.work
            with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
                self._record.work(self._sent, wait_s)

    @property
    def is_resizing(self) -> bool:
        """Whether the driver waits for a checkpoint and the end of this group, on rank 0."""
        return self.rank == 0 and self._saves_seen not in (None, self._saves_requested)

    def is_ending(self) -> bool:
        """Whether the last heartbeat's answer was to end the run (SIGTERM, Ctrl-C) or the group."""
        return self.stop_reason is not None or self.is_resizing

    def asked_stop_reason(self) -> str:
        """Asked now: another worker's heartbeat may have had the answer first."""
        return self.control.stop_reason() or "another worker was asked to stop"

    def note(self, kind: EventKind, text: str, step: int) -> None:
        """Send an event that all ranks know of, from rank 0."""
        if self.rank == 0:
            self.note_own(kind, text, step)

    def note_own(self, kind: EventKind, text: str, step: int) -> None:
        """Send an event of only this rank."""
        self._record.event(kind, text, step)

    def note_last(self, kind: EventKind, text: str, step: int) -> None:
        """As `note`, and wait until it has arrived: this process ends right after."""
        if self.rank == 0:
            self._record.event(kind, text, step, DELIVERY_S)

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
            waited_for = self.control.hanging(self.rank, self._world_size, where, HANG_REPORT_S)
        if waited_for == "":
            return
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            cause = f" {waited_for}." if waited_for else ""
            text = f"worker {self.rank}: {reason}.{cause} Threads of worker {self.rank}:\n{threads}"
            self._record.event(EventKind.HUNG, text, step, HANG_REPORT_S)

    def keep_file(
        self, name: str, content: bytes, folder: str = "profile", limit_s: float = DELIVERY_S
    ) -> None:
        """Keep a file with the run, in a folder of its artifacts; returns once it has arrived."""
        self._record.content(name, content, folder, limit_s)

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
                self._tracking_run_id = self._record.run_id(RUN_ID_S)
        return self._tracking_run_id
