"""Which images each shard holds: the index of a source, drawn into the order of the data set.

Two passes over the index, each from its begin to its end: its rows are dealt into buckets by the
shards that they belong to, and each bucket, or as much of it as fits into memory, is put in order
and written with a row group per shard. So the work grows with the number of images and nothing
else, and a task that makes a shard reads one small footer and one row group.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vit_ray.data.keyed_random import KeyedPermutation
from vit_ray.data.prepare.convert.staged_files import parquet_output, read_row_group
from vit_ray.data.prepare.sources.entries import INDEX_SCHEMA, IndexEntry
from vit_ray.data.prepare.sources.source_index import SourceIndex, table_entries
from vit_ray.storage import Location

_SHUFFLE: Final = 5
_ROWS_PER_BUCKET: Final = 1 << 19
"""About 100 MiB of paths of 60 bytes."""
_MOST_BUCKETS: Final = 256
"""Each is an open file while rows are dealt."""
_ROWS_DEALT: Final = 1 << 20
"""At a time, so that each bucket gets thousands of them."""
_BYTES_AT_A_TIME: Final = 1 << 28
"""Of rows that are dealt, or put in order: fewer than the above where texts are long."""
_POSITION: Final = pa.field("position", pa.int64())


@dataclass(frozen=True)
class ShardRows:
    """Which positions of the order each shard holds: whole row groups but at the very end."""

    num_images: int
    num_shards: int
    rows_per_row_group: int

    def first_row(self, shard: int) -> int:
        """Position of the first row of a shard; that after the last row for the shard after it."""
        groups = -(-self.num_images // self.rows_per_row_group)
        return min(shard * groups // self.num_shards * self.rows_per_row_group, self.num_images)

    @property
    def shards_per_list(self) -> int:
        buckets = min(_MOST_BUCKETS, -(-self.num_images // _ROWS_PER_BUCKET), self.num_shards)
        return -(-self.num_shards // buckets)

    @property
    def first_shards(self) -> range:
        return range(0, self.num_shards, self.shards_per_list)


def shuffled_rows(num_images: int, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of the source that stand at some positions of the order."""
    return KeyedPermutation(num_images, _SHUFFLE, seed).ranks(positions)


def write_shard_lists(
    index: SourceIndex, shards: ShardRows, seed: int, staging: Location, scratch: Path
) -> None:
    """Write the images of each shard, in their order.

    Args:
        scratch: a folder on a local disk, with room for the index: some 100 bytes and the path for
            each image.
    """
    _deal(index, shards, seed, scratch)
    for number, first in enumerate(shards.first_shards):
        with parquet_output(staging.child(_list_name(number)), INDEX_SCHEMA) as writer:
            for part in _per_shard(_bucket(scratch, number), shards, first):
                writer.write_table(part, row_group_size=max(1, part.num_rows))
        _bucket(scratch, number).unlink()


def list_of_shard(shards: ShardRows, staging: Location, shard: int) -> list[IndexEntry]:
    """The images of one shard."""
    number, place = divmod(shard, shards.shards_per_list)
    return list(table_entries(read_row_group(staging.child(_list_name(number)), place)))


def _list_name(number: int) -> str:
    return f"list-{number:05d}.parquet"


def _bucket(scratch: Path, number: int) -> Path:
    return scratch / f"bucket-{number:05d}.arrow"


def _deal(index: SourceIndex, shards: ShardRows, seed: int, scratch: Path) -> None:
    """Append each row of the index, with its position, to the bucket that it belongs to."""
    order = KeyedPermutation(index.num_images, _SHUFFLE, seed)
    starts = np.array([shards.first_row(shard) for shard in shards.first_shards])
    schema = INDEX_SCHEMA.append(_POSITION)
    with contextlib.ExitStack() as files:
        buckets = [
            files.enter_context(pa.ipc.new_stream(str(_bucket(scratch, number)), schema))
            for number in range(len(starts))
        ]
        for first, table in _large_pieces(index.tables()):
            rows = np.arange(first, first + table.num_rows, dtype=np.int64)
            positions = order.values(rows)
            targets = np.searchsorted(starts, positions, side="right") - 1
            by_bucket = np.argsort(targets, kind="stable")
            ends = np.cumsum(np.bincount(targets, minlength=len(starts)))
            dealt = table.append_column(_POSITION, pa.array(positions)).take(by_bucket)
            for bucket, begin, end in zip(buckets, [0, *ends[:-1]], ends, strict=True):
                bucket.write_table(dealt.slice(begin, end - begin))


def _large_pieces(tables: Iterator[tuple[int, pa.Table]]) -> Iterator[tuple[int, pa.Table]]:
    """The tables joined to about `_ROWS_DEALT` rows each, with the number of the first row."""
    waiting: list[pa.Table] = []
    first = rows = num_bytes = 0
    for _, table in tables:
        waiting.append(table)
        rows += table.num_rows
        num_bytes += table.nbytes
        if rows >= _ROWS_DEALT or num_bytes >= _BYTES_AT_A_TIME:
            yield first, pa.concat_tables(waiting).combine_chunks()
            first, rows, num_bytes, waiting = first + rows, 0, 0, []
    if rows:
        yield first, pa.concat_tables(waiting).combine_chunks()


def _per_shard(bucket: Path, shards: ShardRows, first: int) -> Iterator[pa.Table]:
    """The rows of each shard of a bucket, whose first shard is `first`.

    Of as many shards at a time as memory holds: where texts are long, not of all.
    """
    stop = min(first + shards.shards_per_list, shards.num_shards)
    step = max(1, (stop - first) // -(-bucket.stat().st_size // _BYTES_AT_A_TIME))
    with pa.memory_map(str(bucket)) as file:
        batches = pa.ipc.open_stream(file).read_all().to_batches()
        for begin in range(first, stop, step):
            ends = [shards.first_row(s) for s in range(begin, min(begin + step, stop) + 1)]
            table = _in_order(batches, ends[0], ends[-1])
            for start, end in itertools.pairwise(ends):
                yield table.slice(start - ends[0], end - start)


def _in_order(batches: list[pa.RecordBatch], start: int, stop: int) -> pa.Table:
    """The rows with positions in a range, sorted by position, without that column."""
    found = []
    for batch in batches:
        positions = batch["position"].to_numpy()
        chosen = np.flatnonzero((positions >= start) & (positions < stop))
        found.append(batch if len(chosen) == len(positions) else batch.take(pa.array(chosen)))
    table = pa.Table.from_batches(found).combine_chunks()
    order = np.argsort(table["position"].to_numpy())
    return table.drop_columns(["position"]).take(order)
