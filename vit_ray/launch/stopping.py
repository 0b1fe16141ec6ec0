"""SIGTERM and Ctrl-C: the first requests a checkpoint and a clean end, the second ends at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

REASONS: Final = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class RunStoppedError(RuntimeError):
    """A run without checkpoints (an evaluation) was stopped on request."""


@contextmanager
def stopping_on_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Inside the block the first of these signals stops the run and its child runs.

    Ray's own processes block SIGINT, which a terminal sends to all of them.

    Args:
        request_stop: called with the reason, in a signal handler; returns at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals only in the main thread
        return

    def on_signal(number: int, _: Any) -> None:
        for each in REASONS:
            signal.signal(each, signal.SIG_DFL)
        reason = REASONS[signal.Signals(number)]
        request_stop(reason)
        text = f"{reason}: ending, a training after one more checkpoint; repeat to end at once\n"
        # Without `print`, which the signal may have interrupted. The reader of standard error may
        # have got the same Ctrl-C (`2>&1 | tee log`), and a notebook's is not a file: neither must
        # end the run before its checkpoint.
        with suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), text.encode())

    before = {number: signal.signal(number, on_signal) for number in REASONS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
