"""CPU time of the processes that a benchmark has started, of those that have ended, too."""

import threading
from contextlib import suppress
from typing import Self

import psutil

LOOK_S = 1.0
"""Of what a process takes between the last look at it and its end nothing is counted."""


class StartedProcesses:
    """Looks at them inside its `with` block; a process that has ended counts as it was last seen.

    The operating system's own sum does not have them: Ray has it forget processes that end.
    """

    def __init__(self) -> None:
        self._seen_s: dict[psutil.Process, float] = {}
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._look_again, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def cpu_s(self) -> float:
        """CPU seconds so far, user and system."""
        with self._lock:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    self._seen_s[process] = times.user + times.system
            return sum(self._seen_s.values())

    def _look_again(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.cpu_s()
