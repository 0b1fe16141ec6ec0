"""A worker's watchdog: a thread that reports where the worker is, and ends a step that hangs."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

BEAT_S = 1.0
FIRST_STEP_S = 600.0
"""Least time for the first step of an attempt, which compiles and waits for the first batch."""


def end_process() -> None:
    """A stuck collective cannot be interrupted; a dead worker makes Ray restart the group."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    os._exit(1)


class Watchdog(threading.Thread):
    """Watches from `start` until `stop`; all other methods are called by the training thread."""

    def __init__(
        self,
        step: int,
        timeout_s: float,
        beat: Callable[[int], None],
        report_hang: Callable[[str, int], None],
        *,
        end: Callable[[], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            step: steps completed so far.
            timeout_s: longest time that a step may take.
            beat: called about once a second with the steps completed.
            report_hang: called with the reason and the step before the process is ended.
            end: ends the process.
        """
        super().__init__(daemon=True, name="watchdog")
        self._step, self._timeout_s = step, timeout_s
        self._beat, self._report_hang = beat, report_hang
        self._end, self._clock = end, clock
        self._stopped = threading.Event()
        self._is_paused = False
        self._has_moved = False
        self._moved_s = clock()

    def run(self) -> None:
        """Beat until stopped."""
        while not self._stopped.wait(BEAT_S):
            self.check()
            self._beat(self._step)

    def note_step(self, step: int) -> None:
        """A step is done."""
        self._step, self._has_moved = step, True
        self._moved_s = self._clock()

    def pause(self) -> None:
        """Do not watch: what is waited for has time limits of its own."""
        self._is_paused = True

    def expect_long_steps(self) -> None:
        """Until a step is done: a part of an evaluation may take as long as the first step."""
        self.resume()
        self._has_moved = False

    def note_move(self) -> None:
        """A part of an evaluation is done."""
        self._moved_s = self._clock()

    def resume(self) -> None:
        """Watch steps again, from now."""
        self._moved_s = self._clock()
        self._is_paused = False

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def check(self) -> None:
        """End the process if the step in progress has taken too long."""
        limit_s = self._timeout_s if self._has_moved else max(self._timeout_s, FIRST_STEP_S)
        if not self._is_paused and self._clock() - self._moved_s > limit_s:
            reason = f"no step since {limit_s:g} s (train.step_timeout_s); restarting"
            self._report_hang(reason, self._step)
            self._end()
