"""One process at a time for a folder, on a disk that machines share or on S3.

Each holder creates its own file, `lock-N.json`, where N is one more than that of the previous
holder. The file is created exclusively (O_EXCL; If-None-Match on S3), so of two processes that
start together one gets N. No other process writes it and no N is used twice, so a late renewal
cannot overwrite a newer holder. N is also the fencing token: a holder whose N is no longer the
newest has lost the folder.

A holder renews its file; on the same machine the lock of a dead process is taken over at once, and
on another when its file has not changed for some time. Clocks of machines are not compared.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from vit_ray.retry import ONE_ATTEMPT, retry_policy
from vit_ray.storage import HALF_WRITTEN, RIGHTS_PROBE, Creation, Location

RENEW_S = 10.0
RELEASE_LIMIT_S = 30.0
"""How long the end of a holder waits for its storage; the next holder waits until it is sure."""
PATIENCE_S = 90.0
"""How long a file must have gone without renewal before the lock is taken over."""
RELEASE_S = 20.0
"""How long a killed process may take to end, such as a trial of a sweep."""
SETTLE_S = 4.0
"""For a store without exclusive creation: how long a file must have stayed as written."""
POLL_S = 0.5
SHOWN_S = 10.0
"""How late a file may appear on another node: NFS caches folder contents for seconds."""
_MOST_LOOKS: Final = 20
_FILE: Final = re.compile(r"lock-(\d{8})\.json")
_OWN: Final = re.compile(rf"({_FILE.pattern}|{RIGHTS_PROBE})({HALF_WRITTEN})?")

logger = logging.getLogger(__name__)


class HeldError(ValueError):
    """Another process holds the folder."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(f"held by {owner}")
        self.owner = owner


class LockLostError(RuntimeError):
    """Another process has taken over the folder; this one must not write there."""


@dataclass(frozen=True)
class Owner:
    """The holder of a folder."""

    host: str
    pids: str
    """Where its process number is valid: the machine's boot and the namespace of processes."""
    pid: int
    started: str
    """In the kernel's ticks; distinguishes a process from a later one with the same number."""
    token: str
    beat: int = 0
    is_released: bool = False

    @classmethod
    def this_process(cls) -> Owner:
        """The owner that this process would be."""
        pid = os.getpid()
        return cls(platform.node(), _pids(), pid, _started(pid) or "", uuid.uuid4().hex)

    def is_gone(self) -> bool | None:
        """Whether it has released the lock or its process has ended; None if unknown here."""
        if self.is_released:
            return True
        if (self.host, self.pids) != (platform.node(), _pids()):
            return None
        started = _started(self.pid)
        return None if started is None else started != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.host else "an unknown process"


_UNKNOWN: Final = Owner("", "", 0, "", "")
"""For a file that cannot be parsed: it may be in the middle of being written."""


@dataclass(frozen=True)
class _Held:
    """The newest file of a folder."""

    number: int
    owner: Owner
    content: bytes


@contextmanager
def hold_lock(folder: Location, on_lost: Callable[[str], None]) -> Iterator[int]:
    """Hold `folder` inside this block; yields the fencing token for `check_lock`.

    Args:
        on_lost: called once, from a thread, with the reason, if another process has taken over the
            folder; this happens if this one could not reach its storage for a long time.

    Raises:
        HeldError: another process holds it.
        OSError: the folder cannot be written.
    """
    number, mine = _acquire(folder)
    ended = threading.Event()
    renewing = threading.Thread(
        target=_keep, args=(folder, number, mine, ended, on_lost), name="lock", daemon=True
    )
    renewing.start()
    try:
        yield number
    finally:
        ended.set()
        renewing.join(RELEASE_LIMIT_S)
        if renewing.is_alive():  # a hanging storage must not keep the process from ending
            logger.warning(
                "the lock of %s is left: its storage has not answered in %g s",
                folder.uri,
                RELEASE_LIMIT_S,
            )


def check_lock(folder: Location, number: int) -> None:
    """Return if `number` is still the newest in `folder`; for each process of its holder.

    Raises:
        LockLostError: there is a newer one.
        OSError: the folder cannot be read, or is another one, for example because a disk is not
            mounted.
    """
    newest = max(_numbers(folder), default=0)
    if newest < number:
        raise OSError(
            f"{_file(folder, number).path}, the file of this run's lock, no longer exists; mount "
            "its disk again, or restore the file"
        )
    if newest > number:
        raise LockLostError(
            f"{folder.uri} has been taken over by {_read(folder, newest)}; this process no longer "
            "writes there"
        )


def sees_lock(folder: Location, number: int) -> bool:
    """Whether the file of `number`, or a newer one, is there; a shared folder may show it late."""
    deadline_s = time.monotonic() + SHOWN_S
    while max(_numbers(folder), default=0) < number:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def is_lock_file(name: str) -> bool:
    """Whether a file of this name belongs to a lock, or to the check of access rights before it, or
    is what the kill of its process has left of one.
    """
    return bool(_OWN.fullmatch(name))


