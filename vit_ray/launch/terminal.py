"""A run's display in a terminal or a log file, and the signals that stop the run.

The first SIGTERM, Ctrl-C or closing of the terminal requests a checkpoint and a clean end; a second
signal ends the run at once.
"""

import contextlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from vit_ray.addresses import redact
from vit_ray.data.tasks import ANSWER_S, Display
from vit_ray.metric_names import (
    EVAL_AVERAGED_TOP1,
    EVAL_TOP1,
    PERF_MFU,
    TRAIN_IMAGES_PER_S,
    TRAIN_LOSS,
    TRAIN_LR,
)
from vit_ray.tracking.recorder import Recorder

_REASONS: Final = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C",
    signal.SIGHUP: "the terminal was closed (SIGHUP)",
}
LINE_EVERY_S: Final = 10.0
# The first of these are shown after the step; MLflow has all.
_METRICS: Final = (
    (TRAIN_LOSS, "loss {:.3f}"),
    (TRAIN_IMAGES_PER_S, "{:.0f} images/s"),
    (PERF_MFU, "MFU {:.1%}"),
    (EVAL_TOP1, "top-1 {:.2%}"),
    (EVAL_AVERAGED_TOP1, "of averaged weights {:.2%}"),
    (TRAIN_LR, "lr {:.2e}"),
)
_MAX_METRICS: Final = 5


@contextlib.contextmanager
def stopping_on_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, the first of these signals stops the run and its child runs.

    Ray's processes block SIGINT, which a terminal sends to all of them. Under `nohup`, which
    ignores SIGHUP, a closed terminal does not stop the run.

    Args:
        request_stop: called with the reason, in a signal handler; must return at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals only in the main thread
        return

    numbers = [*_REASONS]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)

    def on_signal(number: int, _: Any) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the shell and the kernel each send one
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        if number == signal.SIGHUP:  # writing to a closed terminal is an error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for output in (1, 2):
                if stat.S_ISCHR(os.fstat(output).st_mode):
                    os.dup2(nowhere, output)
            os.close(nowhere)
        reason = _REASONS[signal.Signals(number)]
        request_stop(reason)
        text = f"{reason}: ending, a training after one more checkpoint; repeat to end at once\n"
        # Not by `print`, which the signal may have interrupted. The reader of standard error may
        # have got the same Ctrl-C (`2>&1 | tee log`), and a notebook's is not a file: such an error
        # must not end the run before its checkpoint.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), text.encode())

    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def shown_progress(record: Recorder, name: str, total: int) -> Iterator[None]:
    """Show new events and the progress of the run while the block runs."""
    display, num_shown = Display(name, total, LINE_EVERY_S), 0

    def update(is_last: bool) -> None:
        nonlocal num_shown
        status = record.status(ANSWER_S)
        for event in status.events[num_shown:]:
            display.line(redact(f"{name}: {event.kind}: {event.text}"))
        num_shown = len(status.events)
        if status.step:
            metrics = [
                form.format(status.metrics[key]) for key, form in _METRICS if key in status.metrics
            ]
            words = [f"step {status.step}/{total}", *metrics[:_MAX_METRICS]]
            display.show(min(status.step, total), words, is_last)

    display.line(f"{name}: starting workers")
    with display.updated_by(update):
        yield
