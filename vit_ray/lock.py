"""One process at a time for a folder, on a disk that machines share or in a store.

Each holder creates its own file, `lock-N.json`, where N is one more than that of the previous
holder. It is created exclusively, so of two processes that start together one gets N. No other
process writes it and no N is used twice, so a late heartbeat cannot overwrite a newer holder. N is
also the fencing token: a holder whose N is no longer the newest has lost the folder.

On the same machine the lock of a dead process is taken over at once, and on another when its file
has not changed for some time. Clocks of machines are not compared.
"""

from __future__ import annotations

import contextlib
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
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import psutil

from vit_ray.storage import HALF_WRITTEN, RIGHTS_PROBE, Location

HEARTBEAT_S = 10.0
# How long the end of a holder waits for its storage; the next holder waits until it is sure.
RELEASE_LIMIT_S = 30.0
# How long a file must have gone without a heartbeat before the lock is taken over.
PATIENCE_S = 90.0
# How long a killed process may take to end, such as a trial of a sweep.
RELEASE_S = 20.0
# In a store without exclusive creation: how long a file must have stayed as written.
SETTLE_S = 4.0
POLL_S = 0.5
# How late a file may appear on another node: NFS caches folder contents for seconds.
SHOWN_S = 10.0
_FILE: Final = re.compile(r"lock-(\d{8})\.json")
_OWN: Final = re.compile(rf"({_FILE.pattern}|{RIGHTS_PROBE}(-[0-9a-f]{{8}})?)({HALF_WRITTEN})?")
# Tokens of this process.
_HELD: Final[set[str]] = set()

logger = logging.getLogger(__name__)

Owner = dict[str, Any]


class HeldError(ValueError):
    """Another process, which the text names, holds the folder."""


class LockLostError(RuntimeError):
    """Another process has taken over the folder; this one must not write there."""


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
    if folder.is_local:
        os.makedirs(folder.path, exist_ok=True)
    mine, ended = this_process(folder), threading.Event()
    _HELD.add(mine["token"])
    try:
        number = _acquire(folder, mine)
        place = (folder, number, mine, ended, on_lost)
        keeping = threading.Thread(target=_keep, args=place, name="lock", daemon=True)
        keeping.start()
        try:
            yield number
        finally:
            ended.set()
            keeping.join(RELEASE_LIMIT_S)
            if keeping.is_alive():  # a hanging storage must not keep the process from ending
                logger.warning("the lock of %s is left: its storage does not answer", folder.uri)
    finally:
        _HELD.remove(mine["token"])


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
            f"{folder.uri} has been taken over by {_name(_owner(_content(folder, newest)))}; this "
            "process no longer writes there"
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


def this_process(folder: Location) -> Owner:
    """The content of the file of this process; numbers of processes are valid in `processes`."""
    pid = os.getpid()
    return {
        "owner": psutil.Process().username(),
        "host": platform.node(),
        "processes": _processes(),
        "process": pid,
        "started": _started(pid),
        "folder": folder.uri,
        "folder_inode": _inode(folder),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "token": uuid.uuid4().hex,
        "heartbeat": 0,
    }


def _acquire(folder: Location, mine: Owner) -> int:
    first, was_gone, deadline_s = None, None, 0.0
    while True:
        number = max(_numbers(folder), default=0)
        seen = number, _content(folder, number) if number else b""
        owner, now_s = _owner(seen[1]), time.monotonic()
        is_gone = number == 0 or _is_gone(owner, folder)
        is_silent = is_gone is None and seen == first and now_s > deadline_s
        if is_gone or is_silent:
            if _create(folder, number + 1, mine):
                return number + 1
        elif first is None or is_gone is not was_gone:  # it was in the middle of being written
            patience_s = PATIENCE_S if is_gone is None else RELEASE_S
            first, was_gone, deadline_s = seen, is_gone, now_s + patience_s
            text = "%s is held by %s; waiting up to %g s for it to end or to show that it lives"
            logger.warning(text, folder.uri, _name(owner), patience_s)
        elif now_s > deadline_s or (is_gone is None and seen != first):
            raise HeldError(_name(owner))
        time.sleep(POLL_S)


