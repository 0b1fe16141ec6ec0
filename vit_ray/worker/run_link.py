"""What a worker reports while it works: the link to the run's record, and the watchdog.

The record is an actor on the driver's node. Metrics and events are sent without waiting for an
answer. If the driver has ended, Ray ends this worker too, so failures of such calls are no errors
of the training. The watchdog is a thread that sends heartbeats, and ends a step that hangs.
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
from pathlib import Path
from types import FrameType
from typing import Final

import ray

from vit_ray.measure.phases import PhaseClock
from vit_ray.outcomes import EventKind, beats_between
from vit_ray.tracking.recorder import Recorder

RUN_ID_S: Final = 20.0
# Limit for what must arrive, such as a last event: a worker without an answer ends, and its group
# restarts.
DELIVERY_S: Final = 120.0
# Limit for a file that training does not depend on.
SHOW_S: Final = 10.0
BEAT_S: Final = 1.0
# Minimum limit for the first step of an attempt, which compiles and waits for the first batch, and
# for a part of an evaluation.
FIRST_STEP_S: Final = 600.0
# Minimum limit for the set-up: the model is built, and a checkpoint read and restored.
SETUP_S: Final = 3600.0
# How long a hanging process waits for its report to arrive, before it ends.
REPORT_S: Final = 10.0
# How long it then waits for the reports of other ranks, which hang too.
OTHER_REPORTS_S: Final = 5.0


class RunLink:
    """A worker's link to the run's record.

    Attributes:
        clock: the clock of this attempt.
        watchdog: ends this process if a step hangs, and sends the heartbeats.
        log: takes metrics of a step, which are the same on all ranks; rank 0 sends them.
        stop_reason: why the workers were asked to stop, by the last answer to a heartbeat.
        is_resizing: on rank 0, whether the driver waits for a checkpoint and the group's end.
    """

    def __init__(
        self, record: Recorder, rank: int, world_size: int = 1, step_timeout_s: float = 600.0
    ) -> None:
        """`step_timeout_s`: longest time that a step may take."""
        self.record, self.rank, self.world_size = record, rank, world_size
        self.watchdog, self.clock = Watchdog(self, step_timeout_s), PhaseClock()
        self.log = record.metrics if rank == 0 else lambda step, values: None
        self.stop_reason: str | None = None
        self.is_resizing = False
        self._num_beats = rank

    def beat(self, step: int) -> None:
        """Send a heartbeat, if it is this rank's turn, and store the requests in the answer."""
        self._num_beats += 1
        if self.rank != 0 and self._num_beats % beats_between(self.world_size) != 0:
            return
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            orders = self.record.heartbeat(self.rank, step)
            self.stop_reason = orders.stop or self.stop_reason
            self.is_resizing = orders.resizes and self.rank == 0

    def is_ending(self) -> bool:
        """Whether a heartbeat's answer was to end the run (SIGTERM, Ctrl-C) or the group."""
        return self.stop_reason is not None or self.is_resizing

    def asked_stop_reason(self) -> str:
        """The reason in the run's record: this worker's last heartbeat may be older."""
        return self.record.stop_reason() or "another worker was asked to stop"

    def note(self, kind: EventKind, text: str, step: int, wait_s: float = 0.0) -> None:
        """Send an event that all ranks report; rank 0 sends it, and waits up to `wait_s`.

        An event of a single rank is sent by `record.event`.
        """
        if self.rank == 0:
            self.record.event(kind, text, step, wait_s)

    def note_hang(self, reason: str, where: str, threads: str, step: int) -> None:
        """Report that this rank hangs; waits for some seconds at most.

        Args:
            reason: how long no step has ended.
            where: the calls in which the training hangs; ranks in the same calls are reported once.
            threads: the calls of all threads of this process.
            step: steps completed.
        """
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            late_workers = self.record.hanging(self.rank, self.world_size, where, REPORT_S)
            if late_workers:  # else another rank has reported these calls
                text = f"worker {self.rank}: {reason}. {late_workers}. Threads of this worker:"
                self.record.event(EventKind.HUNG, f"{text}\n{threads}", step, REPORT_S)

    def keep_file(
        self, name: str, content: bytes, folder: str = "profile", limit_s: float = DELIVERY_S
    ) -> None:
        """Store a file in a folder of the run's artifacts; returns once it has arrived."""
        self.record.content(name, content, folder, limit_s)

    def show_files(self, files: Mapping[str, bytes], folder: str) -> None:
        """Store files that training does not depend on; failures are ignored."""
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            for name, content in files.items():
                self.keep_file(name, content, folder, SHOW_S)

    def tracking_run_id(self) -> str | None:
        """MLflow's run id on rank 0, which writes it into checkpoints; None if not in time."""
        # Training continues while MLflow is away.
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            return self.record.run_id(RUN_ID_S) if self.rank == 0 else None
        return None


