"""One parquet shard: rows in, fixed-size row groups out, and the facts that the manifest needs."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.dataset import checksum
from vit_ray.data.restart_index import RestartIndex
from vit_ray.storage import Location

MOST_ROW_GROUP_BYTES: Final = 1 << 30
"""Of the images of a row group, which ends earlier than after its number of rows where they have
more: a column of bytes of 2 GiB or more cannot be read."""


@dataclass(frozen=True)
class EncodedImage:
    """One row of a shard before it is written.

    Attributes:
        extra: the values of its text columns.
        index: of the restart markers that it was given.
        damage: what is wrong with its file, which decodes all the same; not stored.
        crc32: checksum of the image, where `image` is empty as it lies elsewhere.
    """

    image: bytes
    labels: tuple[int, ...]
    key: str
    width: int
    height: int
    extra: tuple[str | None, ...] = ()
    index: RestartIndex | None = None
    damage: str = ""
    crc32: int | None = None


@dataclass
class ShardFacts:
    """What the manifest says of one written shard; lists have one entry per row group."""

    rows: list[int] = field(default_factory=list)
    row_group_bytes: list[int] = field(default_factory=list)
    bytes: int = 0
    crc32: int = 0


Resource = TypeVar("Resource", bound=Any)


@contextlib.contextmanager
def closed_after(resource: Resource) -> Iterator[Resource]:
    """As `contextlib.closing`, but an error in the block is raised, not the one of closing.

    A writer whose storage failed fails again when it is closed, with another error.
    """
    try:
        yield resource
    except BaseException:
        with contextlib.suppress(Exception):
            resource.close()
        raise
    resource.close()


class _ChecksummedOutput(io.RawIOBase):
    """Forwards what is written, and computes its checksum."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.crc32 = 0
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.crc32 = checksum(content, self.crc32)
        self._position += len(content)
        self._stream.write(content)
        return len(content)

    def tell(self) -> int:
        return self._position


class ShardWriter:
    """Writes the rows of one shard in the order given.

    Use as a context; the file becomes visible when the block ends without an error.
    """

    def __init__(
        self,
        destination: Location,
        rows_per_row_group: int,
        text_columns: Sequence[str] = (),
        *,
        is_indexed: bool = False,
    ) -> None:
        self._destination = destination
        self._rows_per_row_group = rows_per_row_group
        self._is_indexed = is_indexed
        self._schema = shard_schema(text_columns, is_indexed=is_indexed)
        self._pending: list[EncodedImage] = []
        self._pending_bytes = 0
        self._rows: list[int] = []
        self._metadata: list[pq.FileMetaData] = []

    def __enter__(self) -> "ShardWriter":
        self._output = self._opened()
        return self._output.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._output.__exit__(*error)

    @contextlib.contextmanager
    def _opened(self) -> Iterator["ShardWriter"]:
        with self._destination.output() as stream:
            self._stream = _ChecksummedOutput(stream)
            writer = pq.ParquetWriter(
                self._stream,
                self._schema,
                compression="none",
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
                metadata_collector=self._metadata,
            )
            with closed_after(writer) as self._parquet:
                yield self
                self.end_row_group()

    def add(self, row: EncodedImage) -> None:
        size = len(row.image)
        if self._pending_bytes + size > MOST_ROW_GROUP_BYTES:
            self.end_row_group()
        self._pending.append(row)
        self._pending_bytes += size
        if len(self._pending) == self._rows_per_row_group:
            self.end_row_group()

    def facts(self) -> ShardFacts:
        """Facts of the finished file; ask once."""
        (metadata,) = self._metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        sizes = [
            sum(g.column(i).total_compressed_size for i in range(g.num_columns)) for g in groups
        ]
        return ShardFacts(self._rows, sizes, self._stream.tell(), self._stream.crc32)

    def end_row_group(self) -> None:
        """Write what was added since the row group before."""
        rows, self._pending, self._pending_bytes = self._pending, [], 0
        if not rows:
            return
        crc32 = [checksum(row.image) if row.crc32 is None else row.crc32 for row in rows]
        columns: list[list[Any]] = [
            [row.image for row in rows],
            [list(row.labels) for row in rows],
            [row.key for row in rows],
            [row.width for row in rows],
            [row.height for row in rows],
            crc32,
        ]
        if self._is_indexed:
            columns.append([None if row.index is None else asdict(row.index) for row in rows])
        columns += map(list, zip(*(row.extra for row in rows), strict=True))
        arrays = [pa.array(c, type=f.type) for c, f in zip(columns, self._schema, strict=True)]
        self._parquet.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows.append(len(rows))
