"""The shards of a data set: their columns, and their row groups as encoded images.

A shard is a parquet file with a row per image: its encoded bytes, the labels, a key that names the
image in its source, its size in pixels, and a checksum. If JPEG files were rewritten with restart
markers (`convert.index_jpeg`), the column `restart_index` follows, which is null for a file that
was not rewritten. The source's columns of text (`convert.columns`) come last; training does not
decode them.

A row group is read in one piece, and each page is compared with its checksum. If a page differs,
each image is compared with the image's own checksum, so that only damaged images are lost.
"""

import contextlib
import errno
import logging
import platform
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.dataset import Manifest, ShardFile, open_dataset
from vit_ray.data.restart_index import IndexColumn, StoredImage
from vit_ray.data.shard_writer import SHARD_SCHEMA
from vit_ray.storage import (
    Location,
    UnavailableError,
    is_of_the_store,
    locate,
    naming,
    read_again,
    with_retries,
)

_LOG: Final = logging.getLogger(__name__)

NO_LABEL: Final = -1
"""Pads the `labels` of a batch to the width of the data set's longest label list."""
# Not all shards have the last one.
_COLUMNS: Final = [*SHARD_SCHEMA.names, "restart_index"]
_ADVICE: Final = "; run `vit-ray verify`"
_OPEN_FILES: Final = 16
_PART_BYTES: Final = 1 << 24
# Files whose labels or keys are read in parallel: these threads mostly wait for an object store.
_THREADS: Final = 16
_CHECKSUM_BYTES: Final = 4
# Errors of a disk that worked before, and may work again.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


Result = TypeVar("Result")


class EncodedRows:
    """The rows of one stored row group.

    Args:
        table: columns of a shard, of one chunk each, at least those of `SHARD_SCHEMA`.
        is_whole: the images are known to be unchanged; otherwise each is checked when it is read.

    Attributes:
        sizes: height and width of each row.
    """

    def __init__(self, table: pa.Table, is_whole: bool) -> None:
        columns = {name: table[name].chunk(0) for name in table.column_names}
        self.images, self.labels, self.keys = columns["image"], columns["labels"], columns["key"]
        self.crc32, self.is_whole = columns["crc32"].to_numpy(), is_whole
        # Lists, because reading a single number from a numpy array takes microseconds.
        heights, widths = (columns[name].to_pylist() for name in ("height", "width"))
        self.sizes = list(zip(heights, widths, strict=True))
        self._label_values = self.labels.values.to_numpy()
        self._label_offsets = self.labels.offsets.to_pylist()
        _, offsets, content = self.images.buffers()
        starts = np.frombuffer(offsets, np.int32)[self.images.offset :][: len(self.images) + 1]
        self._content, self._offsets = memoryview(content or b"").cast("B"), starts.tolist()
        index = columns.get("restart_index")
        self._indices = None if index is None else IndexColumn(index)

    def image(self, row: int) -> bytes:
        """Encoded bytes of one row.

        Raises:
            ValueError: the bytes differ from the image's checksum.
        """
        return bytes(self._image(row))

    def stored(self, row: int) -> StoredImage:
        """The image of one row as a view, with its size and restart index; errors as `image`."""
        image = self._image(row)
        size = self.sizes[row]
        index = None if self._indices is None else self._indices.of(row, size, len(image))
        return StoredImage(image, size, index)

    def labels_of(self, row: int) -> NDArray[np.int32]:
        return self._label_values[self._label_offsets[row] : self._label_offsets[row + 1]]

    def key(self, row: int) -> str:
        return str(self.keys[row].as_py())

    def _image(self, row: int) -> memoryview:
        image = self._content[self._offsets[row] : self._offsets[row + 1]]
        if not self.is_whole and zlib.crc32(image) != self.crc32[row]:
            raise ValueError("the bytes changed since conversion (checksum differs)")
        return image


