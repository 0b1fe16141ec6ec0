"""One process at a time for a folder, on a disk that machines share or in a store.

Each holder creates its own file, `lock-N.json`, where N is one more than that of the previous
holder. It is created exclusively, so of two processes that start together one gets N. No other
process writes the file and no N is used twice, so a late heartbeat cannot overwrite a newer holder.
N is also the fencing token: a holder whose N is no longer the newest has lost the folder.

The lock of a dead process is taken over at once on the same machine, and on another machine when
the file has not changed for some time. Clocks of machines are not compared.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from vit_ray.outcomes import LockLostError
from vit_ray.storage import HALF_WRITTEN, RIGHTS_PROBE, Location

HEARTBEAT_S = 10.0
# How long a holder that ends waits for its storage.
RELEASE_LIMIT_S = 30.0
# Time without a heartbeat after which another machine's lock is taken over.
PATIENCE_S = 90.0
# How long a killed process may take to end, such as a trial of a sweep.
RELEASE_S = 20.0
# In a store without exclusive creation: how long a file must stay unchanged to count as created.
SETTLE_S = 4.0
POLL_S = 0.5
# How late a file may appear on another node: NFS caches folder contents for seconds.
SHOWN_S = 10.0
_FILE: Final = re.compile(r"lock-(\d{8})\.json")
_LOCK_FILES: Final = re.compile(rf"({_FILE.pattern}|{RIGHTS_PROBE})({HALF_WRITTEN})?")
# Tokens of the locks that this process holds.
_HELD_TOKENS: Final[set[str]] = set()

logger = logging.getLogger(__name__)

Owner = dict[str, Any]


class HeldError(ValueError):
    """Another process, which the text names, holds the folder."""


def end_process(reason: str) -> None:
    """End this process: two drivers of one run would mix their checkpoints."""
    print(f"error: {reason}; this driver ends", file=sys.stderr, flush=True)
    os._exit(1)  # Ray ends this driver's workers


@contextmanager
def hold_lock(folder: Location, on_lost: Callable[[str], None] = end_process) -> Iterator[int]:
    """Hold `folder` inside this block; yields the fencing token for `check_lock`.

    Args:
        on_lost: called once, from a thread, with the reason, if another process has taken over the
            folder because this one could not reach its storage for a long time.

    Raises:
        HeldError: another process holds it.
        OSError: the folder cannot be written.
    """
    if folder.is_local:
        os.makedirs(folder.path, exist_ok=True)
    owner, ended = this_process(folder), threading.Event()
    _HELD_TOKENS.add(owner["token"])
    try:
        number = _acquire(folder, owner)
        renewal = threading.Thread(
            target=_renew, args=(folder, number, owner, ended, on_lost), name="lock", daemon=True
        )
        renewal.start()
        try:
            yield number
        finally:
            ended.set()
            renewal.join(RELEASE_LIMIT_S)
            if renewal.is_alive():  # a hanging storage must not keep the process from ending
                logger.warning("the lock of %s is left: its storage does not answer", folder.uri)
    finally:
        _HELD_TOKENS.remove(owner["token"])


def check_lock(folder: Location, number: int, token: str = "") -> None:
    """Check that `number` is still the newest in `folder`; for all processes of the holder.

    Args:
        token: of the holder itself, to check its file too: a store that ignores If-None-Match may
            have let a slow request of another process replace it.

    Raises:
        LockLostError: there is a newer number.
        OSError: the folder cannot be read, or another folder has its path, for example because a
            disk is not mounted.
    """
    newest = max(_numbers(folder), default=0)
    if newest < number:
        raise OSError(
            f"{_file(folder, number).path}, the file of this run's lock, no longer exists; mount "
            "its disk again, or restore the file"
        )
    if newest > number or (token and _read_owner(folder, number).get("token", token) != token):
        raise LockLostError(
            f"{folder.uri} has been taken over by {_name(_read_owner(folder, newest))}; this "
            "process no longer writes there"
        )


def sees_lock(folder: Location, number: int) -> bool:
    """Whether the file of `number`, or a newer one, exists; a shared folder may show it late."""
    deadline_s = time.monotonic() + SHOWN_S
    while max(_numbers(folder), default=0) < number:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def is_lock_file(name: str) -> bool:
    """Whether a file of this name belongs to a lock or to the test of access rights, or is a
    temporary file of them that a killed process left.
    """
    return bool(_LOCK_FILES.fullmatch(name))


def this_process(folder: Location) -> Owner:
    """Content of this process's file. Process numbers are valid in `processes`: a boot of a machine
    and a namespace.
    """
    pid = os.getpid()
    return {
        "owner": psutil.Process().username(),
        "host": platform.node(),
        "processes": _namespace(),
        "process": pid,
        "started": _started(pid),
        "folder": folder.uri,
        "folder_inode": _inode(folder),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "token": uuid.uuid4().hex,
        "heartbeat": 0,
    }


def _acquire(folder: Location, owner: Owner) -> int:
    first, start_s = None, 0.0
    while True:
        number = max(_numbers(folder), default=0)
        holder = _read_owner(folder, number) if number else {}
        is_gone, now_s = number == 0 or _is_gone(holder, folder), time.monotonic()
        # Shorter once a file of this machine, which was just being written, can be read.
        patience_s = PATIENCE_S if is_gone is None else RELEASE_S
        is_late = now_s > start_s + patience_s
        is_silent = is_gone is None and (number, holder) == first and is_late
        if is_gone or is_silent:
            if _create(folder, number + 1, owner):
                return number + 1
        elif first is None:
            first, start_s = (number, holder), now_s
            logger.warning(
                "%s is held by %s; waiting up to %g s for it to end or to show that it lives",
                folder.uri, _name(holder), patience_s,
            )  # fmt: skip
        elif is_late or (is_gone is None and (number, holder) != first):
            raise HeldError(
                f"{folder.uri} is in use by {_name(holder)}; wait for it or stop it, or choose "
                "another name"
            )
        time.sleep(POLL_S)


def _is_gone(owner: Owner, folder: Location) -> bool | None:
    """Whether the owner has released the lock, its process has ended, or the file was copied from
    another folder; None if that cannot be known on this machine.
    """
    is_copy = owner.get("folder", folder.uri) != folder.uri and (
        not folder.is_local or owner.get("folder_inode") != _inode(folder)
    )
    if owner.get("is_released") or is_copy:
        return True
    if (owner.get("host"), owner.get("processes")) != (platform.node(), _namespace()):
        return None
    if owner["process"] == os.getpid():  # a full disk may have prevented the release
        return owner["token"] not in _HELD_TOKENS
    started = _started(owner["process"])
    return None if started is None else started != owner["started"]


def _create(folder: Location, number: int, owner: Owner) -> bool:
    """Create the file of `number`; False if another process has created it."""
    file, content = _file(folder, number), json.dumps(owner).encode()
    start_s = time.monotonic()
    if file.create(content) and not folder.is_local and file.create(content):
        logger.warning(
            "this object store ignores If-None-Match; of two processes that start at the same "
            "moment one is refused by waiting at least %g s, or ends at its next heartbeat",
            SETTLE_S,
        )
        time.sleep(max(SETTLE_S, 2 * (time.monotonic() - start_s)))
    # Not by the result of `create`: a request that was repeated, because its answer was lost, finds
    # its own file.
    if _read_owner(folder, number).get("token") != owner["token"]:
        return False
    numbers = _numbers(folder)
    if max(numbers) > number:  # others have held and released `number` meanwhile
        file.delete()
        return False
    for older in numbers:
        if older < number:
            with contextlib.suppress(OSError):  # the next holder deletes it
                _file(folder, older).delete()
    return True


def _renew(
    folder: Location,
    number: int,
    owner: Owner,
    ended: threading.Event,
    on_lost: Callable[[str], None],
) -> None:
    """Write heartbeats until the holder has `ended`, and then the release, which is the last."""
    file, has_warned = _file(folder, number), False
    while not ended.wait(HEARTBEAT_S):
        try:
            check_lock(folder, number, owner["token"])
            owner["heartbeat"] += 1
            file.write(json.dumps(owner).encode())
        except LockLostError as error:
            on_lost(str(error))
            return
        except OSError as error:  # the next heartbeat may succeed
            if not has_warned:
                logger.warning("the lock of %s cannot be renewed: %s", folder.uri, error)
            has_warned = True
    # The file stays, so that its number is never used again.
    try:
        if _read_owner(folder, number).get("token") == owner["token"]:
            file.write(json.dumps({**owner, "is_released": True}).encode())
    except OSError as error:  # the next holder finds out
        logger.warning("the lock of %s is left: %s", folder.uri, error)


def _numbers(folder: Location) -> list[int]:
    matches = (_FILE.fullmatch(info.base_name) for info in folder.list_files(recursive=False))
    return [int(match[1]) for match in matches if match]


def _read_owner(folder: Location, number: int) -> Owner:
    # Empty for a file that is just being written, or that a newer holder has just deleted.
    with contextlib.suppress(ValueError, FileNotFoundError):
        owner = json.loads(_file(folder, number).read())
        if isinstance(owner, dict) and owner.keys() >= {"token", "process", "started"}:
            return owner
    return {}


def _name(owner: Owner) -> str:
    if not owner:
        return "an unknown process"
    return "process {process} of {owner} on {host} since {since}".format_map(owner)


def _file(folder: Location, number: int) -> Location:
    return folder.child(f"lock-{number:08d}.json")


def _inode(folder: Location) -> int | None:
    # A renamed folder keeps its inode, and a copy has another one.
    with contextlib.suppress(OSError):
        return os.stat(folder.path).st_ino if folder.is_local else None
    return None


def _started(pid: int) -> str | None:
    """When a process started, in the kernel's ticks: numbers of processes are reused. Empty if the
    process has ended; None if it is hidden.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if psutil.pid_exists(pid) else ""
    return "" if fields[0] in "ZX" else fields[19]  # a zombie has ended, but is not yet reaped


def _namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
