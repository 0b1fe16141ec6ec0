"""Row groups of a data set as encoded images, every byte of them checked against the manifest.

A row group is read in one piece, from the end of the one before it to its own, and compared with
its checksum; the footer likewise when a file is opened. Where a row group differs, each image is
compared with its own checksum, so that one damaged image costs no other.
"""

import errno
import io
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.cache import LocalCache
from vit_ray.data.dataset import ImageFile, Manifest, ShardFile, checksum, open_dataset
from vit_ray.data.restart_index import IndexColumn, StoredImage
from vit_ray.storage import (
    Location,
    UnavailableError,
    is_of_the_store,
    locate,
    naming,
    read_again,
    with_retries,
)

NO_LABEL: Final = -1
"""Pads the `labels` of a batch to the width of the data set's longest label list."""

SHARD_SCHEMA: Final = pa.schema(
    [
        pa.field("image", pa.binary(), nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("crc32", pa.uint32(), nullable=False),
    ]
)


INDEX_SCHEMA: Final = pa.schema(
    [
        pa.field("original_crc32", pa.uint32(), nullable=False),
        pa.field(
            "restart_index",
            pa.struct(
                [
                    pa.field("front", pa.uint32(), nullable=False),
                    pa.field("tables_at", pa.uint32(), nullable=False),
                    pa.field("size_at", pa.uint32(), nullable=False),
                    pa.field("unit_height", pa.uint32(), nullable=False),
                    pa.field("unit_width", pa.uint32(), nullable=False),
                    pa.field("columns", pa.uint32(), nullable=False),
                    pa.field("offsets", pa.list_(pa.uint32()), nullable=False),
                ]
            ),
        ),
    ]
)


RESERVED_NAMES: Final = (*SHARD_SCHEMA.names, *INDEX_SCHEMA.names)
"""What no column of text may be called."""


def shard_schema(text_columns: Sequence[str], *, is_indexed: bool = False) -> pa.Schema:
    """The schema of shards with text columns after the common ones."""
    index = INDEX_SCHEMA if is_indexed else ()
    return pa.schema([*SHARD_SCHEMA, *index, *((name, pa.string()) for name in text_columns)])


def is_shard_schema(schema: pa.Schema) -> bool:
    """Whether it is a valid schema of a shard, with any text columns."""
    names, fixed = schema.names, len(SHARD_SCHEMA)
    is_indexed = has_index(schema)
    text_columns = names[fixed + is_indexed * len(INDEX_SCHEMA) :]
    return bool(schema.equals(shard_schema(text_columns, is_indexed=is_indexed)))


def has_index(schema: pa.Schema) -> bool:
    """Whether its images may have a restart index."""
    fixed = len(SHARD_SCHEMA)
    names = schema.names[fixed : fixed + len(INDEX_SCHEMA)]
    return bool(names == INDEX_SCHEMA.names)


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
        values, offsets = self._labels
        return values[offsets[row] : offsets[row + 1]]

    def key(self, row: int) -> str:
        return str(self.keys[row].as_py())

    def _content(self, row: int) -> memoryview:
        content, offsets = self._contents
        image = content[offsets[row] : offsets[row + 1]]
        if not self.is_whole and checksum(image) != self.crc32[row]:
            raise ChangedImageError("the bytes changed since conversion (checksum differs)")
        return image

    # Lists, and one look at all rows: numpy takes microseconds for a number.

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


class _Content(io.RawIOBase):
    """A stretch of a file that pyarrow reads as if it were the file."""

    def __init__(self, start: int, content: pa.Buffer, file_bytes: int) -> None:
        self._start, self._content, self._file_bytes = start, content, file_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._file_bytes)[whence]
        return self._position

    def read(self, count: int = -1) -> Any:
        offset = self._position - self._start
        if not 0 <= offset <= offset + count <= self._content.size:
            raise pa.ArrowInvalid("a column lies outside of its row group")
        self._position += count
        return self._content.slice(offset, count)


