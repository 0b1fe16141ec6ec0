"""A worker's heartbeat: a thread that tells where the worker is, and ends a step that hangs."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from vit_ray.train.progress import Progress

BEAT_S = 1.0
FIRST_STEP_S = 600.0
"""Least time for the first step of an attempt, which compiles and waits for the first batch."""


class Watchdog(threading.Thread):
    """Runs from its making until `stop`."""

    def __init__(
        self,
        progress: Progress,
        timeout_s: float,
        beat: Callable[[int], None],
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            timeout_s: longest time that a step may take.
            beat: called about once a second with the step.
            tell: called with the reason before the process is ended.
        """
        super().__init__(daemon=True, name="watchdog")
        self._progress, self._timeout_s = progress, timeout_s
        self._beat, self._tell = beat, tell
        self._ended = threading.Event()
        self.is_paused = False
        self._last_step = progress.step
        self._has_moved = False
        self._moved_s = time.monotonic()
        self.start()

    def run(self) -> None:
        """Beat until told to stop."""
        while not self._ended.wait(BEAT_S):
            self._watch_step()
            self._beat(self._progress.step)

    def pause(self) -> None:
        """Do not watch: what is waited for has time limits of its own."""
        self.is_paused = True

    def expect_long_steps(self) -> None:
        """Until a step is done: a part of an evaluation may take as long as the first step."""
        self.resume()
        self._last_step, self._has_moved = self._progress.step, False

    def note_move(self) -> None:
        """A part of an evaluation is done."""
        self._moved_s = time.monotonic()

    def resume(self) -> None:
        """Watch steps again, from now."""
        self._moved_s = time.monotonic()
        self.is_paused = False

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()

    def _watch_step(self) -> None:
        limit_s = self._timeout_s if self._has_moved else max(self._timeout_s, FIRST_STEP_S)
        if self._progress.step != self._last_step or self.is_paused:
            self._has_moved |= self._progress.step != self._last_step
            self._last_step, self._moved_s = self._progress.step, time.monotonic()
        elif time.monotonic() - self._moved_s > limit_s:
            self._end_process(limit_s)

    def _end_process(self, limit_s: float) -> None:
        """A stuck collective cannot be interrupted; a dead worker makes Ray restart the group."""
        self._tell(f"no step since {limit_s:g} s (train.step_timeout_s); restarting")
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        os._exit(1)
