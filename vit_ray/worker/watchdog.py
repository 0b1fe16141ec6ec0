"""A worker's watchdog: a thread that reports the worker's progress, and ends a step that hangs."""

import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

BEAT_S = 1.0
FIRST_STEP_S = 600.0
"""Minimum limit for the first step of an attempt, which compiles and waits for the first batch, and
for a part of an evaluation."""
SETUP_S = 3600.0
"""Minimum limit for what comes before: the model is built, and a checkpoint read and restored."""
REPORT_S = 10.0
"""How long a process that is about to end waits for its report to arrive."""
OTHERS_S = 5.0
"""Time for the other ranks, which hang too, to report their calls, before the group ends."""


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