class ShardReader:
    """One shard: its footer, and row groups in one piece.

    Args:
        footer: of the file, compared with its checksum, where it is at hand.

    Raises:
        ValueError: the file is shorter, longer or other than the manifest says.
    """

    def __init__(self, location: Location, entry: ShardFile, footer: bytes | None = None) -> None:
        self._location = location
        self._bytes, self._footer_crc32 = entry.bytes, entry.footer_crc32
        self.footer = footer or read_again(self._read_footer, pa.ArrowInvalid)
        self.metadata = pq.read_metadata(pa.BufferReader(_MAGIC + self.footer))
        footer_start = self._bytes - len(self.footer)
        # Where the bytes of each row group start, and the footer; the first has the magic.
        groups = [self.metadata.row_group(i) for i in range(self.metadata.num_row_groups)]
        self._starts = [0, *(g.column(0).data_page_offset for g in groups[1:]), footer_start]
        columns = self.metadata.schema.to_arrow_schema()
        self.names = [*_COLUMNS, *([_INDEX] if has_index(columns) else [])]
        if not is_shard_schema(columns):
            raise ValueError(
                f"shard {location.path!r} has a foreign schema ({self.metadata.schema.names}); "
                f"expected the columns {SHARD_SCHEMA.names} as `vit-ray convert` writes them"
            )

    def content(self, row_group: int) -> pa.Buffer:
        """All bytes from the end of the row group before to the end of this one."""
        if row_group >= self.metadata.num_row_groups:
            raise pa.ArrowInvalid(f"it has no row group {row_group}")
        start, stop = self._starts[row_group : row_group + 2]
        if not 0 <= start < stop <= self._starts[-1]:
            raise pa.ArrowInvalid(f"its footer gives row group {row_group} no place in the file")
        return self._read(start, stop - start)

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
        file = pq.ParquetFile(
            source, metadata=self.metadata, page_checksum_verification="image" not in names
        )
        return _columns_of(file, row_group, names)

    @cached_property
    def _source(self) -> Any:
        source = self._location.open()
        if source.size() != self._bytes:
            raise ValueError(
                f"shard {self._location.path!r} has {source.size()} bytes and the manifest says "
                f"{self._bytes}: it was changed or cut short after conversion; run `vit-ray verify`"
            )
        return source

    def _read(self, start: int, count: int) -> pa.Buffer:
        self._source.seek(start)
        content = self._source.read_buffer(count)
        if content.size < count:
            what = f"{content.size} of {count} bytes from {start} on have come"
            raise OSError(errno.EIO, what, self._location.uri)
        return content

    def _read_footer(self) -> bytes:
        """Everything behind the last row group."""
        count = min(_TAIL_BYTES, self._bytes)
        tail = bytes(self._read(self._bytes - count, count))
        if tail[-4:] != _MAGIC or len(tail) < 12:
            raise pa.ArrowInvalid("it does not end as a parquet file does")
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if length > self._bytes:
            raise pa.ArrowInvalid("its footer is longer than the file")
        footer = tail[-length:]
        if length > count:
            footer = bytes(self._read(self._bytes - length, length))
        if checksum(footer) != self._footer_crc32:
            raise pa.ArrowInvalid("its footer differs from the manifest's checksum")
        return footer


class _ImagesInPlace:
    """The images of a shard in a file of others, which is only ever read.

    Raises:
        ValueError: it is another one than when the data set was made.
    """

    def __init__(self, file: ImageFile) -> None:
        location, self._column = locate(file.path), file.column
        source = location.open()
        found, expected = (source.size(), location.info().version), (file.bytes, file.version)
        if found != expected:
            raise ValueError(
                f"{file.path} has changed since the data set was made: its size and version are "
                f"{found}, not {expected}; make the data set again (convert.in_place), in another "
                "folder"
            )
        self._file = pq.ParquetFile(source)

    def images(self, row_group: int) -> pa.Array:
        """Encoded images of a row group: binary, empty where there is none."""
        table = self._file.read_row_group(row_group, columns=[self._column], use_threads=False)
        column = table.column(0).combine_chunks()
        if pa.types.is_struct(column.type):
            column = pc.struct_field(column, "bytes")
        return column.cast(pa.binary()).fill_null(b"")


def _columns_of(file: pq.ParquetFile, row_group: int, names: list[str]) -> dict[str, pa.Array]:
    table = file.read_row_group(row_group, columns=names, use_threads=False).combine_chunks()
    return {name: table[name].chunk(0) for name in names}


