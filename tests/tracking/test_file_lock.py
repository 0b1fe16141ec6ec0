"""A file for one process at a time, with flock and where the file system has none."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vit_ray import lock
from vit_ray.tracking import file_lock
from vit_ray.tracking.file_lock import lock_file

# Another process, which says when it has the lock and keeps it until it is killed.
HOLDER = """
import errno, fcntl, sys, time
from pathlib import Path
from vit_ray.tracking import file_lock

if sys.argv[2] == "without":
    def flock(*_):
        raise OSError(errno.ENOTSUP, "not supported")
    fcntl.flock = flock
held = file_lock.lock_file(Path(sys.argv[1]), 5.0)
print("held" if held else "refused", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["with", "without"])
def flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the file system has it."""

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    if request.param == "without":
        monkeypatch.setattr(fcntl, "flock", unsupported)
        monkeypatch.setattr(lock, "RELEASE_S", 0.5)
    return str(request.param)


@pytest.fixture
def holder(flock: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "log.lock"), flock]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(60)


def test_another_process_waits_for_its_time_and_is_refused(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    begun_s = time.monotonic()
    assert lock_file(tmp_path / "log.lock", 1.0) is None
    assert time.monotonic() - begun_s >= 1.0


@pytest.mark.parametrize("is_frozen", [True, False])
def test_the_lock_of_a_killed_process_is_free_and_that_of_a_frozen_one_is_not(
    holder: subprocess.Popen[str], tmp_path: Path, is_frozen: bool
) -> None:
    os.kill(holder.pid, signal.SIGSTOP if is_frozen else signal.SIGKILL)
    if not is_frozen:
        holder.wait(60)
    held = lock_file(tmp_path / "log.lock", 1.0)
    assert (held is None) is is_frozen


def test_it_is_free_again_once_it_is_closed(flock: str, tmp_path: Path) -> None:
    path = tmp_path / "log.lock"
    for _ in range(2):
        held = lock_file(path, 1.0)
        assert held is not None
        held.close()
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == (
        ["log.lock.holders"] if flock == "without" else []
    )


def no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "no locks available")


@pytest.mark.parametrize("flock", ["with"], indirect=True)
def test_a_process_without_flock_is_refused_while_another_has_it(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert lock_file(tmp_path / "log.lock", 1.0) is None


@pytest.mark.parametrize("flock", ["without"], indirect=True)
def test_a_process_with_flock_is_refused_while_another_has_the_folder(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(lock, "RELEASE_S", 0.5)
    assert lock_file(tmp_path / "log.lock", 1.0) is None


def test_locks_that_are_not_available_for_a_moment_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = fcntl.flock, iter(range(3))

    def passing(*arguments: Any) -> None:
        if next(calls, None) is not None:
            no_locks()
        plain(*arguments)

    monkeypatch.setattr(fcntl, "flock", passing)
    held = lock_file(tmp_path / "log.lock", 5.0)
    assert held is not None
    held.close()
    assert [path.name for path in tmp_path.iterdir()] == ["log.lock"]


def test_another_error_of_flock_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(file_lock.fcntl, "flock", broken)
    with pytest.raises(OSError, match="input/output"):
        lock_file(tmp_path / "log.lock", 1.0)
