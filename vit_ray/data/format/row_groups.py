"""Row groups of a data set as encoded images, every byte of them checked against the manifest.

A row group is read in one piece, from the end of the one before it to its own, and compared with
its checksum; the footer likewise when a file is opened. Where a row group differs, its images are
told apart by their own checksums, so that one damaged image costs no other.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.format.local_cache import LocalCache
from vit_ray.data.format.manifest import Manifest, ShardFile
from vit_ray.data.format.schema import (
    INDEX_SCHEMA,
    SHARD_SCHEMA,
    checksum,
    has_index,
    is_shard_schema,
)
from vit_ray.data.format.stored_image import StoredImage
from vit_ray.data.jpeg_index.restart_index import IndexColumn
from vit_ray.retry import TransientError, is_denied, is_transient, read_again, with_retries
from vit_ray.storage import Location

Result = TypeVar("Result")

_COLUMNS: Final = ["image", "labels", "key", "height", "width", "crc32"]
_INDEX: Final = "restart_index"
_OPEN_FILES: Final = 16
_MAGIC: Final = b"PAR1"
_TAIL_BYTES: Final = 1 << 16
"""Read at once from the end of a file: the footers of most shards, in one request."""


class ChangedImageError(ValueError):
    """The bytes of an image are not those that were converted."""


@dataclass(frozen=True)
class EncodedRows:
    """The rows of one stored row group.

    Attributes:
        sizes: int32 (rows, 2), height and width of each image.
        is_whole: all of the row group's bytes were compared.
        index: of the restart markers of each image, null where it has none; None where no image
            of the data set has.
    """

    images: pa.Array
    labels: pa.Array
    keys: pa.Array
    crc32: NDArray[np.uint32]
    sizes: NDArray[np.int32]
    is_whole: bool = False
    index: pa.StructArray | None = None

    @property
    def nbytes(self) -> int:
        """Memory that the rows take."""
        columns = (self.images, self.labels, self.keys, self.crc32, self.sizes, self.index)
        return sum(int(column.nbytes) for column in columns if column is not None)

    def image(self, row: int) -> bytes:
        """Encoded bytes of one row, checked against its checksum.

        Raises:
            ChangedImageError: if they are not the bytes that were converted.
        """
        return bytes(self._content(row))

    def stored(self, row: int) -> StoredImage:
        """The image of one row as a view, with what is known of it; checked as in `image`."""
        index = None if self._indices is None else self._indices.of(row)
        return StoredImage(self._content(row), self.size(row), index)

    def size(self, row: int) -> tuple[int, int]:
        """Height and width of one row."""
        return self._sizes[row]

    def labels_of(self, row: int) -> NDArray[np.int32]:
        """Labels of one row."""
        values, offsets = self._labels
        return values[offsets[row] : offsets[row + 1]]

    def _content(self, row: int) -> memoryview:
        content, offsets = self._contents
        image = content[offsets[row] : offsets[row + 1]]
        if not self.is_whole and checksum(image) != self.crc32[row]:
            raise ChangedImageError("the bytes changed since conversion (checksum differs)")
        return image

    @cached_property
    def _contents(self) -> tuple[memoryview, list[int]]:
        """Bytes of all images, and where each begins and the last ends."""
        _, offsets, content = self.images.buffers()
        found = np.frombuffer(offsets, np.int32)[self.images.offset :][: len(self.images) + 1]
        return memoryview(content or b"").cast("B"), found.tolist()

    @cached_property
    def _labels(self) -> tuple[NDArray[np.int32], list[int]]:
        return self.labels.values.to_numpy(), self.labels.offsets.to_pylist()

    @cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        return list(map(tuple, self.sizes.tolist()))

    @cached_property
    def _indices(self) -> IndexColumn | None:
        lengths = np.diff(self._contents[1])
        return None if self.index is None else IndexColumn(self.index, self.sizes, lengths)

    def key(self, row: int) -> str:
        """Key of one row."""
        return str(self.keys[row].as_py())


class _Content:
    """A stretch of a file that pyarrow reads as if it were the file."""

    closed = False

    def __init__(self, start: int, content: pa.Buffer, file_bytes: int) -> None:
        self._start, self._content, self._file_bytes = start, content, file_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._file_bytes)[whence]
        return self._position

    def read(self, count: int) -> pa.Buffer:
        offset = self._position - self._start
        if not 0 <= offset <= offset + count <= self._content.size:
            raise pa.ArrowInvalid("a column lies outside of its row group")
        self._position += count
        return self._content.slice(offset, count)

    def flush(self) -> None:
        """Nothing is written."""

    def close(self) -> None:
        self.closed = True


class ShardReader:
    """One open shard: its footer, and row groups in one piece.

    Raises:
        ValueError: the file is shorter, longer or other than the manifest says.
    """

    def __init__(self, location: Location, entry: ShardFile, footer: bytes | None = None) -> None:
        self._location = location
        self._bytes = entry.bytes
        self.footer = footer or self._checked_footer(entry)
        self.metadata = pq.read_metadata(pa.BufferReader(_MAGIC + self.footer))
        self._footer_start = self._bytes - len(self.footer)
        columns = self.metadata.schema.to_arrow_schema()
        self.names = [*_COLUMNS, *([_INDEX] if has_index(columns) else [])]
        if not is_shard_schema(columns):
            raise ValueError(
                f"shard {location.path!r} has a foreign schema ({self.metadata.schema.names}); "
                f"expected the columns {SHARD_SCHEMA.names} as jobs/convert.py writes them."
            )

    def content(self, row_group: int) -> pa.Buffer:
        """All bytes from the end of the row group before to the end of this one."""
        if row_group >= self.metadata.num_row_groups:
            raise pa.ArrowInvalid(f"it has no row group {row_group}")
        start, stop = self._starts[row_group : row_group + 2]
        if not 0 <= start < stop <= self._footer_start:
            raise pa.ArrowInvalid(f"its footer gives row group {row_group} no place in the file")
        self._source.seek(start)
        content = self._source.read_buffer(stop - start)
        if content.size < stop - start:
            raise TransientError(f"{self._location.path}: row group {row_group} is cut short")
        return content

    def columns(
        self, row_group: int, names: list[str], content: pa.Buffer | None = None
    ) -> dict[str, pa.Array]:
        """Columns of a row group, each page compared with its checksum but those of images.

        Args:
            content: of the row group, where it was read already.
        """
        if content is None:
            source = self._source
        else:
            window = _Content(self._starts[row_group], content, self._bytes)
            source = pa.PythonFile(window, mode="r")
        table = self._parquet(source, is_checked="image" not in names).read_row_group(
            row_group, columns=names, use_threads=False
        )
        return {name: _one_chunk(table[name]) for name in names}

    def close(self) -> None:
        """Close the file."""
        if "_source" in vars(self):
            self._source.close()

    @cached_property
    def _source(self) -> Any:
        source = self._location.filesystem.open_input_file(self._location.path)
        if source.size() != self._bytes:
            raise ValueError(
                f"shard {self._location.path!r} has {source.size()} bytes and the manifest says "
                f"{self._bytes}: it was changed or cut short after conversion; run jobs/verify.py."
            )
        return source

    def _parquet(self, source: Any, *, is_checked: bool) -> pq.ParquetFile:
        return pq.ParquetFile(source, metadata=self.metadata, page_checksum_verification=is_checked)

    def _checked_footer(self, entry: ShardFile) -> bytes:
        return read_again(lambda: self._footer_as_written(entry), pa.ArrowInvalid)

    def _footer_as_written(self, entry: ShardFile) -> bytes:
        footer = self._read_footer()
        if checksum(footer) != entry.footer_crc32:
            raise pa.ArrowInvalid("its footer differs from the manifest's checksum")
        return footer

    def _read_footer(self) -> bytes:
        """Everything behind the last row group."""
        tail = self._tail(min(_TAIL_BYTES, self._bytes))
        if tail[-4:] != _MAGIC or len(tail) < 12:
            raise pa.ArrowInvalid("it does not end as a parquet file does")
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if length > self._bytes:
            raise pa.ArrowInvalid("its footer is longer than the file")
        return tail[-length:] if length <= len(tail) else self._tail(length)

    def _tail(self, length: int) -> bytes:
        self._source.seek(self._bytes - length)
        tail = bytes(self._source.read(length))
        if len(tail) < length:
            raise TransientError(f"{self._location.path}: the footer is cut short")
        return tail

    @cached_property
    def _starts(self) -> list[int]:
        """Where the bytes of each row group start, and the footer; the first has the magic."""
        groups = [self.metadata.row_group(i) for i in range(self.metadata.num_row_groups)]
        firsts = [group.column(0).data_page_offset for group in groups]
        return [0, *firsts[1:], self._footer_start]


def problem_of_shard(location: Location, entry: ShardFile) -> str | None:
    """Why a file is not the shard that was written, by its size and its footer; None if it is."""
    try:
        with_retries(lambda: ShardReader(location, entry).close(), f"reading {location.path}")
    except (pa.ArrowException, OSError, ValueError) as error:
        # What pyarrow cannot parse may be an OSError; storage that is away is none of the shard's.
        if isinstance(error, OSError) and (is_transient(error) or is_denied(error)):
            raise
        return "the file is missing" if isinstance(error, FileNotFoundError) else str(error)
    return None


class RowGroupReader:
    """Reads row groups by their index in the manifest, keeping some files open.

    Args:
        cache: of this node, where row groups and footers with checksums are kept and looked for.
    """

    def __init__(self, manifest: Manifest, cache: LocalCache | None = None) -> None:
        self._manifest = manifest
        self._cache = cache
        self._open: OrderedDict[int, ShardReader] = OrderedDict()

    def check_footer(self, group: int) -> None:
        """Open the shard of a row group.

        Raises:
            ValueError: it is missing, or its size or footer is not what the manifest says.
        """
        self._retried(group, lambda _: None)

    def read(self, group: int) -> EncodedRows:
        """The rows of a row group as they are stored.

        Raises:
            ValueError: if the shard is missing, truncated, or not what the manifest says; if more
                than the bytes of some images differ; or if a label is not one of the classes.
        """
        rows = self._retried(group, lambda shard: self._read_whole(group, shard))
        self._check_labels(group, rows)
        return rows

    def first_labels(self, group: int) -> NDArray[np.int32]:
        """The first label of each image of a row group that counts, -1 where it has none.

        Reads no other column.

        Raises:
            ValueError: as `read`.
        """
        number = int(self._manifest.row_group[group])
        labels = self._retried(group, lambda shard: shard.columns(number, ["labels"])["labels"])
        self._check_count(group, len(labels))
        if len(_foreign_labels(labels, self._manifest.num_classes)):
            self.read(group)  # which says whose they are
        offsets = labels.offsets.to_numpy()
        first = np.full(len(labels), -1, np.int32)
        has_any = np.diff(offsets) > 0
        first[has_any] = labels.values.to_numpy()[offsets[:-1][has_any]]
        return np.delete(first, self._manifest.dropped.get(group, []))

    def keys(self, group: int) -> list[str]:
        """The key of each image of a row group that counts; reads no other column.

        Raises:
            ValueError: as `read`.
        """
        number = int(self._manifest.row_group[group])
        found = self._retried(group, lambda shard: shard.columns(number, ["key"])["key"])
        self._check_count(group, len(found))
        dropped = set(self._manifest.dropped.get(group, np.empty(0)).tolist())
        return [key for row, key in enumerate(found.to_pylist()) if row not in dropped]

    def original_crc32(self, group: int) -> NDArray[np.uint32] | None:
        """The checksum that each file of a stored row group had before it was rewritten.

        Reads no other column; None where the shard has no restart indices.

        Raises:
            ValueError: as `read`.
        """
        number, name = int(self._manifest.row_group[group]), INDEX_SCHEMA.names[0]

        def read(shard: ShardReader) -> NDArray[np.uint32] | None:
            if _INDEX not in shard.names:
                return None
            return np.asarray(shard.columns(number, [name])[name])

        return self._retried(group, read)

    def _read_whole(self, group: int, shard: ShardReader) -> EncodedRows:
        number = int(self._manifest.row_group[group])
        expected = int(self._manifest.crc32[group])
        index = int(self._manifest.file_index[group])
        name = f"{index}-{number}"
        content = self._kept(index, name, expected)
        if content is None:
            content = shard.content(number)
            if checksum(content) != expected:
                # Once more: it may have been changed on its way.
                content = shard.content(number)
                if checksum(content) != expected:
                    return self._read_damaged(group, shard, content)
            self._keep(name, content)
        columns = shard.columns(number, shard.names, content)
        self._check_count(group, len(columns["key"]))
        return _rows_of(columns, is_whole=True)

    def _kept(self, index: int, name: str, crc32: int) -> pa.Buffer | None:
        """Of the file of an index, of which it is a part."""
        if self._cache is None:
            return None
        file_bytes = self._manifest.files[index].bytes
        return self._cache.read(f"{self._manifest.fingerprint}-{name}", crc32, file_bytes)

    def _keep(self, name: str, content: pa.Buffer | bytes) -> None:
        """Of what has just been compared with its checksum."""
        if self._cache is not None:
            self._cache.write(f"{self._manifest.fingerprint}-{name}", content)

    def _read_damaged(self, group: int, shard: ShardReader, content: pa.Buffer) -> EncodedRows:
        """The rows, where nothing but images changed."""
        number = int(self._manifest.row_group[group])
        known = shard.columns(number, shard.names[1:], content)
        self._check_count(group, len(known["key"]))
        rows = _rows_of({**known, **shard.columns(number, ["image"], content)}, is_whole=False)
        found = [checksum(image.as_buffer()) for image in rows.images]
        if len(found) != len(rows.crc32) or np.array_equal(found, rows.crc32):
            raise pa.ArrowInvalid(
                f"row group {number} differs from its checksum by more than the bytes of images"
            )
        return rows

    def _check_count(self, group: int, found: int) -> None:
        expected = int(self._manifest.rows[group]) + len(self._manifest.dropped.get(group, ()))
        if found != expected:
            raise ValueError(
                f"shard {self._manifest.shard_location(group).path!r} has {found} rows in row "
                f"group {int(self._manifest.row_group[group])} and the manifest says {expected}: "
                f"it was changed after conversion; run jobs/verify.py."
            )

    def _check_labels(self, group: int, rows: EncodedRows) -> None:
        manifest = self._manifest
        foreign = _foreign_labels(rows.labels, manifest.num_classes)
        if not len(foreign):
            return
        row = int(np.searchsorted(rows.labels.offsets.to_numpy(), foreign[0], side="right")) - 1
        raise ValueError(
            f"shard {manifest.shard_location(group).path!r}, row {row} of row group "
            f"{int(manifest.row_group[group])} ({rows.key(row)!r}) has the label "
            f"{rows.labels.values[foreign[0]]}, "
            f"and the data set has {manifest.num_classes} classes, 0 to "
            f"{manifest.num_classes - 1}; convert again."
        )

    def _retried(self, group: int, read: Callable[[ShardReader], Result]) -> Result:
        location = self._manifest.shard_location(group)
        with _explained(location):
            return with_retries(
                lambda: self._read_once(group, location, read), f"reading {location.path}"
            )

    def _read_once(
        self, group: int, location: Location, read: Callable[[ShardReader], Result]
    ) -> Result:
        index = int(self._manifest.file_index[group])
        try:
            return read(self._shard(index, location))
        except OSError:
            self._open.pop(index, None)
            raise

    def _open_shard(self, index: int, location: Location) -> ShardReader:
        entry, name = self._manifest.files[index], f"{index}-footer"
        kept = self._kept(index, name, entry.footer_crc32)
        shard = ShardReader(location, entry, None if kept is None else bytes(kept))
        if kept is None:
            self._keep(name, shard.footer)
        return shard

    def _shard(self, index: int, location: Location) -> ShardReader:
        if index not in self._open:
            self._open[index] = self._open_shard(index, location)
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(index)
        return self._open[index]


@contextlib.contextmanager
def _explained(location: Location) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(
            f"shard {location.path!r} is missing though the manifest lists it; "
            f"restore the file or convert again."
        ) from error
    except OSError as error:
        if is_transient(error):
            raise TransientError(
                f"shard {location.path!r} cannot be read: its storage does not answer ({error}); "
                f"the data need no repair, try again when it does."
            ) from error
        raise ValueError(_unreadable(location, error)) from error
    except pa.ArrowException as error:
        raise ValueError(_unreadable(location, error)) from error


def _unreadable(location: Location, error: Exception) -> str:
    advice = "run jobs/verify.py on the data set"
    if is_denied(error):
        advice = "check the credentials in the environment, and the rights that they give"
    return f"shard {location.path!r} cannot be read ({error}); {advice}."


def _foreign_labels(labels: pa.Array, num_classes: int) -> NDArray[np.intp]:
    """Where, among the labels of all rows, those stand that are no class."""
    values = labels.values.to_numpy()
    return np.flatnonzero((values < 0) | (values >= num_classes))


def _rows_of(columns: dict[str, pa.Array], *, is_whole: bool) -> EncodedRows:
    crc32 = columns["crc32"].to_numpy()
    sizes = np.stack([columns["height"].to_numpy(), columns["width"].to_numpy()], axis=1)
    return EncodedRows(
        columns["image"], columns["labels"], columns["key"], crc32, sizes, is_whole,
        columns.get(_INDEX),
    )  # fmt: skip


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
