"""One driver at a time for a run, whatever cluster it is on.

The driver keeps a small file in the run's folder and renews it. A second driver refuses to start
while the file is being renewed; the file of a driver that is gone is taken over, at once on the
same machine, and after some waiting on another. Clocks are not compared.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vit_ray.storage import Location

RENEW_S = 10.0
PATIENCE_S = 90.0
"""How long a file that nobody renews is watched before it is taken over: some failed renewals."""
RELEASE_S = 20.0
"""How long a process that was killed may take to end, such as a trial of a sweep."""
POLL_S = 0.5
FILE = "driver.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LockOwner:
    """Who works on a run."""

    host: str
    pids: str
    """Where its process number counts: the machine's boot and the namespace of processes."""
    pid: int
    started: str
    """In the kernel's ticks; tells a process from a later one with the same number."""
    token: str
    beat: int = 0

    @classmethod
    def this_process(cls) -> LockOwner:
        """The holder that this driver would be."""
        pid = os.getpid()
        return cls(platform.node(), _pids(), pid, _started(pid) or "", uuid.uuid4().hex)

    def is_gone(self) -> bool | None:
        """Whether its process has ended; None if that cannot be told from here."""
        if (self.host, self.pids) != (platform.node(), _pids()):
            return None
        started = _started(self.pid)
        return None if started is None else started != self.started


@contextmanager
def lock_run(folder: Location, on_lost: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the run in `folder` inside this block.

    Args:
        on_lost: called with the reason when another driver has taken the run all the same, which
            happens where this one could not reach its storage for a long time; by default the
            process ends.

    Raises:
        ValueError: another driver holds it.
        OSError: the folder cannot be written.
    """
    file = folder.child(FILE)
    _wait_until_free(file, folder)
    mine = LockOwner.this_process()
    _write(file, mine)
    ended = threading.Event()
    renewing = threading.Thread(
        target=_renew, args=(file, mine, ended, on_lost or _end_process), name="lease", daemon=True
    )
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()
        _release(file, mine)


def _wait_until_free(file: Location, folder: Location) -> None:
    holder = _read(file)
    if holder is None or not _is_still_held(file, holder):
        return
    runs, _, name = folder.uri.rpartition("/")
    raise ValueError(
        f"run {name!r} in {runs} is being worked on by another driver: process {holder.pid} on "
        f"{holder.host}; wait for it or stop it, or choose another name"
    )


def _is_still_held(file: Location, first: LockOwner) -> bool:
    """Whether its holder lives; one that ends, or lets go of it, is waited for."""
    is_elsewhere = first.is_gone() is None
    deadline = time.monotonic() + (PATIENCE_S if is_elsewhere else RELEASE_S)
    while time.monotonic() < deadline:
        now = _read(file)
        if now is None or now.is_gone():
            return False
        if is_elsewhere and now != first:
            return True
        time.sleep(POLL_S)
    return not is_elsewhere


def _renew(
    file: Location, mine: LockOwner, ended: threading.Event, on_lost: Callable[[str], None]
) -> None:
    has_warned = False
    while not ended.wait(RENEW_S):
        try:
            found = _read(file)
            if found is not None and found.token != mine.token:
                on_lost(f"process {found.pid} on {found.host} has taken over the run")
                return
            mine = replace(mine, beat=mine.beat + 1)
            _write(file, mine)
        except OSError as error:  # what cannot be reached now may be reached the next time
            if not has_warned:
                logger.warning("%s cannot be renewed: %s", file.path, error)
            has_warned = True


def _release(file: Location, mine: LockOwner) -> None:
    try:
        found = _read(file)
        if found is not None and found.token == mine.token:
            file.delete()
    except OSError as error:  # the run is over; the next driver waits until it is sure of that
        logger.warning("%s stays behind: %s", file.path, error)


def _read(file: Location) -> LockOwner | None:
    try:
        return LockOwner(**json.loads(file.read()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return None  # of another version, or damaged


def _write(file: Location, holder: LockOwner) -> None:
    file.write(json.dumps(asdict(holder)).encode())


def _end_process(reason: str) -> None:
    """Two drivers of one run would mix their checkpoints; Ray ends the workers of this one."""
    print(f"error: {reason}; this driver ends", file=sys.stderr, flush=True)
    os._exit(1)


def _started(pid: int) -> str | None:
    """Empty if there is no such process; None if it is hidden."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None if _is_hidden(pid) else ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]  # dead, and not yet taken notice of


def _is_hidden(pid: int) -> bool:
    """Whether the process is there, of another user whose /proc is not shown (hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False


def _pids() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
