"""A source as rows: where each image is stored, its labels and its key.

For each format, a function yields the rows of a unit (a class folder, an archive, a list). An error
in one image is the `problem` of its row; only an error that makes the number of images unknown is
raised, as `DamagedUnitError`.
"""

import contextlib
import errno
import io
import os
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import pyarrow as pa

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.storage import Location, check_reachable, is_of_the_store, locate, naming

# The offset of an image that is a separate file, and the length of an image of unknown size.
WHOLE_FILE: Final = -1
# Larger files are not images but mistakes, and would fill a task's memory.
MOST_IMAGE_BYTES: Final = 1 << 29
ROW_SCHEMA: Final = pa.schema(
    [
        ("path", pa.large_string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("key", pa.large_string()),
        ("labels", pa.large_list(pa.large_string())),
        ("kind", pa.large_string()),
        ("problem", pa.large_string()),
        ("extra", pa.large_list(pa.large_string())),
        ("version", pa.large_string()),
    ]
)
# Formats whose units are folders, and formats whose units are lists.
FOLDERS: Final = ("folder", "loose")
LISTS: Final = ("csv", "jsonl")
# Size of a read in bytes: each read is a request to an object store.
_BUFFER: Final = 1 << 20
# Errors of a file or its path, and not of the disk or this process.
_FILE_ERRORS: Final = FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError
_FILE_ERRNOS: Final = errno.ENAMETOOLONG, errno.ELOOP

# How a source marks its labels: as class names, as class indices, or not at all (`text`).
LabelKind = Literal["name", "index", "text"]


class DamagedUnitError(ValueError):
    """A unit is damaged, so that the number of its images is unknown."""

    def __init__(self, path: str, offset: int, what: str) -> None:
        super().__init__(f"{path} is damaged at byte {offset:,}: {what}")
        self.offset = offset


class SourceChangedError(ValueError):
    """A file has changed since it was indexed; the conversion stops."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} has changed since this conversion indexed it; run the same command again, "
            "which indexes the source again"
        )


@dataclass(frozen=True)
class Unit:
    """A part of a source that one task reads: a class folder, an archive or a list.

    Attributes:
        folder: keys, and the paths in a list, are relative to this folder.
    """

    format: str
    path: str
    folder: str
    config: ConvertConfig

    @property
    def name(self) -> str:
        """The path below `folder`."""
        return relative(self.path, self.folder)

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[io.BufferedReader, int]]:
        """The file of a unit, and its size in bytes."""
        location = locate(self.path)
        with naming(location.uri), location.open() as file:
            yield io.BufferedReader(file, _BUFFER), file.size()


@dataclass(frozen=True, slots=True)
class Row:
    """One image of a source.

    Attributes:
        labels: as text; `kind` tells whether they are names or indices.
        path, offset, length: where the image is stored.
        image: its bytes, if no file has them as consecutive bytes, as in parquet.
        problem: why the image cannot be used.
        extra: the values of `convert.columns`.
        version: of the file at `path`, from `Location.info`; None if it is not checked.
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

    def storable(self) -> "Row":
        """The row; if its texts are not Unicode, a row with only a key and a problem."""
        texts = self.path, self.key, *self.labels, self.problem, *self.extra
        try:
            "".join(filter(None, texts)).encode()
        except UnicodeEncodeError:
            problem = self.problem or "its name or its label is not valid UTF-8"
            return Row(printable(self.key), problem=printable(problem))
        return self

    def read(self) -> bytes:
        """The encoded image; on S3 with one request.

        Raises:
            ValueError: the row has a problem, or its image cannot be read.
            SourceChangedError: the file has changed since it was indexed.
        """
        if self.problem is not None:
            raise ValueError(self.problem)
        if self.image is not None:
            return self.image
        _check_size(self.length)
        location = locate(self.path)
        try:
            return self._content(location)
        except OSError as error:
            if self.version is not None and isinstance(error, FileNotFoundError):
                raise SourceChangedError(self.path) from error
            is_refused = not location.is_local and not is_of_the_store(error)  # an odd name
            is_of_the_file = isinstance(error, _FILE_ERRORS) or error.errno in _FILE_ERRNOS
            if self.offset != WHOLE_FILE or not (is_of_the_file or is_refused):
                raise  # many images are in an archive or in the file of packed images
            if not isinstance(error, FileNotFoundError):
                check_reachable(location)  # raises if the store refuses all objects
            raise ValueError(f"it cannot be read: {error}") from error

    def _content(self, location: Location) -> bytes:
        """The bytes of the image; raises SourceChangedError if the file has another version."""
        if location.protocol == "s3" and self.version is not None and self.length:
            return _read_version(location, max(self.offset, 0), self.length, self.version)
        if self.offset != WHOLE_FILE:
            content = location.read_range(self.offset, self.length)
        elif location.is_local:
            content = _read_file(location)
        else:
            content = location.read_range(0, MOST_IMAGE_BYTES + 1)
            _check_size(len(content))
        # After the read, as the file may change during it.
        if self.version is not None and location.info().version != self.version:
            raise SourceChangedError(self.path)
        if self.offset != WHOLE_FILE and len(content) != self.length:
            text = f"{len(content):,} of {self.length:,} bytes at {self.offset:,} are there"
            raise OSError(errno.ENODATA, text, self.path)
        return content


def _read_file(location: Location) -> bytes:
    # A list and a disk may have a name in different normal forms of Unicode.
    forms = (unicodedata.normalize(form, location.path) for form in ("NFC", "NFD"))
    path = next(filter(os.path.exists, (location.path, *forms)), location.path)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")
    _check_size(status.st_size)
    return replace(location, path=path).read()


def _check_size(size: int) -> None:
    if size > MOST_IMAGE_BYTES:
        raise ValueError(f"it has {size:,} bytes, and an image at most {MOST_IMAGE_BYTES:,}")


def _read_version(location: Location, start: int, count: int, etag: str) -> bytes:
    """Some bytes of an object, with one request; SourceChangedError if its etag differs."""
    with naming(location.uri):
        file = location.filesystem.open(location.path, size=start + count, cache_type="none")
        file.details = {"name": location.path, "size": start + count, "ETag": etag}  # no request
        file.read_kw = {**file.read_kw, "IfMatch": f'"{etag}"'}
        file.seek(start)
        try:
            return bytes(file.read(count))
        except OSError as error:
            if type(error).__name__ == "FileExpired":  # of s3fs, which few processes import
                raise SourceChangedError(location.uri) from error
            raise


def printable(text: str) -> str:
    r"""The text, with lone surrogates (bytes that are not UTF-8) as `\udc..`."""
    return text.encode("utf-8", "backslashreplace").decode()


def relative(path: str, folder: str) -> str:
    """The path relative to a folder that contains it."""
    return path[len(folder.rstrip("/")) + 1 :]


def row_table(rows: list[Row]) -> pa.Table:
    """Rows as an Arrow table."""
    fields = {name: [getattr(row, name) for row in rows] for name in ROW_SCHEMA.names}
    return pa.table(fields, schema=ROW_SCHEMA)


def table_rows(table: pa.Table) -> Iterator[Row]:
    """The rows of a table of `ROW_SCHEMA`."""
    for row in table.to_pylist():
        yield Row(**row | {"labels": tuple(row["labels"]), "extra": tuple(row["extra"])})
