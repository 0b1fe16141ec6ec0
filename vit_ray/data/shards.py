"""The shards of a data set: their columns, and their row groups as encoded images.

A shard is a parquet file with a row per image: its encoded bytes, the labels, a key that names the
image in its source, its size in pixels, and a checksum. Where JPEG files were given restart markers
(`convert.index_jpeg`), a column follows: where the parts lie that a crop is made of
(`restart_index`), null for what was left as it came. Columns of text that a source has with its
images (`convert.columns`) follow; training does not decode them.

A row group is read in one piece, and each page is compared with its checksum. Where one differs,
each image is compared with its own, so that one damaged image costs no other.
"""

import errno
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
_ADVICE: Final = "; run `vit-ray verify`"
_OPEN_FILES: Final = 16
_PART_BYTES: Final = 1 << 24
_THREADS: Final = 16
"""Files whose labels or keys are read at a time: mostly they wait for an object store."""


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
    if not is_shard_schema(file.schema_arrow):
        raise ValueError(
            f"shard {location.path!r} has a foreign schema ({file.schema_arrow.names}); expected "
            f"the columns {SHARD_SCHEMA.names} as `vit-ray convert` writes them"
        )
    return source, file.metadata


class _ImagesInPlace:
    """The images of a shard in a file of others, which is only ever read.

    Raises:
        FileNotFoundError: it is missing; with its path.
        ValueError: it is another one than when the data set was made.
    """

    def __init__(self, file: ImageFile) -> None:
        location, self._column = locate(file.path), file.column
        found = location.info()
        if found.kind == "nothing":
            raise FileNotFoundError(errno.ENOENT, "no such file", file.path)
        if (found.size, found.version) != (file.bytes, file.version):
            raise ValueError(
                f"{file.path} has changed since the data set was made: its size and version are "
                f"{(found.size, found.version)}, not {(file.bytes, file.version)}; make the data "
                "set again (convert.in_place), in another folder"
            )
        self._file = pq.ParquetFile(location.open())

    def images(self, row_group: int) -> pa.Array:
        """Encoded images of a row group: binary, empty where there is none."""
        table = self._file.read_row_group(row_group, columns=[self._column], use_threads=False)
        column = table.column(0).combine_chunks()
        if pa.types.is_struct(column.type):
            column = pc.struct_field(column, "bytes")
        return column.cast(pa.binary()).fill_null(b"")


def problem_of_shard(location: Location, entry: ShardFile, *, is_read: bool = False) -> str | None:
    """Why a file is not the shard that was written, by its size and its footer; None if it is.

    Args:
        is_read: all of its bytes are compared with their checksum.
    """
    try:
        with naming(location.uri):
            with_retries(lambda: open_shard(location, entry), f"reading {location.path}")
            if is_read and _crc32_of(location) != entry.crc32:
                return "its bytes differ from the manifest's checksum"
    except (pa.ArrowException, OSError, ValueError) as error:
        if is_of_the_store(error):  # other OSErrors are of what pyarrow cannot parse
            raise
        is_missing = isinstance(error, FileNotFoundError)
        # Without the advice: it is what that command says.
        return "the file is missing" if is_missing else str(error).removesuffix(_ADVICE)
    return None


def _crc32_of(location: Location) -> int:
    found, source = 0, location.open()
    while part := source.read(_PART_BYTES):
        found = checksum(part, found)
    return found


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
        self._images = lru_cache(_OPEN_FILES)(_ImagesInPlace)

    def read(self, group: int) -> EncodedRows:
        """The rows of a row group as they are stored.

        Raises:
            ValueError: if the shard is missing, truncated, or not what the manifest says; if more
                than the bytes of some images differ; or if a label is not one of the classes.
        """
        manifest = self._manifest
        rows = self._read_whole(group)
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
        column = self._retried(group, lambda: self._table(group, [name]))[name].chunk(0)
        self._check_count(group, len(column))
        return column

    def _read_whole(self, group: int) -> EncodedRows:
        """From this node's cache, or from the data set."""
        manifest, index = self._manifest, int(self._manifest.file_index[group])
        name = f"{manifest.shards_digest}-{index}-{int(manifest.row_group[group])}"
        table = self._cache.read(name) if self._cache is not None else None
        if table is not None:
            return _encoded_rows(table, is_whole=True)
        table, is_whole = self._retried(group, lambda: self._fetched(group))
        self._check_count(group, len(table))
        if is_whole and self._cache is not None:
            self._cache.write(name, table)
        return _encoded_rows(table, is_whole)

    def _fetched(self, group: int) -> tuple[pa.Table, bool]:
        """A row group, and whether its images were compared with checksums, too."""
        file = self._manifest.files[int(self._manifest.file_index[group])]
        if file.images is not None:
            table = self._table(group, _COLUMNS[1:])
            images = self._images(file.images).images(int(self._manifest.row_group[group]))
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
        """Columns of a row group, whose pages are compared with their checksums."""
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

    def _check_count(self, group: int, found: int) -> None:
        expected = int(self._manifest.rows[group]) + len(self._manifest.dropped.get(group, ()))
        if found != expected:
            raise ValueError(
                f"shard {self._manifest.shard_location(group).path!r} has {found} rows in row "
                f"group {int(self._manifest.row_group[group])} and the manifest says {expected}: "
                f"it was changed after conversion{_ADVICE}"
            )

    def _retried(self, group: int, read: Callable[[], Result]) -> Result:
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

        def read_twice() -> Result:
            return read_again(read_once, pa.ArrowException, OSError)

        try:
            return with_retries(read_twice, f"reading {path}")
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


def _encoded_rows(table: pa.Table, is_whole: bool) -> EncodedRows:
    columns = {name: table[name].chunk(0) for name in table.column_names}
    sizes = np.stack([columns["height"].to_numpy(), columns["width"].to_numpy()], axis=1)
    images, labels, keys = columns["image"], columns["labels"], columns["key"]
    crc32 = columns["crc32"].to_numpy()
    return EncodedRows(images, labels, keys, crc32, sizes, is_whole, columns.get(_INDEX))


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
    """What `read` finds in each row group, a list for each file."""
    groups = np.flatnonzero(manifest.rows)
    runs = np.split(groups, np.flatnonzero(np.diff(manifest.file_index[groups])) + 1)

    def of_file(groups: NDArray[np.int64]) -> list[Any]:
        reader = RowGroupReader(manifest)
        return [read(reader, int(group)) for group in groups]

    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(runs), _THREADS):  # no more in memory
            yield from pool.map(of_file, runs[first : first + _THREADS])
