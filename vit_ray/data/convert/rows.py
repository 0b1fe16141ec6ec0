"""A source as rows: where each image lies, its labels and its key.

A format is a function that yields the rows of a unit (a class folder, an archive, a list). An error
in one image is the `problem` of its row; only an error that makes the number of images unknown is
raised, as `DamagedUnitError`.
"""

import contextlib
import errno
import io
import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import pyarrow as pa

from vit_ray.storage import Location, check_reachable, locate, naming

# Offset of an image in its own file, and the length if it is not known yet.
WHOLE_FILE: Final = -1
# Larger files are not images but mistakes, which would fill a task's memory.
MOST_IMAGE_BYTES: Final = 1 << 29
# Most bytes of all values of `convert.columns` for one image.
MOST_EXTRA_BYTES: Final = 1 << 16
ROW_SCHEMA: Final = pa.schema(
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
# Bytes that are read at once: each read is a request to an object store.
_BUFFER: Final = 1 << 20
# Errors of one file, or of its path, not of the disk or this process.
_OF_THE_FILE: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
# Longest name of an object on S3, in bytes.
_MOST_KEY_BYTES: Final = 1024
_BUCKET: Final = re.compile(r"[a-zA-Z0-9.\-_]{1,255}")

# How the source marks a label: a class name, an index into the classes, or not at all.
LabelKind = Literal["name", "index", "text"]


class DamagedUnitError(ValueError):
    """A unit ends in damage, so the number of its images is unknown."""

    def __init__(self, path: str, offset: int, what: str) -> None:
        super().__init__(f"{path} is damaged at byte {offset:,}: {what}")
        self.offset = offset


class LargerError(ValueError):
    """A file has more bytes than were to be read; none of them have been."""


class SourceChangedError(ValueError):
    """A file differs from the indexed one; no single image is the cause."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} has changed since this conversion indexed it; run the same command again, "
            "which indexes changed files again"
        )


@dataclass(frozen=True)
class Unit:
    """A part of a source that is read from its begin to its end.

    Attributes:
        folder: keys, and the paths of a list, are relative to it.
        columns: names of the fields that are passed through.
        label_field: the field with the label, or the task of VTAB; None = a usual one.
        image_field: the field with the image, or its path in a list; None = a usual one.
        image_pattern: makes the path of an image from the text of a list.
        may_be_deep: whether a class folder may have all of its images in folders below.
    """

    format: str
    path: str
    folder: str
    columns: tuple[str, ...] = ()
    label_field: str | None = None
    image_field: str | None = None
    image_pattern: str = "{}"
    may_be_deep: bool = False

    @property
    def name(self) -> str:
        """The path below `folder`."""
        return relative(self.path, self.folder)

    @property
    def is_folder(self) -> bool:
        return self.format in ("folder", "loose")

    @property
    def is_list(self) -> bool:
        return self.format in ("csv", "jsonl")

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[io.BufferedReader, int]]:
        """The file of a unit, and its size in bytes."""
        location = locate(self.path)
        with naming(location.uri), location.open() as file:
            yield io.BufferedReader(file, _BUFFER), file.size()


@dataclass(frozen=True)
class Row:
    """One image of a source.

    Attributes:
        labels: as text; `kind` says what they are.
        path, offset, length: where the image lies.
        image: its bytes, of a format in which they do not lie anywhere as they are.
        problem: why it cannot be used, before it is even read.
        extra: the values of the unit's `columns`.
        version: of the file at `path`, from `Location.info`, if the row depends on its content.
    """

    key: str
    labels: tuple[str, ...] = ()
    path: str = ""
    offset: int = WHOLE_FILE
    length: int = WHOLE_FILE
    image: bytes | None = None
    problem: str | None = None
    kind: LabelKind = "text"
    extra: tuple[str | None, ...] = ()
    version: str | None = None

    @property
    def extra_bytes(self) -> int:
        return sum(len(value.encode()) for value in self.extra if value is not None)

    def rejected(self, problem: str) -> "Row":
        """The row without labels, for a reason."""
        return replace(self, labels=(), problem=problem)

    def storable(self) -> "Row":
        """The row, or one that can be stored if its texts are not Unicode or too long."""
        try:
            texts = self.path, self.key, *self.labels, self.problem, *self.extra
            "".join(filter(None, texts)).encode()
        except UnicodeEncodeError:
            problem = self.problem or "its name or its label is not valid UTF-8"
            return Row(printable(self.key), problem=printable(problem))
        if self.extra and self.extra_bytes > MOST_EXTRA_BYTES:
            what = (
                f"its fields of convert.columns have {self.extra_bytes:,} bytes; at most "
                f"{MOST_EXTRA_BYTES:,} are allowed"
            )
            return replace(self.rejected(what), extra=())
        return replace(self, labels=()) if self.problem is not None and self.labels else self

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
        if self.image is not None:
            return self.image
        location = locate(self.path)
        is_whole, is_object = self.offset == WHOLE_FILE, not location.is_local
        try:
            if location.protocol == "s3" and self.version is not None and self.length:
                _check_size(self.length, most)
                return _read_version(location, max(self.offset, 0), self.length, self.version)
            if not is_whole:
                content = location.read_range(self.offset, self.length)
            else:
                content = _read_object(location, most) if is_object else _read_file(location, most)
            # Checked last: it may change while it is read.
            if self.version is None or location.info().version == self.version:
                if not is_whole and len(content) != self.length:
                    what = f"{len(content):,} of {self.length:,} bytes at {self.offset:,} are there"
                    raise OSError(errno.ENODATA, what, self.path)
                return content
        except (FileNotFoundError, FileExistsError) as error:
            if self.version is None and not is_whole:
                raise  # what was packed is gone, and with it the images of many rows
            if self.version is None:
                raise ValueError(f"no such file: {self.path}") from error
        except PermissionError as error:
            if not is_object or not is_whole:
                raise
            check_reachable(location)  # raises what is wrong with the credentials, for all objects
            raise ValueError(f"it cannot be read: {error}") from error
        raise SourceChangedError(self.path)


def _read_file(location: Location, most: int) -> bytes:
    try:
        try:
            status = os.stat(location.path)
        except FileNotFoundError:
            location = _in_other_form(location)
            status = os.stat(location.path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{location.path} is not a regular file")
        _check_size(status.st_size, most)
        return location.read()
    except OSError as error:
        if error.errno not in _OF_THE_FILE:
            raise
        raise ValueError(f"it cannot be read: {os.strerror(error.errno)}") from error


def _in_other_form(location: Location) -> Location:
    """The same name in another normal form of Unicode: lists and disks differ in it."""
    forms: tuple[Any, ...] = "NFC", "NFD"
    paths = [unicodedata.normalize(form, location.path) for form in forms]
    return replace(location, path=next(filter(os.path.exists, paths), location.path))


def _read_object(location: Location, most: int) -> bytes:
    """A whole object of a store, in one request."""
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
        _check_size(location.info().size, most)
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
        raise LargerError(f"the file has {size:,} bytes; an image has at most {most:,}")


def printable(text: str) -> str:
    r"""The text, with bytes that are not Unicode as `\udc..`."""
    return text.encode("utf-8", "backslashreplace").decode()


def relative(path: str, folder: str) -> str:
    """The path below a folder that contains it."""
    return path[len(folder.rstrip("/")) + 1 :]


def row_table(rows: list[Row]) -> pa.Table:
    """Rows as an Arrow table."""
    columns = [[getattr(row, field.name) for row in rows] for field in ROW_SCHEMA]
    arrays = [pa.array(c, field.type) for c, field in zip(columns, ROW_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=ROW_SCHEMA)


def table_rows(table: pa.Table) -> Iterator[Row]:
    """The rows of a table."""
    for row in table.to_pylist():
        yield Row(**row | {"labels": tuple(row["labels"]), "extra": tuple(row["extra"])})


def in_pieces(rows: Iterable[Row], most_rows: int, most_characters: int) -> Iterator[list[Row]]:
    """The rows in lists that fit into a process, each with at least one."""
    piece: list[Row] = []
    characters = 0
    for row in rows:
        piece.append(row)
        texts = row.path, row.key, *row.labels, row.problem, *row.extra
        characters += sum(len(text) for text in texts if text is not None)
        if len(piece) == most_rows or characters >= most_characters:
            yield piece
            piece, characters = [], 0
    if piece:
        yield piece
