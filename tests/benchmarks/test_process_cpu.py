"""CPU time of processes that a benchmark has started."""

import subprocess
import sys
import threading

import pytest

from benchmarks import process_cpu
from benchmarks.process_cpu import StartedProcesses

BURN = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"


def started() -> subprocess.Popen[str]:
    """A process that has taken a fifth of a second, and waits."""
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", BURN], text=True, **ends)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_process_that_has_ended_counts_as_it_was_last_seen() -> None:
    others = StartedProcesses()
    before_s = others.cpu_s()
    first = started()
    assert others.cpu_s() - before_s >= 0.15  # clock ticks are a hundredth
    first.communicate("\n")
    second = started()
    assert others.cpu_s() - before_s >= 0.3
    second.communicate("\n")


def test_processes_are_looked_at_until_the_end_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = threading.Semaphore(0)
    monkeypatch.setattr(process_cpu, "LOOK_S", 0.001)
    monkeypatch.setattr(StartedProcesses, "cpu_s", lambda self: looks.release())
    with StartedProcesses() as others:
        assert all(looks.acquire(timeout=5) for _ in range(3))
    others._thread.join(5)
    assert not others._thread.is_alive()
