"""Large arrays that many processes of a host need and each would compute alike: in memory that they
share.

The first process that needs an array writes it to a file in a folder of its user's own, in the
host's folder for temporary files; all of them map it. The name of a file is the digest of all that
decides its content. It is compared with its checksum by each process that maps it. What no process
maps any more is deleted when the next file is written. Where there is no room, or no such folder,
each process keeps an array of its own.
"""

import contextlib
import fcntl
import hashlib
import logging
import math
import mmap
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.dataset import checksum

Int64Array = NDArray[np.int64]

LEAST_BYTES: Final = 4 << 20
"""Smaller arrays are not shared: each process computes them in 30 ms at most."""
WAIT_S: Final = 60.0
"""For another process to write an array: the order of 5 million row groups takes it 1.5 s."""
_POLL_S: Final = 0.02
_VERSION: Final = 1
"""Of the functions that make arrays; raised when one gives another array for the same key."""
_NAME: Final = re.compile("[0-9a-f]{64}")
"""Of the files; no other is ever deleted."""
_CHECKSUM_BYTES: Final = 4

_LOG: Final = logging.getLogger(__name__)


def shared_array(
    key: tuple[int, ...],
    counts: NDArray[np.integer],
    shape: tuple[int, ...],
    make: Callable[[], Int64Array],
) -> Int64Array:
    """What `make` gives, not to be written to: int64 of that shape.

    Args:
        key: with `counts`, all that decides the content.
    """
    num_bytes = 8 * math.prod(shape)
    if num_bytes < LEAST_BYTES:
        return make()
    decides = (_VERSION, sys.byteorder, key, shape, counts.dtype.str)
    digest = hashlib.sha256(repr(decides).encode())
    digest.update(np.ascontiguousarray(counts).data)
    make = cache(make)
    try:
        found = _mapped(_own_folder() / digest.hexdigest(), num_bytes, make)
    except OSError as error:
        _warn_once(error.strerror or str(error))
        return make()
    return np.frombuffer(found, np.int64, math.prod(shape)).reshape(shape)


def _own_folder() -> Path:
    """A folder that no other user can write to.

    Raises:
        OSError: it cannot be made, or belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"vit_ray-arrays-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


def _mapped(path: Path, num_bytes: int, make: Callable[[], Int64Array]) -> mmap.mmap:
    """A file of an array and its checksum, which is written if it is not there.

    A mapping holds the file's lock, shared, as long as it is in use.

    Raises:
        OSError: there is no room or no lock for it, or another process does not finish it.
    """
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        with path.open("a+b") as file:
            # A file of the full length is never written to again: others may have mapped it.
            is_full = os.fstat(file.fileno()).st_size == num_bytes + _CHECKSUM_BYTES
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if is_full else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL_S)
                continue
            found = os.fstat(file.fileno())
            if not found.st_nlink or (found.st_size == num_bytes + _CHECKSUM_BYTES) != is_full:
                continue  # deleted or written before the lock was ours
            if not is_full:
                _delete_unused(path)
                if shutil.disk_usage(path.parent).free < 2 * num_bytes:
                    raise OSError(f"{path.parent} has no room for {num_bytes >> 20} MiB")
                content = np.ascontiguousarray(make()).data.cast("B")
                try:
                    file.truncate(0)  # what a process has left that was killed
                    file.write(content)
                    file.write(checksum(content).to_bytes(_CHECKSUM_BYTES, "little"))
                    file.flush()
                except OSError:
                    path.unlink(missing_ok=True)
                    raise
                with contextlib.suppress(BlockingIOError):  # it is being deleted
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        kept = int.from_bytes(mapped[num_bytes:], "little")
        if checksum(np.frombuffer(mapped, np.uint8, num_bytes).data) == kept:
            return mapped
        path.unlink(missing_ok=True)
    raise TimeoutError(f"another process has not written it in {WAIT_S:g} s")


def _delete_unused(path: Path) -> None:
    """Delete all other files that no process maps; a mapping of a deleted file would stay whole."""
    for other in path.parent.iterdir():
        if not _NAME.fullmatch(other.name) or other == path:
            continue
        # Another process maps it, or is deleting it, too.
        with contextlib.suppress(OSError), other.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other.unlink()


@lru_cache(maxsize=64)
def _warn_once(reason: str) -> None:
    _LOG.warning("the order of the data set is not shared between processes: %s", reason)
