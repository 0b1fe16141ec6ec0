"""The index of a source: units that tasks index, and a row per image.

A source is cut into units (a class folder, a tar shard, a parquet file, a part of a list). The
index has the position of each image's bytes (path, offset, length), its key, and its labels as
text. An error in one image is the `problem` of its row; only an error that makes the number of
images unknown is raised, as `DamagedUnitError`.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import pyarrow as pa

from vit_ray.storage import Location, locate, naming

WHOLE_FILE: Final = -1
"""Offset of an image in its own file, and the length if it is not known yet."""

MOST_IMAGE_BYTES: Final = 1 << 29
"""Larger files are not images but mistakes, which would fill a task's memory."""

MOST_EXTRA_BYTES: Final = 1 << 16
"""Most bytes of all values of `convert.columns` for one image: tasks and indices hold thousands of
rows."""

INDEX_SCHEMA: Final = pa.schema(
    [
        ("path", pa.large_string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("key", pa.large_string()),
        ("labels", pa.large_list(pa.large_string())),
        ("problem", pa.large_string()),
        ("extra", pa.large_list(pa.large_string())),
        ("version", pa.large_string()),
    ]
)

IMAGE_SUFFIXES: Final = frozenset(
    {"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "img", "image"}
)

_BUFFER: Final = 1 << 20
"""Bytes that are read at once: each read is a request to an object store."""

LabelKind = Literal["name", "index", "text"]
"""How the source marks a label: a class name, an index into the classes, or not at all."""


class DamagedUnitError(ValueError):
    """A unit ends in damage, so the number of its images is unknown."""

    def __init__(self, path: str, offset: int, what: str) -> None:
        super().__init__(f"{path} is damaged at byte {offset:,}: {what}")
        self.offset = offset


class LargerError(ValueError):
    """A file has more bytes than were to be read; none of them have been.

    Attributes:
        size: bytes that it has.
    """

    def __init__(self, size: int, most: int) -> None:
        super().__init__(f"the file has {size:,} bytes; an image has at most {most:,}")
        self.size = size


class SourceChangedError(ValueError):
    """A file differs from the indexed one; no single image is the cause."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} has changed since this conversion indexed it; run the same command again, "
            "which indexes changed files again"
        )


@dataclass(frozen=True)
class SourceUnit:
    """A part of a source that one task indexes.

    Attributes:
        folder: keys, and the paths of a list, are relative to it.
        start, stop: bytes of a list; None = to its end.
        first_line: 1-based number of the line at `start`.
        columns: names of the fields that are passed through.
        label_field: the field with the label, or the task of VTAB; None = a usual one.
        image_field: the field with the image, or its path in a list; None = a usual one.
    """

    format: str
    path: str
    folder: str
    start: int = 0
    stop: int | None = None
    first_line: int = 1
    columns: tuple[str, ...] = ()
    label_field: str | None = None
    image_field: str | None = None

    @property
    def name(self) -> str:
        """The path below `folder`."""
        return relative(self.path, self.folder)

    @property
    def id(self) -> str:
        """By its path, so that it is found again when other units are added or removed."""
        path = f"{self.path}#{self.start}" if self.start else self.path
        return f"index-{hashlib.sha256(path.encode()).hexdigest()[:16]}"

    @property
    def staged(self) -> str:
        """Stem of the files that a conversion keeps for it, which depends on the settings."""
        return f"index-{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def opened(unit: SourceUnit) -> Iterator[tuple[io.BufferedReader, int]]:
    """The file of a unit, and its size in bytes."""
    location = locate(unit.path)
    with naming(location.uri), location.open() as file:
        yield io.BufferedReader(file, _BUFFER), file.size()


@dataclass(frozen=True)
class IndexEntry:
    """One image of a source. `problem` says why it cannot be used, before it is even read.

    `extra` has the values of the unit's `columns`; `version` is that of the file at `path`, from
    `Location.info`, if the index depends on its content.
    """

    path: str
    offset: int
    length: int
    key: str
    labels: tuple[str, ...]
    problem: str | None = None
    label_kind: LabelKind = "text"
    extra: tuple[str | None, ...] = ()
    version: str | None = None

    @property
    def extra_bytes(self) -> int:
        return sum(len(value.encode()) for value in self.extra if value is not None)

    def read(self, most: int = MOST_IMAGE_BYTES) -> bytes:
        """The encoded image; on S3 by one request.

        Args:
            most: bytes that a file of its own may have.

        Raises:
            ValueError: the source marks it as unusable, or it cannot be read.
            LargerError: the file has more bytes.
            SourceChangedError: the file differs from the indexed one.
        """
        if self.problem is not None:
            raise ValueError(self.problem)
        location = locate(self.path)
        try:
            if location.is_local and self.offset == WHOLE_FILE:
                content = _read_file(location, most)
            elif self.offset == WHOLE_FILE:
                content = _read_object(location, most, self)
            elif location.protocol == "s3" and self.version is not None:
                return _read_version(location, self.offset, self.length, self.version)
            else:
                content = location.read_range(self.offset, self.length)
            # Checked last: it may change while it is read.
            is_checked = location.protocol == "s3" and self.offset == WHOLE_FILE
            if self.version is None or is_checked or location.info().version == self.version:
                return content
        except (FileNotFoundError, FileExistsError) as error:
            if self.version is None:
                raise ValueError(f"no such file: {self.path}") from error
        raise SourceChangedError(self.path)


def rejected(path: str, key: str, problem: str) -> IndexEntry:
    """An entry that is not an image."""
    return IndexEntry(path, 0, 0, key, (), problem)


def storable(entry: IndexEntry) -> IndexEntry:
    """The entry, or a rejected one that can be stored if its texts are not Unicode or too long."""
    try:
        values = (entry.problem, *entry.extra)
        "".join((entry.path, entry.key, *entry.labels, *filter(None, values))).encode()
        if entry.extra_bytes > MOST_EXTRA_BYTES:
            problem = (
                f"its fields of convert.columns have {entry.extra_bytes:,} bytes; at most "
                f"{MOST_EXTRA_BYTES:,} are allowed"
            )
            return replace(with_problem(entry, problem), extra=())
        return entry
    except UnicodeEncodeError:
        problem = entry.problem or "its name or its label is not valid UTF-8"
        return rejected(printable(entry.path), printable(entry.key), printable(problem))


def printable(text: str) -> str:
    r"""The text, with bytes that are not Unicode as `\udc..`."""
    return text.encode("utf-8", "backslashreplace").decode()


def relative(path: str, folder: str) -> str:
    """The path below a folder that contains it."""
    return path[len(folder.rstrip("/")) + 1 :]


_OF_SYSTEMS: Final = frozenset({"thumbs.db", "desktop.ini", "__macosx", "lost+found"})
"""What Windows, macOS and ext4 add to folders, in lower case."""


def is_hidden(path: str) -> bool:
    """Whether a component of a relative path begins with a dot, or an operating system made it."""
    return any(part.startswith(".") or part in _OF_SYSTEMS for part in path.lower().split("/"))


_OF_THE_FILE: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
"""An error of one file, or of its path, not of the disk or this process."""
_MOST_KEY_BYTES: Final = 1024
"""Longest name of an object on S3, in bytes."""


_BUCKET: Final = re.compile(r"[a-zA-Z0-9.\-_]{1,255}")


def _read_file(location: Location, most: int) -> bytes:
    try:
        status = os.stat(location.path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{location.path} is not a regular file")
        _check_size(status.st_size, most)
        return location.read()
    except OSError as error:
        if error.errno not in _OF_THE_FILE:
            raise
        raise ValueError(f"it cannot be read: {os.strerror(error.errno)}") from error


def _read_object(location: Location, most: int, entry: IndexEntry) -> bytes:
    """A whole object of a store, in one request."""
    if entry.version is not None:
        _check_size(entry.length, most)
        if location.protocol == "s3" and entry.length:
            return _read_version(location, 0, entry.length, entry.version)
    bucket, _, key = location.path.partition("/")
    # What stores refuse is an error of one image.
    if not _BUCKET.fullmatch(bucket) or {"", ".", ".."} & set(key.split("/")):
        raise ValueError(
            f"{location.uri} names no object; give s3://BUCKET/KEY, or a path below the list's "
            "folder, without empty parts, '.' and '..'"
        )
    if len(key.encode()) > _MOST_KEY_BYTES:
        raise ValueError(f"its name has more than {_MOST_KEY_BYTES:,} bytes")
    content = location.read_range(0, most + 1)
    if len(content) > most:
        raise LargerError(location.info().size, most)
    return content


def _read_version(location: Location, start: int, count: int, etag: str) -> bytes:
    """Some bytes of an object, in one request.

    Raises:
        FileExistsError: it has another etag.
    """
    with naming(location.uri):
        file = location.filesystem.open(location.path, size=start + count, cache_type="none")
        file.details = {"name": location.path, "size": start + count, "ETag": etag}  # no request
        file.read_kw = {**file.read_kw, "IfMatch": f'"{etag}"'}
        file.seek(start)
        try:
            return bytes(file.read(count))
        except OSError as error:
            if type(error).__name__ == "FileExpired":  # of s3fs, which few processes import
                raise FileExistsError(errno.EEXIST, "it has another etag") from error
            raise


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise LargerError(size, most)


def with_problem(entry: IndexEntry, problem: str) -> IndexEntry:
    """The entry, rejected for a reason."""
    return replace(entry, labels=(), problem=problem)
