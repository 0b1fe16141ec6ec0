"""Parts of shards kept on a node's own disk, so that later epochs do not fetch them again.

Reading tasks of a node share one folder, which belongs to the cache alone. What is in it is only
ever a copy: it is compared with the manifest's checksum whenever it is read, and an entry that
differs, cannot be read, or has no room is as if it were not there.

A full cache keeps what it has of a data set: epochs come in random orders, of which a cache that
replaces what was used last longest ago would serve far less (for half of a data set, 15 % of the
reads and not 50 %). Entries of other data sets make room when they have not been used for a while.
"""

import contextlib
import fcntl
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

from vit_ray.data.format.schema import checksum

_LOG: Final = logging.getLogger(__name__)

_MARKER: Final = "vit_ray_cache"
_ENTRY: Final = re.compile(r"[0-9a-f]{16}-\d+-(\d+|footer)(\.[0-9a-f]{8}\.tmp)?")
"""Names that this module gives to files; no other file is ever deleted."""
_IDLE_S: Final = 3600.0
"""For which another data set's entries are kept after their last use."""
_LOCK_WAIT_S: Final = 2.0
_LOCK_POLL_S: Final = 0.01


@dataclass(frozen=True)
class LocalCache:
    """A cache of one data set; equal ones share their folder.

    Attributes:
        folder: of this node, for the cache alone.
        most_bytes: that all entries of the folder take.
    """

    folder: str
    most_bytes: int

    def read(self, name: str, crc32: int) -> pa.Buffer | None:
        """An entry, if it is there and is what it should be."""
        path = self._opened() / name
        try:
            with pa.OSFile(str(path)) as file:
                content = file.read_buffer()
        except OSError:
            return None
        if checksum(content) != crc32:
            _LOG.warning("%s differs from its checksum; it is deleted and read again", path)
            _delete(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def write(self, name: str, content: pa.Buffer | bytes) -> None:
        """Keep an entry if there is room; never raises for want of it."""
        folder = self._opened()
        try:
            with _locked(folder) as is_mine:
                if is_mine and self._make_room(folder, name, len(memoryview(content))):
                    _write(folder / name, content)
        except OSError as error:
            _warn_once(str(folder), error.strerror or str(error))

    def _opened(self) -> Path:
        return _own_folder(self.folder)

    def _make_room(self, folder: Path, name: str, num_bytes: int) -> bool:
        """Whether an entry fits, after others have gone that may."""
        entries = list(_entries(folder))
        excess = sum(stat.st_size for _, stat in entries) + num_bytes - self.most_bytes
        idle_since = time.time() - _IDLE_S
        of_set = name.partition("-")[0]
        idle = sorted(
            (stat.st_mtime, path, stat.st_size)
            for path, stat in entries
            if stat.st_mtime < idle_since
            if not path.name.startswith(of_set) or path.suffix == ".tmp"
        )
        for _, path, size in idle:
            if excess <= 0:
                break
            _delete(path)
            excess -= size
        return excess <= 0


@lru_cache(maxsize=8)
def _own_folder(folder: str) -> Path:
    """The folder, with a mark that it is a cache.

    Raises:
        ValueError: it holds what no cache has put there, or cannot be made.
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
def _locked(folder: Path) -> Iterator[bool]:
    """Whether no other process counts or writes meanwhile; given up if one does for too long."""
    with (folder / _MARKER).open("a") as marker:
        until = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    yield False
                    return
                time.sleep(_LOCK_POLL_S)
                continue
            yield True  # closing the file lets go
            return


def _write(path: Path, content: pa.Buffer | bytes) -> None:
    half = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        half.write_bytes(content)
        half.replace(path)
    except OSError:
        _delete(half)
        raise


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@lru_cache(maxsize=64)
def _warn_once(folder: str, reason: str) -> None:
    _LOG.warning("data.cache_dir=%s: %s; reading goes on without it", folder, reason)