def problem_of_shard(location: Location, entry: ShardFile) -> str | None:
    """Why a file is not the shard that was written, by its size and its footer; None if it is."""
    try:
        with naming(location.uri):
            with_retries(lambda: ShardReader(location, entry), f"reading {location.path}")
    except (pa.ArrowException, OSError, ValueError) as error:
        if is_of_the_store(error):  # other OSErrors are of what pyarrow cannot parse
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

        def opened(index: int) -> ShardReader:
            location, entry = manifest.file_location(index), manifest.files[index]
            if cache is None:
                return ShardReader(location, entry)
            name = f"{manifest.shards_digest}-{index}-footer"
            kept = cache.read(name, entry.footer_crc32, entry.bytes)
            shard = ShardReader(location, entry, None if kept is None else bytes(kept))
            if kept is None:
                cache.write(name, shard.footer)
            return shard

        self._shard = lru_cache(_OPEN_FILES)(opened)
        self._images = lru_cache(_OPEN_FILES)(_ImagesInPlace)

    def check_footer(self, group: int) -> None:
        """Open the shard of a row group.

        Raises:
            ValueError: it is missing, or its size or footer is not what the manifest says.
        """
        self._retried(group, lambda: self._shard_of(group))

    def read(self, group: int) -> EncodedRows:
        """The rows of a row group as they are stored.

        Raises:
            ValueError: if the shard is missing, truncated, or not what the manifest says; if more
                than the bytes of some images differ; or if a label is not one of the classes.
        """
        manifest = self._manifest
        rows = self._retried(group, lambda: self._read_whole(group))
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
        dropped = set(self._manifest.dropped.get(group, np.empty(0)).tolist())
        keys = self.column(group, "key").to_pylist()
        return [key for row, key in enumerate(keys) if row not in dropped]

    def column(self, group: int, name: str) -> pa.Array:
        """A column of all stored rows of a row group; reads no other."""
        number = int(self._manifest.row_group[group])
        column = self._retried(group, lambda: self._shard_of(group).columns(number, [name])[name])
        self._check_count(group, len(column))
        return column

    def _shard_of(self, group: int) -> ShardReader:
        return self._shard(int(self._manifest.file_index[group]))

    def _read_whole(self, group: int) -> EncodedRows:
        manifest = self._manifest
        number, expected = int(manifest.row_group[group]), int(manifest.crc32[group])
        index = int(manifest.file_index[group])
        file = manifest.files[index]
        elsewhere = file.images
        content, name = None, ""
        if self._cache is not None:
            name = f"{manifest.shards_digest}-{index}-{number}"
            content = self._cache.read(name, expected, file.bytes)
        is_kept, is_whole = content is not None, True
        shard = self._shard(index)
        if content is None:
            content = shard.content(number)
            is_whole = checksum(content) == expected
            if not is_whole:  # once more: it may have been changed on its way
                content = shard.content(number)
                is_whole = checksum(content) == expected
        if is_whole:
            columns = shard.columns(number, shard.names, content)
        else:
            columns = shard.columns(number, shard.names[1:], content)
            columns |= shard.columns(number, ["image"], content)
        if is_whole and not is_kept and self._cache is not None:
            self._cache.write(name, content)
        if elsewhere is not None:
            if not is_whole:
                raise pa.ArrowInvalid(f"row group {number} differs from its checksum")
            # Each of these is compared with its own checksum.
            columns["image"], is_whole = self._images(elsewhere).images(number), False
        self._check_count(group, len(columns["key"]))
        sizes = np.stack([columns["height"].to_numpy(), columns["width"].to_numpy()], axis=1)
        crc32 = columns["crc32"].to_numpy()
        images, labels, keys = columns["image"], columns["labels"], columns["key"]
        rows = EncodedRows(images, labels, keys, crc32, sizes, is_whole, columns.get(_INDEX))
        if not is_whole and elsewhere is None:
            found = [checksum(image.as_buffer()) for image in images]
            if len(found) != len(crc32) or np.array_equal(found, crc32):
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
                "it was changed after conversion; run `vit-ray verify`"
            )

    def _retried(self, group: int, read: Callable[[], Result]) -> Result:
        location = self._manifest.shard_location(group)
        path = location.path

        def read_once() -> Result:
            try:
                with naming(location.uri):
                    return read()
            except OSError:
                self._shard.cache_clear()
                self._images.cache_clear()
                raise

        try:
            return with_retries(read_once, f"reading {path}")
        except FileNotFoundError as error:
            there = f" on {platform.node()}" if location.is_local else ""
            raise ValueError(
                f"shard {path!r} is missing{there} though the manifest lists it; restore the file, "
                "put the data set where all nodes that read see it, or convert again"
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


def _foreign_labels(labels: pa.Array, num_classes: int) -> NDArray[np.intp]:
    """Indices, in the labels of all rows, of those that are not a class."""
    values = labels.values.to_numpy()
    return np.flatnonzero((values < 0) | (values >= num_classes))


_THREADS: Final = 16
"""Files read at a time: the wait for an object store's answers is most of it."""


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
    """What `read` finds in each row group, a list for each file."""
    cuts = np.flatnonzero(np.diff(manifest.file_index)) + 1
    runs = np.split(np.arange(manifest.num_row_groups), cuts)

    def of_file(groups: NDArray[np.int64]) -> list[Any]:
        reader = RowGroupReader(manifest)
        return [read(reader, int(group)) for group in groups]

    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(of_file, runs)
