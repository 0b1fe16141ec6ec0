"""What a worker reports while it works: its link to the run's record, and its watchdog.

The record lives with the driver. Metrics and events are sent without waiting for an answer. If the
driver has ended, Ray ends this worker too, so failures of such calls are not errors of the
training. The watchdog is a thread that reports the worker's progress, and ends a step that hangs.
"""

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import ray

from vit_ray.measure.phases import PhaseClock
from vit_ray.outcomes import EventKind
from vit_ray.tracking.recorder import Recorder
from vit_ray.tracking.run_state import beats_between

HANG_REPORT_S: Final = 10.0
"""Longest wait for the record's answer to each call of the report of a hang."""
RUN_ID_S: Final = 20.0
DELIVERY_S: Final = 120.0
"""Limit for what must arrive, such as a last event: a worker without an answer ends, and its group
restarts."""
SHOW_S: Final = 10.0
"""Limit for a file that training does not depend on."""
BEAT_S: Final = 1.0
FIRST_STEP_S: Final = 600.0
"""Minimum limit for the first step of an attempt, which compiles and waits for the first batch, and
for a part of an evaluation."""
SETUP_S: Final = 3600.0
"""Minimum limit for what comes before: the model is built, and a checkpoint read and restored."""
REPORT_S: Final = 10.0
"""How long a process that is about to end waits for its report to arrive."""
OTHERS_S: Final = 5.0
"""Time for the other ranks, which hang too, to report their calls, before the group ends."""


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


def end_process() -> None:
    """A stuck collective cannot be interrupted; the driver starts a new group for a dead worker."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    time.sleep(OTHERS_S)
    os._exit(1)


def describe_threads(most_frames: int = 12) -> str:
    """The calls of each thread of this process, one line each, the innermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"  {names.get(ident, ident)}: {describe_calls(frame, most_frames)}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def describe_calls(frame: FrameType | None, most_frames: int) -> str:
    """The calls that a thread is in, the innermost first; empty if it has ended."""
    if frame is None:
        return ""
    return " < ".join(
        f"{call.name} ({Path(call.filename).name}:{call.lineno})"
        for call in reversed(traceback.extract_stack(frame)[-most_frames:])
    )


class Watchdog(threading.Thread):
    """Watches from `start` until `stop`; all other methods are called by the training thread."""

    def __init__(
        self,
        timeout_s: float,
        beat: Callable[[int], None],
        report_hang: Callable[[str, str, str, int], None],
        *,
        end: Callable[[], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            timeout_s: longest time that a step may take.
            beat: called about once a second with the steps completed.
            report_hang: called before the process is ended, with the reason, the calls that the
                training is in, the calls of all threads, and the step.
            end: ends the process.
        """
        super().__init__(daemon=True, name="watchdog")
        self._step = 0
        self._timeout_s = timeout_s
        self._beat, self._report_hang = beat, report_hang
        self._end, self._clock = end, clock
        self._watched = threading.get_ident()
        self._stopped = threading.Event()
        self.allow(max(timeout_s, SETUP_S))

    def start(self) -> None:
        """Watch, and send heartbeats from another thread, since these wait for an answer."""
        super().start()
        threading.Thread(target=self._send_beats, daemon=True, name="heartbeats").start()

    def run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            self.check()

    def _send_beats(self) -> None:
        while not self._stopped.wait(BEAT_S):
            self._beat(self._step)

    def allow(self, seconds: float) -> None:
        """For what comes next; a step that is done allows the next one the usual time."""
        self._limit_s, self._ends_s = seconds, self._clock() + seconds

    def expect_long_step(self) -> None:
        """The first step of an attempt, or a part of an evaluation."""
        self.allow(max(self._timeout_s, FIRST_STEP_S))

    def note_step(self, step: int) -> None:
        """`step` steps are completed."""
        self._step = step
        self.allow(self._timeout_s)

    def pause(self) -> None:
        """What follows has its own time limits."""
        self.allow(math.inf)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """As `pause`, in the block; what comes after it has as much time as what was before."""
        limit_s = self._limit_s
        self.pause()
        yield
        self.allow(limit_s)

    def stop(self) -> None:
        self._stopped.set()

    def check(self) -> None:
        """End a hanging process if the step in progress has taken too long."""
        if self._clock() > self._ends_s:
            key = " (train.step_timeout_s)" if self._limit_s == self._timeout_s else ""
            reason = f"no step for {self._limit_s:g} s{key}; restarting"
            where = describe_calls(sys._current_frames().get(self._watched), most_frames=6)
            report = reason, where, describe_threads(), self._step
            # In a thread: the process that records the run may hang, too.
            reporting = threading.Thread(target=self._report_hang, args=report, daemon=True)
            reporting.start()
            reporting.join(REPORT_S)
            self._end()