def end_process() -> None:
    """End a process whose collective cannot be interrupted; the driver then starts a new group."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    time.sleep(OTHER_REPORTS_S)
    os._exit(1)


def describe_threads() -> str:
    """The calls of each thread of this process, one line each, the innermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"  {names.get(ident, ident)}: {describe_calls(frame, max_frames=12)}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def describe_calls(frame: FrameType, max_frames: int) -> str:
    """The calls that a thread is in, the innermost first."""
    return " < ".join(
        f"{call.name} ({Path(call.filename).name}:{call.lineno})"
        for call in reversed(traceback.extract_stack(frame)[-max_frames:])
    )


class Watchdog:
    """Ends this process if the training hangs; the training's thread makes it and calls it."""

    def __init__(
        self,
        link: RunLink,
        timeout_s: float,
        *,
        end: Callable[[], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            link: sends a heartbeat about once a second, and the report before the process is ended.
            timeout_s: longest time that a step may take.
            end: ends the process.
        """
        self._link, self._step, self._timeout_s = link, 0, timeout_s
        self._end, self._clock = end, clock
        self._training_thread = threading.get_ident()
        self._stopped = threading.Event()
        self.allow(max(timeout_s, SETUP_S))

    def start(self) -> None:
        """Start two threads: one watches, the other sends heartbeats and waits for answers."""
        threads = {"watchdog": self.check, "heartbeats": lambda: self._link.beat(self._step)}
        for name, work in threads.items():
            threading.Thread(target=self._repeat, args=(work,), daemon=True, name=name).start()

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._stopped.wait(BEAT_S):
            work()

    def allow(self, seconds: float) -> None:
        """Set a limit from now on, instead of the present limit; `inf` for none."""
        self._limit_s, self._deadline_s = seconds, self._clock() + seconds

    def expect_long_step(self) -> None:
        """Allow time for the first step of an attempt, or a part of an evaluation."""
        self.allow(max(self._timeout_s, FIRST_STEP_S))

    def note_step(self, step: int) -> None:
        """`step` steps are completed; the next step has `timeout_s`."""
        self._step = step
        self.allow(self._timeout_s)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the limit in the block; then start the previous limit again."""
        limit_s = self._limit_s
        self.allow(math.inf)
        yield
        self.allow(limit_s)

    def stop(self) -> None:
        self._stopped.set()

    def check(self) -> None:
        """End the process if the limit has passed."""
        if self._clock() > self._deadline_s:
            key = " (train.step_timeout_s)" if self._limit_s == self._timeout_s else ""
            reason = f"no step for {self._limit_s:g} s{key}; restarting"
            where = describe_calls(sys._current_frames()[self._training_thread], max_frames=6)
            report = reason, where, describe_threads(), self._step
            # In a thread: the recorder's process may hang, too.
            reporting = threading.Thread(target=self._link.note_hang, args=report, daemon=True)
            reporting.start()
            reporting.join(REPORT_S)
            self._end()
