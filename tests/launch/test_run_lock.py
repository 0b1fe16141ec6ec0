"""One driver at a time for a run."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from vit_ray.launch import run_lock
from vit_ray.launch.run_lock import FILE, LockOwner, lock_run
from vit_ray.storage import Location, locate

HOLD = """
import sys
from vit_ray.launch.run_lock import lock_run
from vit_ray.storage import locate
with lock_run(locate(sys.argv[1])):
    print("lock_run", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> Location:
    return locate(str(tmp_path / "runs" / "a"))


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.1)
    monkeypatch.setattr(run_lock, "RELEASE_S", 0.1)
    monkeypatch.setattr(run_lock, "POLL_S", 0.02)
    monkeypatch.setattr(run_lock, "RENEW_S", 0.05)


def elsewhere(run: Location) -> LockOwner:
    """The file of a driver on another machine."""
    holder = replace(LockOwner.this_process(), host="node-7")
    run.child(FILE).write(json.dumps(asdict(holder)).encode())
    return holder


def test_a_run_is_refused_while_a_process_holds_it_and_free_when_that_was_killed(
    run: Location, patience: None
) -> None:
    command = [sys.executable, "-c", HOLD, run.path]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "lock_run\n"
        refusal = rf"run 'a' in .*/runs is being worked on .* process {other.pid} on "
        with pytest.raises(ValueError, match=refusal), lock_run(run):
            pass
        other.kill()
    assert run.child(FILE).exists()
    with lock_run(run):
        pass
    assert not run.child(FILE).exists()


def test_a_driver_on_another_machine_that_renews_the_file_keeps_the_run(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = elsewhere(run)
    changed = json.dumps(asdict(replace(theirs, beat=1))).encode()
    monkeypatch.setattr(time, "sleep", lambda _: run.child(FILE).write(changed))
    with (
        pytest.raises(ValueError, match=r"process \d+ on node-7; wait for it or stop it"),
        lock_run(run),
    ):
        pass


def test_the_file_of_a_machine_that_is_gone_is_taken_over(run: Location, patience: None) -> None:
    theirs = elsewhere(run)
    with lock_run(run):
        assert json.loads(run.child(FILE).read())["token"] != theirs.token


def test_a_holder_renews_its_file_and_hears_of_one_that_has_taken_it(
    run: Location, patience: None
) -> None:
    lost, reasons = threading.Event(), []

    def on_lost(reason: str) -> None:
        reasons.append(reason)
        lost.set()

    with lock_run(run, on_lost):
        first = run.child(FILE).read()
        while run.child(FILE).read() == first:
            assert not lost.wait(0.01)
        while not lost.wait(0.2):
            elsewhere(run)  # again, if a renewal has just been written over it
    assert "on node-7 has taken over the run" in reasons[0]
    assert run.child(FILE).exists()  # it is theirs


def test_a_driver_whose_run_was_taken_ends(run: Location) -> None:
    hold = "from vit_ray.launch import run_lock\nrun_lock.RENEW_S = 0.05\n" + HOLD
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", hold, run.path]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stderr is not None
        assert other.stdout.readline() == "lock_run\n"
        while other.poll() is None:
            elsewhere(run)
            time.sleep(0.05)
        assert other.returncode == 1
        assert "on node-7 has taken over the run; this driver ends" in other.stderr.read()


def test_a_damaged_file_holds_nobody_off(run: Location) -> None:
    run.child(FILE).write(b"{")
    with lock_run(run):
        pass