def open_shard(location: Location, entry: ShardFile) -> tuple[Any, pq.FileMetaData]:
    """A shard, opened for reading, and its footer.

    Raises:
        ValueError: its size differs from the manifest's, or its columns are not those of a shard.
    """
    source = location.open()
    if source.size() != entry.bytes:
        raise ValueError(
            f"shard {location.path!r} has {source.size()} bytes and the manifest says "
            f"{entry.bytes}: it was changed or cut short after conversion{_ADVICE}"
        )
    file = pq.ParquetFile(source)
    if not pa.schema(list(file.schema_arrow)[: len(SHARD_SCHEMA)]).equals(SHARD_SCHEMA):
        raise ValueError(
            f"shard {location.path!r} has the columns {file.schema_arrow.names}; expected "
            f"{SHARD_SCHEMA.names} as `vit-ray convert` writes them{_ADVICE}"
        )
    return source, file.metadata


def _open_images(file: ShardFile) -> pq.ParquetFile:
    """A source file that a data set made in place reads its images from.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: its size or version is not the manifest's.
    """
    location, expected = locate(file.images), (file.images_bytes, file.images_version)
    info = location.info()
    if info.kind == "nothing":
        raise FileNotFoundError(errno.ENOENT, "no such file", file.images)
    if (info.size, info.version) != expected:
        raise ValueError(
            f"{file.images} has changed since the data set was made: its size and version are "
            f"{(info.size, info.version)}, not {expected}; make the data set again "
            "(convert.in_place), in another folder"
        )
    return pq.ParquetFile(location.open())


def problem_of_shard(location: Location, entry: ShardFile, *, is_read: bool = False) -> str | None:
    """Why a file is not the shard that the manifest lists; None if its size and footer match.

    Args:
        is_read: whether to compare the checksum of the whole file, too.
    """
    try:
        with naming(location.uri):
            with_retries(lambda: open_shard(location, entry), f"reading {location.path}")
            if is_read:
                crc32, source = 0, location.open()
                while part := source.read(_PART_BYTES):
                    crc32 = zlib.crc32(part, crc32)
                if crc32 != entry.crc32:
                    return "its bytes differ from the manifest's checksum"
    except (pa.ArrowException, OSError, ValueError) as error:
        if is_of_the_store(error):  # pyarrow raises other OSErrors for content it cannot parse
            raise
        if isinstance(error, FileNotFoundError):
            return "the file is missing"
        return str(error).removesuffix(_ADVICE)  # `vit-ray verify` itself prints this text
    return None


