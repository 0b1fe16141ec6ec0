"""Row groups kept on a node's own disk, so that later epochs do not fetch them again.

Reading tasks of a node share a folder. A file is written once, under another name until it is
whole, as long as the disk has room; nothing is ever evicted. Its last bytes are a checksum, and a
file that differs from it is as if it were not there.
"""

import contextlib
import errno
import logging
import shutil
import uuid
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import pyarrow as pa

_LOG: Final = logging.getLogger(__name__)
_CHECKSUM_BYTES: Final = 4
# Errors of a disk that worked before, and may work again.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@dataclass(frozen=True)
class Cache:
    """A folder of this node for tables of row groups; a disk keeps `free_bytes` for others."""

    folder: str
    free_bytes: int

    def read(self, name: str) -> pa.Table | None:
        """A table, if its file is there and whole."""
        path = Path(self.folder) / name
        try:
            with pa.OSFile(str(path)) as file:
                content = file.read_buffer()
            known = content[-_CHECKSUM_BYTES:].to_pybytes()
            content = content[:-_CHECKSUM_BYTES]
            if zlib.crc32(content).to_bytes(_CHECKSUM_BYTES) == known:
                return pa.ipc.open_file(content).read_all()
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException) as error:
            _LOG.debug("%s: %s", path, error)
        _LOG.warning("%s is damaged; it is deleted, and read again from the data set", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def write(self, name: str, table: pa.Table) -> None:
        """Keep a table if there is room; a full disk is a warning, not an error.

        Raises:
            ValueError: the folder cannot be made or written to.
        """
        folder = Path(self.folder)
        half = folder / f"{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True)  # a cleaner may have removed it
            if shutil.disk_usage(folder).free - table.nbytes < self.free_bytes:
                return
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            content = sink.getvalue()
            with half.open("wb") as file:
                file.write(content)
                file.write(zlib.crc32(content).to_bytes(_CHECKSUM_BYTES))
            half.replace(folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                half.unlink()
            if error.errno not in _NO_ROOM and not isinstance(error, FileNotFoundError):
                raise ValueError(
                    f"data.cache_dir={self.folder!r} cannot be used on this node ({error}); give "
                    "a folder on a local disk, or unset it"
                ) from error
            _warn_once(self.folder, error.strerror or str(error))


@lru_cache(maxsize=64)
def _warn_once(folder: str, reason: str) -> None:
    _LOG.warning("data.cache_dir=%s: %s; reading continues without it", folder, reason)
