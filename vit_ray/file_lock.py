"""One process at a time for a local file: by `flock`, or by `lock` where the file system has none.

Lustre may be mounted without `flock`, and some FUSE file systems do not have it. There the lock is
a folder next to the file: it names the holder's process, its start and the machine's boot, so that
the lock of a process that was killed is taken over, and it is renewed, so that another machine sees
whether its holder lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import time
from pathlib import Path
from typing import Final

from vit_ray.lock import HeldError, hold_lock
from vit_ray.storage import locate

POLL_S: Final = 0.05
_WITHOUT_FLOCK: Final = {
    errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOTTY,
}  # fmt: skip

logger = logging.getLogger(__name__)


def lock_file(path: Path, limit_s: float) -> contextlib.ExitStack | None:
    """Lock a file until what is returned is closed or the process ends.

    Returns:
        None if another process has the lock for all of `limit_s`.

    Raises:
        OSError: the file cannot be written.
    """
    deadline_s = time.monotonic() + limit_s
    held = contextlib.ExitStack()
    file = held.enter_context(path.open("a"))
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return held
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                held.close()
                return None
            time.sleep(POLL_S)
        except OSError as error:
            if error.errno not in _WITHOUT_FLOCK:
                raise
            break
    while True:
        try:
            held.enter_context(hold_lock(locate(f"{path}.holders"), logger.error))
            return held
        except HeldError:  # which waits for seconds by itself
            if time.monotonic() > deadline_s:
                held.close()
                return None