@dataclass(frozen=True)
class Cache:
    """A folder on a node's local disk for row groups, so that later epochs do not fetch them again.

    The reading tasks of a node share it. Each file is written once, under a temporary name until
    it is complete, and only while the disk keeps `free_bytes` free; files are never evicted. A file
    ends with its checksum; one that does not match is read again from the data set.
    """

    folder: str
    free_bytes: int

    def read(self, name: str) -> pa.Table | None:
        """A cached table; None if there is none, or it is damaged."""
        with contextlib.suppress(OSError, pa.ArrowException):
            content = pa.py_buffer((Path(self.folder) / name).read_bytes())
            table, stored_checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
            if zlib.crc32(table) == int.from_bytes(stored_checksum):
                return pa.ipc.open_file(table).read_all()
        return None

    def write(self, name: str, table: pa.Table) -> None:
        """Write a table if the disk has room; a full disk is a warning, not an error.

        Raises:
            ValueError: the folder cannot be made or written to.
        """
        folder = Path(self.folder)
        temporary = folder / f"{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True)  # a cleaner may have removed it
            if shutil.disk_usage(folder).free - table.nbytes < self.free_bytes:
                return
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            content = sink.getvalue()
            with temporary.open("wb") as file:
                file.write(content)
                file.write(zlib.crc32(content).to_bytes(_CHECKSUM_BYTES))
            temporary.replace(folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if error.errno not in _NO_ROOM and not isinstance(error, FileNotFoundError):
                raise ValueError(
                    f"data.cache_dir={self.folder!r} cannot be used on this node ({error}); give "
                    "a folder on a local disk, or unset it"
                ) from error
            _warn_once(self.folder, error.strerror or str(error))


@lru_cache(maxsize=64)
def _warn_once(folder: str, reason: str) -> None:
    _LOG.warning("data.cache_dir=%s: %s; reading continues without it", folder, reason)


class RowGroupReader:
    """Reads row groups by their index in the manifest, keeping some files open.

    Args:
        cache: this node's cache of row groups.
    """

    def __init__(self, manifest: Manifest, cache: Cache | None = None) -> None:
        self._manifest = manifest
        self._cache = cache
        self._file = lru_cache(_OPEN_FILES)(
            lambda index: open_shard(manifest.file_location(index), manifest.files[index])
        )
        self._images = lru_cache(_OPEN_FILES)(lambda index: _open_images(manifest.files[index]))

    def read(self, group: int) -> EncodedRows:
        """The rows of a row group as they are stored.

        Raises:
            UnavailableError: the storage does not answer.
            ValueError: the shard is missing, truncated, or differs from the manifest; columns other
                than the images are damaged; or a label is not one of the classes.
        """
        if self._cache is None:
            return EncodedRows(*self._retried(group, lambda: self._fetched(group)))
        file = self._manifest.files[int(self._manifest.file_index[group])]
        number = int(self._manifest.row_group[group])
        name = f"{Path(file.path).name}-{file.bytes}-{file.crc32:08x}-{number}"
        if (cached := self._cache.read(name)) is not None:
            return EncodedRows(cached, is_whole=True)
        table, is_whole = self._retried(group, lambda: self._fetched(group))
        if is_whole:
            self._cache.write(name, table)
        return EncodedRows(table, is_whole)

    def column(self, group: int, name: str) -> pa.Array:
        """One column of the rows that are not dropped; reads nothing else, errors as `read`."""
        table = self._retried(group, lambda: self._table(group, [name]))
        return table[name].chunk(0).take(pa.array(self._manifest.stored_rows(group)))

    def _fetched(self, group: int) -> tuple[pa.Table, bool]:
        """A row group from the shard, and whether its images are known to be unchanged."""
        index, number = int(self._manifest.file_index[group]), int(self._manifest.row_group[group])
        if column := self._manifest.files[index].images_column:
            table = self._table(group, _COLUMNS[1:])
            source = self._images(index)
            read = source.read_row_group(number, columns=[column], use_threads=False)
            images = read.column(0).combine_chunks()
            if pa.types.is_struct(images.type):
                images = pc.struct_field(images, "bytes")
            images = images.cast(pa.binary()).fill_null(b"")
            crc32 = np.array([zlib.crc32(image.as_buffer()) for image in images], np.uint32)
            is_whole = np.array_equal(crc32, table["crc32"].to_numpy())
            return table.append_column("image", images), is_whole
        try:
            return self._table(group, _COLUMNS), True
        except (OSError, pa.ArrowException) as error:
            if is_of_the_store(error) or isinstance(error, FileNotFoundError):
                raise
            # A page of images may be damaged: later each image is checked on its own.
            table = self._table(group, _COLUMNS[1:])
            unchecked = self._table(group, _COLUMNS[:1], is_checked=False)
            return table.append_column("image", unchecked["image"]), False

    def _table(self, group: int, names: list[str], *, is_checked: bool = True) -> pa.Table:
        manifest, number = self._manifest, int(self._manifest.row_group[group])
        source, metadata = self._file(int(manifest.file_index[group]))
        # A new object for each read: with `pre_buffer`, it keeps all that it has read in memory.
        file = pq.ParquetFile(
            source, metadata=metadata, pre_buffer=True, page_checksum_verification=is_checked
        )
        table = file.read_row_group(number, columns=names, use_threads=False).combine_chunks()
        expected = int(manifest.rows[group]) + len(manifest.dropped.get(group, ()))
        problem = ""
        if len(table) != expected:
            problem = f"{len(table)} rows and the manifest says {expected}"
        elif "labels" in names:
            problem = _wrong_label(table["labels"].chunk(0), manifest.num_classes)
        if problem:
            raise ValueError(
                f"shard {manifest.shard_location(group).path!r}, row group {number} has {problem}: "
                f"it was changed after conversion{_ADVICE}"
            )
        return table

    def _retried(self, group: int, read: Callable[[], Result]) -> Result:
        """The result of `read`, with retries; its errors become those that `self.read` lists."""
        location = self._manifest.shard_location(group)
        path = location.path

        def read_once() -> Result:
            try:
                with naming(location.uri):
                    return read()
            except (OSError, pa.ArrowException):
                self._file.cache_clear()
                self._images.cache_clear()
                raise

        try:
            return with_retries(
                lambda: read_again(read_once, pa.ArrowException, OSError), f"reading {path}"
            )
        except FileNotFoundError as error:
            on_node = f" on {platform.node()}" if location.is_local else ""
            raise ValueError(
                f"shard {error.filename or path!r} is missing{on_node} though the manifest lists "
                "it; restore the file, put the data set where all nodes that read see it, or "
                "convert again"
            ) from error
        except (OSError, pa.ArrowException) as error:
            if is_of_the_store(error) and not isinstance(error, PermissionError):
                raise UnavailableError(
                    f"shard {path!r} cannot be read: its storage does not answer ({error}); the "
                    "data need no repair, try again when it does"
                ) from error
            advice = "run `vit-ray verify` on the data set"
            if isinstance(error, PermissionError):
                advice = "check the credentials in the environment, and the rights that they give"
            raise ValueError(f"shard {path!r} cannot be read ({error}); {advice}") from error


def _wrong_label(labels: pa.Array, num_classes: int) -> str:
    """Description of the first label that is not a class; empty if there is none."""
    values = labels.values.to_numpy()
    wrong = np.flatnonzero((values < 0) | (values >= num_classes))
    if not len(wrong):
        return ""
    row = int(np.searchsorted(labels.offsets.to_numpy(), wrong[0], side="right")) - 1
    return f"in row {row} the label {values[wrong[0]]}, and the data set has {num_classes} classes"


def first_labels(manifest: Manifest) -> Iterator[NDArray[np.int32]]:
    """First label of every image, -1 if it has none, in the order of the rows, a file at a time.

    Raises:
        UnavailableError, ValueError: as `RowGroupReader.read`.
    """
    for labels in _column(manifest, "labels"):
        first = pc.list_slice(labels, 0, 1, return_fixed_size_list=True)  # null if there is none
        yield first.flatten().fill_null(NO_LABEL).to_numpy()


def all_first_labels(path: str) -> NDArray[np.int32]:
    """First label of every image of the data set at `path`.

    Errors are those of `open_dataset` and `first_labels`.
    """
    return np.concatenate(list(first_labels(open_dataset(path))))


def keys(manifest: Manifest) -> Iterator[list[str]]:
    """Key of every image, in the order of the rows, a file at a time; errors as `first_labels`."""
    return (column.to_pylist() for column in _column(manifest, "key"))


def _column(manifest: Manifest, name: str) -> Iterator[pa.Array]:
    groups = np.flatnonzero(manifest.rows)
    files = np.split(groups, np.flatnonzero(np.diff(manifest.file_index[groups])) + 1)

    def read_file(groups: NDArray[np.int64]) -> pa.Array:
        reader = RowGroupReader(manifest)
        return pa.concat_arrays([reader.column(group, name) for group in groups.tolist()])

    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(files), _THREADS):  # bounds the results in memory
            yield from pool.map(read_file, files[first : first + _THREADS])
