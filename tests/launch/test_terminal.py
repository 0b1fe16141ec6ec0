"""What a person sees of a run that works, and what real signals do to a driver.

The driver is a process whose run is a fake one; real runs are stopped in `tests/faults/`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from vit_ray.data import tasks
from vit_ray.launch import terminal
from vit_ray.outcomes import EventKind
from vit_ray.tracking.recorder import Event, RunStatus

DRIVER = """
import signal, time
from vit_ray.launch.terminal import stopping_on_signals

class Control:
    stop = None
    def request_stop(self, reason):
        Control.stop = reason

before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
with stopping_on_signals(Control().request_stop):
    print("training", flush=True)
    while Control.stop is None:
        time.sleep(0.01)
    print("asked to stop:", Control.stop, flush=True)
    if input() == "land":
        print("checkpoint", flush=True)
assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
raise SystemExit(3)
"""


UNDER_NOHUP = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"


def start(before: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    driver = subprocess.Popen(
        [sys.executable, "-c", before + DRIVER], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert line(driver) == "training"
    return driver


def line(driver: subprocess.Popen[str]) -> str:
    return driver.stdout.readline().strip()


def test_a_log_has_each_event_once_and_the_time_left_by_the_steps_of_this_attempt(
    monkeypatch, capsys
):
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    now_s, looks = [100.0], list[Callable[[bool], None]]()
    monkeypatch.setattr(tasks.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(tasks, "repeated", lambda look: looks.append(look) or nullcontext())
    status = RunStatus(step=100, events=[Event(EventKind.RESUMED, "from step 100")])
    record = SimpleNamespace(status=lambda limit_s: status)
    with terminal.shown_progress(record, "run", 1000):
        looks[0](False)
        for step, seconds in ((120, 10.0), (150, 15.0), (150, 65.0)):
            status.step, now_s[0] = step, now_s[0] + seconds
            status.metrics["train/loss"] = 2.5
            looks[0](False)
    assert capsys.readouterr().err.splitlines() == [
        "run: starting workers",
        "run: resumed: from step 100",
        "run: step 100/1000, ETA --:--",
        "run: step 120/1000, loss 2.500, ETA 0:07:20",  # 0.5 s a step
        "run: step 150/1000, loss 2.500, ETA 0:07:05",
        "run: step 150/1000, loss 2.500, ETA 0:07:05",  # while it hangs, too
    ]


@pytest.mark.parametrize(("before", "has_reader", "numbers", "reason"), [
    ("", False, [signal.SIGINT], "Ctrl-C"),  # as `2>&1 | tee log`, which gets the same Ctrl-C
    (UNDER_NOHUP, True, [signal.SIGHUP, signal.SIGTERM], "SIGTERM"),  # not the closed terminal
])  # fmt: skip
def test_a_signal_asks_for_a_checkpoint_also_where_nobody_reads_the_message(
    before, has_reader, numbers, reason
):
    driver = start(before)
    if not has_reader:
        driver.stderr.close()
    for number in numbers:
        driver.send_signal(number)
    assert line(driver) == f"asked to stop: {reason}"
    driver.stdin.write("land\n")
    driver.stdin.flush()
    assert line(driver) == "checkpoint"
    assert driver.wait(60) == 3


def test_a_closed_terminal_asks_for_a_checkpoint_however_often_it_is_told(tmp_path):
    """Nothing can be printed there any more, and the shell and the kernel send a SIGHUP each."""
    landed = tmp_path / "landed"
    code = DRIVER.replace('if input() == "land"', f"if time.sleep(1) or open({str(landed)!r}, 'w')")
    ours, terminal = os.openpty()
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    told = b""
    while b"\n" not in told:  # what it has not written yet would be an error of its own
        told += os.read(ours, 100)
    assert told.strip() == b"training"
    os.close(ours)
    for _ in range(3):
        driver.send_signal(signal.SIGHUP)
        time.sleep(0.1)
    assert driver.wait(60) == 3
    assert landed.exists()
