"""One parquet shard: rows in, fixed-size row groups out, and the facts that the manifest needs."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.format.schema import SHARD_SCHEMA, checksum
from vit_ray.retry import is_denied, is_transient, with_retries
from vit_ray.storage import Location


@dataclass(frozen=True)
class EncodedImage:
    """One row of a shard before it is written."""

    image: bytes
    labels: tuple[int, ...]
    key: str
    width: int
    height: int


@dataclass(frozen=True)
class ShardFacts:
    """What the manifest says of one written shard; lists have one entry per row group."""

    rows: list[int]
    row_group_bytes: list[int]
    bytes: int
    row_group_crc32: list[int]
    footer_crc32: int


class _ChecksummedOutput:
    """Passes what is written on, and takes the checksum of each part of it."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._crc32 = 0
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._crc32 = checksum(content, self._crc32)
        self._position += len(content)
        self._stream.write(content)
        return len(content)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self.closed = True
        self._stream.close()

    def end_part(self) -> int:
        """Checksum of what was written since the part before."""
        crc32, self._crc32 = self._crc32, 0
        return crc32


class ShardWriter:
    """Writes the rows of one shard in the order given.

    Use as a context; the file becomes visible when the block ends without an error, unless no row
    was added.
    """

    def __init__(self, destination: Location, rows_per_row_group: int) -> None:
        self._output = destination.atomic_output()
        self._destination = destination
        self._rows_per_row_group = rows_per_row_group
        self._pending: list[EncodedImage] = []
        self._rows: list[int] = []
        self._crc32: list[int] = []
        self._footer_crc32 = 0

    def __enter__(self) -> "ShardWriter":
        target = self._output.__enter__()
        self._target = target
        self._stream = _ChecksummedOutput(target.filesystem.open_output_stream(target.path))
        self._writer = pq.ParquetWriter(
            self._stream,
            SHARD_SCHEMA,
            compression="none",
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )
        return self

    def add(self, row: EncodedImage) -> None:
        """Append one row."""
        self._pending.append(row)
        if len(self._pending) == self._rows_per_row_group:
            self._flush()

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        if error_type is None and self._pending:
            self._flush()
        self._writer.close()
        self._footer_crc32 = self._stream.end_part()
        self._stream.close()
        self._output.__exit__(error_type, error, trace)

    def facts(self) -> ShardFacts:
        """Facts of the finished file, read from its footer."""
        with self._destination.filesystem.open_input_file(self._destination.path) as source:
            metadata = pq.ParquetFile(source).metadata
            sizes = [_stored_bytes(metadata.row_group(i)) for i in range(metadata.num_row_groups)]
            return ShardFacts(self._rows, sizes, source.size(), self._crc32, self._footer_crc32)

    def _flush(self) -> None:
        columns = [
            [row.image for row in self._pending],
            [list(row.labels) for row in self._pending],
            [row.key for row in self._pending],
            [row.width for row in self._pending],
            [row.height for row in self._pending],
            [checksum(row.image) for row in self._pending],
        ]
        arrays = [pa.array(c, type=f.type) for c, f in zip(columns, SHARD_SCHEMA, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=SHARD_SCHEMA))
        self._rows.append(len(self._pending))
        self._crc32.append(self._stream.end_part())
        self._pending = []


def problem_of_shard(location: Location, rows: list[int], num_bytes: int) -> str | None:
    """Why a file is not the shard that was written: by its size and its footer; None if it is.

    Args:
        rows: of each row group.
    """
    size = location.info().size
    if size != num_bytes:
        return "the file is missing" if size is None else f"it has {size} bytes, not {num_bytes}"
    try:
        found = with_retries(lambda: _rows_in_footer(location), f"reading {location.path}")
    except (pa.ArrowException, OSError) as error:
        # A footer that cannot be parsed is an OSError of pyarrow's; storage that is away is not.
        if isinstance(error, OSError) and (is_transient(error) or is_denied(error)):
            raise
        return f"its footer cannot be read ({error})"
    return None if found == rows else f"its row groups have {found[:5]} rows, not {rows[:5]}"


def _rows_in_footer(location: Location) -> list[int]:
    with location.filesystem.open_input_file(location.path) as source:
        metadata = pq.ParquetFile(source).metadata
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def _stored_bytes(row_group: Any) -> int:
    return sum(row_group.column(i).total_compressed_size for i in range(row_group.num_columns))
