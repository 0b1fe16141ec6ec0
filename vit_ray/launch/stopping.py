"""SIGTERM and Ctrl-C: the first requests a checkpoint and a clean end, the second ends at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

REASONS: Final = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class RunStoppedError(RuntimeError):
    """A run without checkpoints (an evaluation) was stopped on request."""


class Stoppable(Protocol):
    """The control of a run."""

    def request_stop(self, reason: str) -> None:
        """Returns at once: it is called in a signal handler."""


@contextmanager
def stopping_on_signals(control: Stoppable) -> Iterator[None]:
    """Inside the block the first of these signals stops the run and its child runs.

    Ray's own processes block SIGINT, which a terminal sends to all of them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals only in the main thread
        return

    def on_signal(number: int, _: Any) -> None:
        for each in REASONS:
            signal.signal(each, signal.SIG_DFL)
        reason = REASONS[signal.Signals(number)]
        control.request_stop(reason)
        _tell(f"{reason}: ending, a training after one more checkpoint; repeat to end at once\n")

    before = {number: signal.signal(number, on_signal) for number in REASONS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(text: str) -> None:
    """Write to standard error without `print`, which the signal may have interrupted.

    Its reader may have got the same Ctrl-C (`2>&1 | tee log`), and a notebook's stderr is not a
    file: neither must end the run before its checkpoint.
    """
    with suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), text.encode())
