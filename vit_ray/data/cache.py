"""Parts of shards kept on a node's own disk, so that later epochs do not fetch them again.

Reading tasks of a node share one folder, which belongs to the cache alone. What is in it is only
ever a copy: it is compared with the manifest's checksum whenever it is read, and an entry that
differs, cannot be read, or has no room is as if it were not there.

A full cache keeps what it has of a data set. Epochs come in random orders, and an LRU cache would
serve far less of them (for half of a data set, 15 % of the reads and not 50 %).
Entries of other data sets make room when they have not been used for a while.
"""

import contextlib
import errno
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import pyarrow as pa
from filelock import FileLock, Timeout

from vit_ray.data.dataset import checksum

_LOG: Final = logging.getLogger(__name__)

_MARKER: Final = "vit_ray_cache"
_LOCK: Final = "vit_ray_cache.lock"
_ENTRY: Final = re.compile(r"[0-9a-f]{16}-\d+-(\d+|footer)(\.[0-9a-f]{8}\.tmp)?")
"""Names that this module gives to files; no other file is ever deleted."""
_IDLE_S: Final = 3600.0
"""For which another data set's entries are kept after their last use."""
_FULL_S: Final = 60.0
"""Between two looks for what may go from a full cache."""
_TOTAL: Final = re.compile(rb" *(\d{1,20}) +(\d{1,20})\n")
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""What a disk says that worked before, and may again."""
_LOCK_WAIT_S: Final = 2.0
_LOCK_POLL_S: Final = 0.01


@dataclass(frozen=True)
class LocalCache:
    """A cache of data sets; equal ones share their folder, and parts of a data set its entries.

    Attributes:
        folder: of this node, for the cache alone.
        most_bytes: that all entries of the folder take.
    """

    folder: str
    most_bytes: int

    def read(self, name: str, crc32: int, most_bytes: int) -> pa.Buffer | None:
        """An entry, if it is there and is what it should be.

        Args:
            most_bytes: that it can have; a larger file is damaged, and is not read.
        """
        try:
            path = _own_folder(self.folder) / name
            with pa.OSFile(str(path)) as file:
                content = file.read_buffer() if file.size() <= most_bytes else None
        except OSError:
            return None
        if content is None or checksum(content) != crc32:
            _LOG.warning("%s differs from its checksum; it is deleted and read again", path)
            _delete(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def write(self, name: str, content: pa.Buffer | bytes) -> None:
        """Keep an entry if there is room; a full disk is a warning, not an error."""
        try:
            path = _own_folder(self.folder) / name
            with _locked(path.parent) as marker:
                # Of two tasks that missed it, one has written it meanwhile.
                if marker is None or path.exists():
                    return
                if self._has_room(marker, path, len(memoryview(content))):
                    _write(path, content, marker, self.most_bytes)
        except OSError as error:
            _warn_once(self.folder, error.strerror or str(error))

    def _has_room(self, marker: int, path: Path, num_bytes: int) -> bool:
        """Whether an entry fits, which then counts as written.

        The folder is listed by each process once, and when it seems to be full, which is believed
        for a while. So the count is never too low: a writer that is killed leaves it too high.
        """
        found = _TOTAL.fullmatch(os.pread(marker, 64, 0))
        known, full_until = (int(found[1]), int(found[2])) if found else (None, 0)
        is_first = self.folder not in _COUNTED
        if known is None or is_first or known + num_bytes > self.most_bytes:
            if known is not None and not is_first and time.time() < full_until:
                return False
            known = self._make_room(path, num_bytes)
            _COUNTED.add(self.folder)
        fits = known + num_bytes <= self.most_bytes
        _set_total(marker, known + num_bytes * fits, 0.0 if fits else time.time() + _FULL_S)
        return fits

    def _make_room(self, path: Path, num_bytes: int) -> int:
        """Delete idle entries of other data sets until the new one fits; bytes of those left."""
        entries = list(_entries(path.parent))
        total = sum(stat.st_size for _, stat in entries)
        idle_since, of_set = time.time() - _IDLE_S, path.name.partition("-")[0]
        for other, stat in sorted(entries, key=lambda entry: entry[1].st_mtime):
            if total + num_bytes <= self.most_bytes or stat.st_mtime >= idle_since:
                break
            if not other.name.startswith(of_set) or other.suffix == ".tmp":
                _delete(other)
                total -= stat.st_size
        return total


_COUNTED: Final[set[str]] = set()
"""Folders whose entries this process has counted."""


@lru_cache(maxsize=8)
def _own_folder(folder: str) -> Path:
    """The folder, with a mark that it is a cache.

    Raises:
        ValueError: it holds what no cache has put there, or cannot be made.
        OSError: its disk is full.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in os.scandir(path)}
        if names and _MARKER not in names:
            raise ValueError(
                f"data.cache_dir={folder!r} holds {min(names)!r} and is no cache of vit_ray; give "
                "a folder that is empty or not there: it is filled, and emptied, without asking"
            )
        (path / _MARKER).touch()
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        raise ValueError(
            f"data.cache_dir={folder!r} cannot be used on this node ({error}); give a folder on a "
            "local disk, or unset it"
        ) from error
    return path


def _entries(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for entry in os.scandir(folder):
        if _ENTRY.fullmatch(entry.name):
            with contextlib.suppress(FileNotFoundError):  # damaged, and deleted by its reader
                yield Path(entry.path), entry.stat()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int | None]:
    """The marker, while no other process counts or writes; None if one does for too long."""
    lock = FileLock(folder / _LOCK, poll_interval=_LOCK_POLL_S)
    try:
        lock.acquire(timeout=_LOCK_WAIT_S)
    except Timeout:
        yield None
        return
    marker = os.open(folder / _MARKER, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield marker
    finally:
        os.close(marker)
        lock.release()


def _set_total(marker: int, num_bytes: int, full_until: float) -> None:
    """Bytes of all entries, and until when a full cache is taken for full.

    Of fixed length, so that it is replaced by one call.
    """
    os.pwrite(marker, b"%20d %20d\n" % (num_bytes, full_until), 0)


def _write(path: Path, content: pa.Buffer | bytes, marker: int, most_bytes: int) -> None:
    half = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        half.write_bytes(content)
        half.replace(path)
    except OSError:
        _delete(half)
        _set_total(marker, most_bytes, time.time() + _FULL_S)  # the disk is full, the cache is not
        raise


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@lru_cache(maxsize=64)
def _warn_once(folder: str, reason: str) -> None:
    _LOG.warning("data.cache_dir=%s: %s; reading continues without it", folder, reason)
