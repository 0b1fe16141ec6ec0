"""The shards of a data set: their columns, and their row groups as encoded images.

A shard is a parquet file with a row per image: its encoded bytes, the labels, a key that names the
image in its source, its size in pixels, and a checksum. Where JPEG files were given restart markers
(`convert.index_jpeg`), a column follows: where the parts lie that a crop is made of
(`restart_index`), null for what was left as it came. Columns of text that a source has with its
images (`convert.columns`) follow; training does not decode them.

A row group is read in one piece, and each page is compared with its checksum. Where one differs,
each image is compared with its own, so that one damaged image costs no other.
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
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.dataset import ImageFile, Manifest, ShardFile, checksum, open_dataset
from vit_ray.data.restart_index import IndexColumn, StoredImage
from vit_ray.data.shard_writer import INDEX_SCHEMA, SHARD_SCHEMA, has_index, shard_schema
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
_COLUMNS: Final = ["image", "labels", "key", "height", "width", "crc32"]
_INDEX: Final = "restart_index"
_ADVICE: Final = "; run `vit-ray verify`"
_OPEN_FILES: Final = 16
_PART_BYTES: Final = 1 << 24
# Files whose labels or keys are read at a time: mostly they wait for an object store.
_THREADS: Final = 16
_CHECKSUM_BYTES: Final = 4
# Errors of a disk that worked before, and may work again.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class ChangedImageError(ValueError):
    """The bytes of an image are not those that were converted."""


class EncodedRows:
    """The rows of one stored row group.

    Args:
        table: columns of a shard, of one chunk each, at least those of `_COLUMNS`.
        is_whole: all of the row group's bytes were compared.
    """

    def __init__(self, table: pa.Table, is_whole: bool) -> None:
        columns = {name: table[name].chunk(0) for name in table.column_names}
        self.images, self.labels, self.keys = columns["image"], columns["labels"], columns["key"]
        self.crc32, self.is_whole = columns["crc32"].to_numpy(), is_whole
        self.nbytes = int(table.nbytes)
        # Lists, and one look at all rows: numpy takes microseconds for a number.
        heights, widths = (columns[name].to_pylist() for name in ("height", "width"))
        self._sizes = list(zip(heights, widths, strict=True))
        self._label_values = self.labels.values.to_numpy()
        self._label_offsets = self.labels.offsets.to_pylist()
        _, offsets, content = self.images.buffers()
        starts = np.frombuffer(offsets, np.int32)[self.images.offset :][: len(self.images) + 1]
        self._content, self._offsets = memoryview(content or b"").cast("B"), starts.tolist()
        self._index = columns.get(_INDEX)

    def image(self, row: int) -> bytes:
        """Encoded bytes of one row, checked against its checksum.

        Raises:
            ChangedImageError: if they are not the bytes that were converted.
        """
        return bytes(self._image(row))

    def stored(self, row: int) -> StoredImage:
        """The image of one row as a view, with what is known of it; checked as in `image`."""
        index = None if self._indices is None else self._indices.of(row)
        return StoredImage(self._image(row), self.size(row), index)

    def size(self, row: int) -> tuple[int, int]:
        """Height and width of one row."""
        return self._sizes[row]

    def labels_of(self, row: int) -> NDArray[np.int32]:
        return self._label_values[self._label_offsets[row] : self._label_offsets[row + 1]]

    def key(self, row: int) -> str:
        return str(self.keys[row].as_py())

    def _image(self, row: int) -> memoryview:
        image = self._content[self._offsets[row] : self._offsets[row + 1]]
        if not self.is_whole and checksum(image) != self.crc32[row]:
            raise ChangedImageError("the bytes changed since conversion (checksum differs)")
        return image

    @cached_property
    def _indices(self) -> IndexColumn | None:
        if self._index is None:  # no image of the data set has restart markers of ours
            return None
        return IndexColumn(self._index, np.array(self._sizes), np.diff(self._offsets))


def open_shard(location: Location, entry: ShardFile) -> tuple[Any, pq.FileMetaData]:
    """A file of a data set, and its footer.

    Raises:
        ValueError: it is shorter, longer or other than the manifest says.
    """
    source = location.open()
    if source.size() != entry.bytes:
        raise ValueError(
            f"shard {location.path!r} has {source.size()} bytes and the manifest says "
            f"{entry.bytes}: it was changed or cut short after conversion{_ADVICE}"
        )
    file = pq.ParquetFile(source)
    schema = file.schema_arrow
    is_indexed = has_index(schema)
    text_columns = schema.names[len(SHARD_SCHEMA) + is_indexed * len(INDEX_SCHEMA) :]
    if not schema.equals(shard_schema(text_columns, is_indexed=is_indexed)):
        raise ValueError(
            f"shard {location.path!r} has a foreign schema ({schema.names}); expected "
            f"the columns {SHARD_SCHEMA.names} as `vit-ray convert` writes them"
        )
    return source, file.metadata


def _open_images(file: ImageFile) -> pq.ParquetFile:
    """A file of others, only ever read.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: its size or version is not the manifest's.
    """
    location = locate(file.path)
    found = location.info()
    if found.kind == "nothing":
        raise FileNotFoundError(errno.ENOENT, "no such file", file.path)
    if (found.size, found.version) != (file.bytes, file.version):
        raise ValueError(
            f"{file.path} has changed since the data set was made: its size and version are "
            f"{(found.size, found.version)}, not {(file.bytes, file.version)}; make the data "
            "set again (convert.in_place), in another folder"
        )
    return pq.ParquetFile(location.open())


def problem_of_shard(location: Location, entry: ShardFile, *, is_read: bool = False) -> str | None:
    """Why a file is not the shard that was written, by its size and its footer; None if it is.

    Args:
        is_read: all of its bytes are compared with their checksum.
    """
    try:
        with naming(location.uri):
            with_retries(lambda: open_shard(location, entry), f"reading {location.path}")
            if is_read:
                crc32, source = 0, location.open()
                while part := source.read(_PART_BYTES):
                    crc32 = checksum(part, crc32)
                if crc32 != entry.crc32:
                    return "its bytes differ from the manifest's checksum"
    except (pa.ArrowException, OSError, ValueError) as error:
        if is_of_the_store(error):  # other OSErrors are of what pyarrow cannot parse
            raise
        is_missing = isinstance(error, FileNotFoundError)
        # Without the advice: it is what that command says.
        return "the file is missing" if is_missing else str(error).removesuffix(_ADVICE)
    return None


@dataclass(frozen=True)
class Cache:
    """A folder on a node's own disk for row groups, so that later epochs do not fetch them again.

    Reading tasks of a node share it. A file is written once, under another name until it is whole,
    as long as the disk keeps `free_bytes` for others; nothing is ever evicted. Its last bytes are
    a checksum, and a file that differs from it is as if it were not there.
    """

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


class RowGroupReader:
    """Reads row groups by their index in the manifest, keeping some files open.

    Args:
        cache: of this node, where row groups are kept and looked for.
    """

    def __init__(self, manifest: Manifest, cache: Cache | None = None) -> None:
        self._manifest = manifest
        self._cache = cache
        self._file = lru_cache(_OPEN_FILES)(
            lambda index: open_shard(manifest.file_location(index), manifest.files[index])
        )
        self._images = lru_cache(_OPEN_FILES)(_open_images)

    def read(self, group: int) -> EncodedRows:
        """The rows of a row group as they are stored.

        Raises:
            ValueError: if the shard is missing, truncated, or not what the manifest says; if more
                than the bytes of some images differ; or if a label is not one of the classes.
        """
        manifest, index = self._manifest, int(self._manifest.file_index[group])
        name = f"{manifest.shards_digest}-{index}-{int(manifest.row_group[group])}"
        table = None if self._cache is None else self._cache.read(name)
        is_whole = table is not None
        if table is None:
            table, is_whole = self._retried(group, lambda: self._fetched(group))
            if is_whole and self._cache is not None:
                self._cache.write(name, table)
        rows = EncodedRows(table, is_whole)
        if len(foreign := _foreign_labels(rows.labels, manifest.num_classes)):
            row = int(np.searchsorted(rows.labels.offsets.to_numpy(), foreign[0], side="right")) - 1
            raise ValueError(
                f"shard {manifest.shard_location(group).path!r}, row {row} of row group "
                f"{int(manifest.row_group[group])} ({rows.key(row)!r}) has the label "
                f"{rows.labels.values[foreign[0]]}, and the data set has {manifest.num_classes} "
                f"classes, 0 to {manifest.num_classes - 1}; convert again"
            )
        return rows

    def first_labels(self, group: int) -> NDArray[np.int32]:
        """The first label of each image of a row group that counts, -1 where it has none.

        Reads no other column.

        Raises:
            ValueError: as `read`.
        """
        labels = self.column(group, "labels")
        if len(_foreign_labels(labels, self._manifest.num_classes)):
            self.read(group)  # which says whose they are
        offsets = labels.offsets.to_numpy()
        first = np.full(len(labels), -1, np.int32)
        has_any = np.diff(offsets) > 0
        first[has_any] = labels.values.to_numpy()[offsets[:-1][has_any]]
        return np.delete(first, self._manifest.dropped.get(group, []))

    def keys(self, group: int) -> list[str]:
        """The keys of the images of a row group that count; reads no other column.

        Raises:
            ValueError: as `read`.
        """
        keys = self.column(group, "key").to_numpy(zero_copy_only=False)
        return np.delete(keys, self._manifest.dropped.get(group, [])).tolist()

    def column(self, group: int, name: str) -> pa.Array:
        """A column of all stored rows of a row group; reads no other."""
        table, _ = self._retried(group, lambda: (self._table(group, [name]), True))
        return table[name].chunk(0)

    def _fetched(self, group: int) -> tuple[pa.Table, bool]:
        """A row group, and whether its images were compared with checksums, too."""
        file = self._manifest.files[int(self._manifest.file_index[group])]
        if file.images is not None:
            table = self._table(group, _COLUMNS[1:])
            images = (
                self._images(file.images)
                .read_row_group(
                    int(self._manifest.row_group[group]),
                    columns=[file.images.column],
                    use_threads=False,
                )
                .column(0)
                .combine_chunks()
            )
            if pa.types.is_struct(images.type):
                images = pc.struct_field(images, "bytes")
            images = images.cast(pa.binary()).fill_null(b"")
            crc32 = np.array([checksum(image.as_buffer()) for image in images], np.uint32)
            is_whole = np.array_equal(crc32, table["crc32"].to_numpy())
            return table.append_column("image", images), is_whole
        try:
            return self._table(group, _COLUMNS), True
        except (OSError, pa.ArrowException) as error:
            if is_of_the_store(error) or isinstance(error, FileNotFoundError):
                raise
            # A page of images may be damaged: each is compared with its own checksum.
            table = self._table(group, _COLUMNS[1:])
            unchecked = self._table(group, _COLUMNS[:1], is_checked=False)
            return table.append_column("image", unchecked["image"]), False

    def _table(self, group: int, names: list[str], *, is_checked: bool = True) -> pa.Table:
        source, metadata = self._file(int(self._manifest.file_index[group]))
        # A new one for each read: it keeps what it has read in one piece until the next.
        file = pq.ParquetFile(
            source, metadata=metadata, pre_buffer=True, page_checksum_verification=True
        )
        names = [*names, *([_INDEX] if "crc32" in names and has_index(file.schema_arrow) else [])]
        if not is_checked:
            index = int(self._manifest.file_index[group])
            file = pq.ParquetFile(self._manifest.file_location(index).open())
        number = int(self._manifest.row_group[group])
        table = file.read_row_group(number, columns=names, use_threads=False)
        return table.combine_chunks()

    def _retried(
        self, group: int, read: Callable[[], tuple[pa.Table, bool]]
    ) -> tuple[pa.Table, bool]:
        """What `read` gives, tried again where that may help.

        Raises:
            UnavailableError: the storage does not answer.
            ValueError: the shard is missing, cannot be read, or has other rows than the manifest
                says.
        """
        manifest, location = self._manifest, self._manifest.shard_location(group)
        path = location.path

        def read_once() -> tuple[pa.Table, bool]:
            try:
                with naming(location.uri):
                    return read()
            except (OSError, pa.ArrowException):
                self._file.cache_clear()
                self._images.cache_clear()
                raise

        try:
            table, is_whole = with_retries(
                lambda: read_again(read_once, pa.ArrowException, OSError), f"reading {path}"
            )
        except FileNotFoundError as error:
            there = f" on {platform.node()}" if location.is_local else ""
            raise ValueError(
                f"shard {error.filename or path!r} is missing{there} though the manifest lists it; "
                "restore the file, put the data set where all nodes that read see it, or convert "
                "again"
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
        expected = int(manifest.rows[group]) + len(manifest.dropped.get(group, ()))
        if len(table) != expected:
            raise ValueError(
                f"shard {path!r} has {len(table)} rows in row group "
                f"{int(manifest.row_group[group])} and the manifest says {expected}: "
                f"it was changed after conversion{_ADVICE}"
            )
        return table, is_whole


def _foreign_labels(labels: pa.Array, num_classes: int) -> NDArray[np.intp]:
    """Indices, in the labels of all rows, of those that are not a class."""
    values = labels.values.to_numpy()
    return np.flatnonzero((values < 0) | (values >= num_classes))


def first_labels(manifest: Manifest) -> Iterator[NDArray[np.int32]]:
    """First label of every image, in the order of the rows, a file at a time.

    Whoever stops asking ends the reading.

    Raises:
        ValueError: a shard is missing, truncated, or not what the manifest says.
    """
    yield from map(np.concatenate, _by_file(manifest, RowGroupReader.first_labels))


def all_first_labels(path: str) -> NDArray[np.int32]:
    """First label of every image of the data set at `path`; errors as there and of opening it."""
    return np.concatenate(list(first_labels(open_dataset(path))))


def keys(manifest: Manifest) -> Iterator[list[str]]:
    """Key of every image, in the order of the rows, a file at a time; errors as `first_labels`."""
    for groups in _by_file(manifest, RowGroupReader.keys):
        yield [key for group in groups for key in group]


def _by_file(manifest: Manifest, read: Callable[[RowGroupReader, int], Any]) -> Iterator[list[Any]]:
    groups = np.flatnonzero(manifest.rows)
    runs = np.split(groups, np.flatnonzero(np.diff(manifest.file_index[groups])) + 1)

    def of_file(groups: NDArray[np.int64]) -> list[Any]:
        reader = RowGroupReader(manifest)
        return [read(reader, int(group)) for group in groups]

    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(runs), _THREADS):  # no more in memory
            yield from pool.map(of_file, runs[first : first + _THREADS])
