"""What real signals do to a driver, as a process whose run is a fake one."""

import os
import signal
import subprocess
import sys
import time

import pytest

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


def start(before: str = "") -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", before + DRIVER], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def line(driver: subprocess.Popen[str]) -> str:
    return driver.stdout.readline().strip()


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGHUP, "the terminal was closed (SIGHUP)")],
)
def test_the_first_signal_asks_for_a_checkpoint_and_is_told_and_the_second_ends_at_once(
    number, reason
):
    driver = start()
    assert line(driver) == "training"
    driver.send_signal(number)
    assert line(driver) == f"asked to stop: {reason}"
    output, errors = driver.communicate("land\n", timeout=60)
    assert output == "checkpoint\n"
    told = "ending, a training after one more checkpoint; repeat to end at once"
    assert errors == f"{reason}: {told}\n"
    assert driver.returncode == 3
    driver = start()
    assert line(driver) == "training"
    driver.send_signal(number)
    assert line(driver) == f"asked to stop: {reason}"
    driver.send_signal(signal.SIGTERM)  # the second ends at once
    assert driver.communicate(timeout=60)[0] == ""
    assert driver.returncode == -signal.SIGTERM


def test_a_message_that_nobody_can_read_does_not_end_the_run():
    driver = start()
    assert line(driver) == "training"
    driver.stderr.close()  # as `2>&1 | tee log`, which gets the same Ctrl-C
    driver.send_signal(signal.SIGINT)
    assert line(driver) == "asked to stop: Ctrl-C"
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


def test_under_nohup_a_closed_terminal_does_not_stop_the_run():
    driver = start("import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    assert line(driver) == "training"
    driver.send_signal(signal.SIGHUP)
    driver.send_signal(signal.SIGTERM)
    assert line(driver) == "asked to stop: SIGTERM"
    driver.communicate("land\n", timeout=60)
    assert driver.returncode == 3
