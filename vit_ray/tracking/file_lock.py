"""One process at a time for a local file: by `flock`, or by `lock` if the file system has no
`flock`.

Lustre may be mounted without `flock`, and some FUSE file systems do not have it. Then the lock is a
folder next to the file: it names the holder's process, its start and the machine's boot, so that
the lock of a killed process is taken over, and it is renewed, so that another machine sees whether
its holder is alive.

`flock` may also fail for one process and work for another: on another machine, or while an NFS
server starts. So each kind of holder leaves a mark before it looks for the mark of the other kind:
`flock` writes into the file, and the folder stays. If both are there, the folder decides.
"""

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

from vit_ray.lock import HeldError, hold_lock
from vit_ray.storage import locate

POLL_S: Final = 0.05
PASSING_S: Final = 3.0
"""How long "no locks available" may be a temporary error of the file's server."""
_WITHOUT_FLOCK: Final = {
    errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOTTY,
}  # fmt: skip

logger = logging.getLogger(__name__)


def lock_file(
    path: Path, limit_s: float, on_lost: Callable[[str], None] = logger.error
) -> contextlib.ExitStack | None:
    """Lock a file until the returned object is closed or the process ends.

    Args:
        on_lost: called once, from a thread, with the reason, if a process of another machine has
            taken over the lock; only without `flock`.

    Returns:
        None if another process has the lock for the whole of `limit_s`, or may have it.

    Raises:
        OSError: the file cannot be written.
    """
    deadline_s, folder = time.monotonic() + limit_s, Path(f"{path}.holders")
    with contextlib.ExitStack() as held:
        file = held.enter_context(path.open("a"))
        is_locked = _flock(file, deadline_s)
        if is_locked is False:
            return None
        if is_locked and not path.stat().st_size:
            file.write("flock\n")
            file.flush()
            os.fsync(file.fileno())
        if is_locked and not folder.exists():
            return held.pop_all()
        while True:
            try:
                held.enter_context(hold_lock(locate(str(folder)), on_lost))
                break
            except HeldError:  # which itself waits for seconds
                if time.monotonic() > deadline_s:
                    return None
        if is_locked or not path.stat().st_size:
            return held.pop_all()
        return None  # a holder by `flock` would not have seen the folder


def _flock(file: TextIO, deadline_s: float) -> bool | None:
    """Whether the file is locked now; None without `flock`."""
    passing_s = min(deadline_s, time.monotonic() + PASSING_S)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
        except OSError as error:
            if error.errno not in _WITHOUT_FLOCK:
                raise
            if error.errno != errno.ENOLCK or time.monotonic() > passing_s:
                return None
        time.sleep(POLL_S)
