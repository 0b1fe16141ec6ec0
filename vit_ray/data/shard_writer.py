"""One parquet shard: its columns, and how it is written."""

import contextlib
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.restart_index import RestartIndex
from vit_ray.storage import Location

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
MOST_ROW_GROUP_BYTES: Final = 1 << 30
"""Maximum size of the images of a row group, which ends early if they have more bytes: a column of
bytes of 2 GiB or more cannot be read."""
RESERVED_NAMES: Final = (*SHARD_SCHEMA.names, *INDEX_SCHEMA.names)
"""Names that columns of text cannot have."""


@dataclass(frozen=True)
class EncodedImage:
    """One row of a shard before it is written.

    Attributes:
        extra: values of the text columns.
        index: restart index, if the file was rewritten.
        damage: description of damage in a file that decodes all the same; not stored.
        is_turned: whether EXIF gives its source another orientation; not stored.
        crc32: checksum of an image that is read in place; `image` is empty then.
    """

    image: bytes
    labels: tuple[int, ...]
    key: str
    width: int
    height: int
    extra: tuple[str | None, ...] = ()
    index: RestartIndex | None = None
    damage: str = ""
    is_turned: bool = False
    crc32: int | None = None


@dataclass
class ShardFacts:
    """What the manifest needs of one written shard; lists have one entry per row group."""

    rows: list[int] = field(default_factory=list)
    row_group_bytes: list[int] = field(default_factory=list)
    bytes: int = 0
    crc32: int = 0


Resource = TypeVar("Resource", bound=Any)


@contextlib.contextmanager
def closed_after(resource: Resource) -> Iterator[Resource]:
    """As `contextlib.closing`, but an error in the block hides an error of closing.

    A writer whose storage failed raises another error when it is closed.
    """
    try:
        yield resource
    except BaseException:
        with contextlib.suppress(Exception):
            resource.close()
        raise
    resource.close()


class _ChecksummedOutput(io.RawIOBase):
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.crc32 = 0
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.crc32 = zlib.crc32(content, self.crc32)
        self._position += len(content)
        self._stream.write(content)
        return len(content)

    def tell(self) -> int:
        return self._position


def row_groups(rows: Iterable[EncodedImage], num_rows: int) -> Iterator[list[EncodedImage]]:
    """Rows in groups of `num_rows`; fewer where the images exceed `MOST_ROW_GROUP_BYTES`."""
    group: list[EncodedImage] = []
    size = 0
    for row in rows:
        size += len(row.image)
        if group and (len(group) == num_rows or size > MOST_ROW_GROUP_BYTES):
            yield group
            group, size = [], len(row.image)
        group.append(row)
    if group:
        yield group


def write_row_groups(
    destination: Location,
    groups: Iterable[list[EncodedImage]],
    text_columns: Sequence[str] = (),
    *,
    is_indexed: bool = False,
) -> ShardFacts:
    """Write a shard; the file becomes visible after the last row group."""
    index, texts = INDEX_SCHEMA if is_indexed else (), [(n, pa.string()) for n in text_columns]
    schema = pa.schema([*SHARD_SCHEMA, *index, *texts])
    written: list[pq.FileMetaData] = []
    with destination.output() as stream:
        output = _ChecksummedOutput(stream)
        parquet = pq.ParquetWriter(
            output,
            schema,
            compression="none",
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
            metadata_collector=written,
        )
        with closed_after(parquet):
            for rows in groups:
                parquet.write_table(_table(rows, schema))
    metadata = [written[0].row_group(i) for i in range(written[0].num_row_groups)]
    return ShardFacts(
        rows=[group.num_rows for group in metadata],
        row_group_bytes=[group.total_byte_size for group in metadata],
        bytes=output.tell(),
        crc32=output.crc32,
    )


def _table(rows: list[EncodedImage], schema: pa.Schema) -> pa.Table:
    columns: list[list[Any]] = [
        [row.image for row in rows],
        [list(row.labels) for row in rows],
        [row.key for row in rows],
        [row.width for row in rows],
        [row.height for row in rows],
        [zlib.crc32(row.image) if row.crc32 is None else row.crc32 for row in rows],
    ]
    if INDEX_SCHEMA.names[0] in schema.names:
        columns.append([None if row.index is None else asdict(row.index) for row in rows])
    num_texts = len(schema) - len(columns)
    columns += [[row.extra[i] for row in rows] for i in range(num_texts)]
    arrays = [pa.array(column, f.type) for column, f in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)
