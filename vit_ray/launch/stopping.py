"""SIGTERM, Ctrl-C, a closed terminal: the first requests a checkpoint and a clean end, the second
ends at once.
"""

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

REASONS: Final = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C",
    signal.SIGHUP: "the terminal was closed (SIGHUP)",
}


class RunStoppedError(RuntimeError):
    """A run without checkpoints (an evaluation) was stopped on request."""


@contextmanager
def stopping_on_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Inside the block the first of these signals stops the run and its child runs.

    Ray's own processes block SIGINT, which a terminal sends to all of them. Under `nohup`, which
    ignores SIGHUP, a closed terminal does not stop the run.

    Args:
        request_stop: called with the reason, in a signal handler; returns at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals only in the main thread
        return

    numbers = [*REASONS]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)

    def on_signal(number: int, _: Any) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the shell and the kernel each send one
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        if number == signal.SIGHUP:
            _leave_terminal()
        reason = REASONS[signal.Signals(number)]
        request_stop(reason)
        text = f"{reason}: ending, a training after one more checkpoint; repeat to end at once\n"
        # Without `print`, which the signal may have interrupted. The reader of standard error may
        # have got the same Ctrl-C (`2>&1 | tee log`), and a notebook's is not a file: neither must
        # end the run before its checkpoint.
        with suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), text.encode())

    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Print to nowhere what went to a terminal: writing to a closed one is an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        if stat.S_ISCHR(os.fstat(output).st_mode):
            os.dup2(nowhere, output)
    os.close(nowhere)