def _acquire(folder: Location) -> tuple[int, Owner]:
    mine, silent = Owner.this_process(), None
    for _ in range(_MOST_LOOKS):
        looked_s = time.monotonic()
        before = _newest(folder)
        if before is not None and before != silent and not before.owner.is_gone():
            silent = _wait_until_gone(folder, before)
            continue
        number = before.number + 1 if before else 1
        if _create(folder, number, mine, looked_s):
            if max(_numbers(folder)) == number:
                try:
                    for older in _numbers(folder):
                        if older < number:
                            _file(folder, older).delete()
                except OSError as error:  # the next holder deletes them
                    logger.info("old lock files of %s could not be deleted: %s", folder.uri, error)
                return number, mine
            # It was free again: others have held it and a later one since the last look.
            _file(folder, number).delete()
        time.sleep(POLL_S)
    raise OSError(
        f"the lock of {folder.uri} could not be taken in {_MOST_LOOKS} attempts: others take it in "
        f"turn, or the storage ignores If-None-Match and needs more than {SETTLE_S / 2:g} s for a "
        "request; check the storage, then try again"
    )


def _wait_until_gone(folder: Location, first: _Held) -> _Held | None:
    """Wait until the holder ends, releases the lock, or has not renewed its file for long
    (returned).

    Raises:
        HeldError: it is alive.
    """
    is_elsewhere = first.owner.is_gone() is None
    deadline_s = time.monotonic() + (PATIENCE_S if is_elsewhere else RELEASE_S)
    while time.monotonic() < deadline_s:
        now = _newest(folder)
        if now is None or now.owner.is_gone():
            return None
        if now.number != first.number or (is_elsewhere and now != first):
            raise HeldError(now.owner)
        time.sleep(POLL_S)
    if not is_elsewhere:
        raise HeldError(first.owner)
    return first


def _create(folder: Location, number: int, mine: Owner, looked_s: float) -> bool:
    """Create the file of `number`; False if another process has."""
    file = _file(folder, number)
    creation = file.create(_content(mine))
    if creation is Creation.EXISTS:
        # A create request that was sent again because its answer was lost finds its own file.
        return _read(folder, number).token == mine.token
    if creation is Creation.CREATED:
        return True
    # Of all that wrote the file after they saw that it was free, the last one holds it. Every write
    # is finished within half of the waiting time, or is taken back.
    _warn_of_store()
    if time.monotonic() - looked_s > SETTLE_S / 2:
        file.write(_content(replace(mine, is_released=True)))
        return False
    time.sleep(SETTLE_S)
    return _read(folder, number).token == mine.token


@lru_cache(maxsize=1)
def _warn_of_store() -> None:
    """Warned once for each process."""
    logger.warning(
        "this object store ignores If-None-Match; of two processes that start at the same moment "
        "one is refused by waiting %g s, which works while requests take less than half of that",
        SETTLE_S,
    )


def _keep(
    folder: Location,
    number: int,
    mine: Owner,
    ended: threading.Event,
    on_lost: Callable[[str], None],
) -> None:
    """Renew until the end, and then release, so that nothing is written after that."""
    has_warned = False
    while not ended.wait(RENEW_S):
        try:
            with retry_policy(ONE_ATTEMPT):
                check_lock(folder, number)
                mine = replace(mine, beat=mine.beat + 1)
                _file(folder, number).write(_content(mine))
        except LockLostError as error:
            on_lost(str(error))
            return
        except OSError as error:  # the next attempt may reach it
            if not has_warned:
                logger.warning("the lock of %s cannot be renewed: %s", folder.uri, error)
            has_warned = True
    # Written in the file, which stays: its number is never used again.
    try:
        if max(_numbers(folder), default=0) == number:
            _file(folder, number).write(_content(replace(mine, is_released=True)))
    except OSError as error:  # the work is done; the next holder waits until it is sure of that
        logger.warning("the lock of %s is left: %s", folder.uri, error)


def _numbers(folder: Location) -> list[int]:
    found = (_FILE.fullmatch(info.base_name) for info in folder.list_files(recursive=False))
    return [int(match[1]) for match in found if match]


def _newest(folder: Location) -> _Held | None:
    for _ in range(_MOST_LOOKS):
        numbers = _numbers(folder)
        if not numbers:
            return None
        try:
            content = _file(folder, max(numbers)).read()
        except FileNotFoundError:  # replaced by a newer one at this moment
            time.sleep(POLL_S)
            continue
        return _Held(max(numbers), _parse(content), content)
    raise OSError(f"{folder.uri}: a lock file is listed but cannot be read; check the storage")


def _read(folder: Location, number: int) -> Owner:
    try:
        return _parse(_file(folder, number).read())
    except FileNotFoundError:
        return _UNKNOWN


def _parse(content: bytes) -> Owner:
    try:
        return Owner(**json.loads(content))
    except (ValueError, TypeError):
        return _UNKNOWN  # incompletely written, of another version, or damaged


def _content(owner: Owner) -> bytes:
    return json.dumps(asdict(owner)).encode()


def _file(folder: Location, number: int) -> Location:
    return folder.child(f"lock-{number:08d}.json")


def _started(pid: int) -> str | None:
    """Empty if there is no such process; None if it is hidden."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        try:
            os.kill(pid, 0)
        except PermissionError:  # there, but of another user whose /proc is hidden (hidepid)
            return None
        except ProcessLookupError:
            pass
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]  # a zombie: dead, but not yet reaped


def _pids() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