def _is_gone(owner: Owner, folder: Location) -> bool | None:
    """Whether it has released the lock, its process has ended, or the file was copied with another
    folder; None if unknown here.
    """
    is_copy = owner.get("folder", folder.uri) != folder.uri and (
        not folder.is_local or owner.get("folder_inode") != _inode(folder)
    )
    if owner.get("is_released") or is_copy:
        return True
    if (owner.get("host"), owner.get("processes")) != (platform.node(), _processes()):
        return None
    if owner["process"] == os.getpid():  # a full disk may have kept it from being released
        return owner["token"] not in _HELD
    started = _started(owner["process"])
    return None if started is None else started != owner["started"]


def _create(folder: Location, number: int, mine: Owner) -> bool:
    """Create the file of `number`; False if another process has."""
    file, content = _file(folder, number), json.dumps(mine).encode()
    start_s = time.monotonic()
    is_new = file.create(content)
    if is_new and not folder.is_local and file.create(content):  # it replaces what is there
        _warn_of_store()
        time.sleep(max(SETTLE_S, 2 * (time.monotonic() - start_s)))
        is_new = False
    # A request that was sent again, because its answer was lost, finds its own file.
    if not is_new and _owner(_content(folder, number)).get("token") != mine["token"]:
        return False
    numbers = _numbers(folder)
    if max(numbers) > number:  # it was free again: others have held it, and a later one
        file.delete()
        return False
    for older in numbers:
        if older < number:
            with contextlib.suppress(OSError):  # the next holder deletes it
                _file(folder, older).delete()
    return True


@lru_cache(maxsize=1)
def _warn_of_store() -> None:
    """Warned once for each process."""
    logger.warning(
        "this object store ignores If-None-Match; of two processes that start at the same moment "
        "one is refused by waiting at least %g s, or ends at its next heartbeat",
        SETTLE_S,
    )


def _keep(
    folder: Location,
    number: int,
    mine: Owner,
    ended: threading.Event,
    on_lost: Callable[[str], None],
) -> None:
    """Write heartbeats until the end, and then release, so that nothing is written after that."""
    file, has_warned = _file(folder, number), False
    while not ended.wait(HEARTBEAT_S):
        try:
            check_lock(folder, number)
            _check_owner(folder, number, mine)
            mine["heartbeat"] += 1
            file.write(json.dumps(mine).encode())
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
            _check_owner(folder, number, mine)
            file.write(json.dumps({**mine, "is_released": True}).encode())
    except (OSError, LockLostError) as error:  # the work is done; the next holder makes sure of it
        logger.warning("the lock of %s is left: %s", folder.uri, error)


def _check_owner(folder: Location, number: int, mine: Owner) -> None:
    """A store that ignores If-None-Match may have let a slow request replace the file.

    Raises:
        LockLostError: another process has this number.
    """
    owner = _owner(_content(folder, number))
    if owner and owner["token"] != mine["token"]:
        raise LockLostError(f"{folder.uri} is held by {_name(owner)}, too; this process ends")


def _numbers(folder: Location) -> list[int]:
    found = (_FILE.fullmatch(info.base_name) for info in folder.list_files(recursive=False))
    return [int(match[1]) for match in found if match]


def _content(folder: Location, number: int) -> bytes:
    """Empty if it has been replaced by a newer one at this moment."""
    try:
        return _file(folder, number).read()
    except FileNotFoundError:
        return b""


def _owner(content: bytes) -> Owner:
    """Empty for what cannot be parsed: it may be in the middle of being written."""
    with contextlib.suppress(ValueError):
        owner = json.loads(content)
        if isinstance(owner, dict) and owner.keys() >= {"token", "process", "started"}:
            return owner
    return {}


def _name(owner: Owner) -> str:
    text = "process {process} of {owner} on {host} since {since}"
    return text.format_map(owner) if owner else "an unknown process"


def _file(folder: Location, number: int) -> Location:
    return folder.child(f"lock-{number:08d}.json")


def _inode(folder: Location) -> int | None:
    """A renamed folder keeps it, and a copy has another one."""
    with contextlib.suppress(OSError):
        return os.stat(folder.path).st_ino if folder.is_local else None
    return None


def _started(pid: int) -> str | None:
    """When a process started, in the kernel's ticks: a later one may have its number. Empty if it
    has ended; None if it is hidden.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if psutil.pid_exists(pid) else ""
    return "" if fields[0] in "ZX" else fields[19]  # a zombie: dead, but not yet reaped


def _processes() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
