"""Files that are whole or not there, whatever fails while they are written."""

import errno
import zlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vit_ray import storage
from vit_ray.data.convert.index import parquet_output
from vit_ray.data.dataset import ShardFile
from vit_ray.data.shard_writer import EncodedImage, ShardWriter
from vit_ray.data.shards import problem_of_shard
from vit_ray.storage import Location, locate

FULL = "No space left on device"


def rows(count: int) -> list[EncodedImage]:
    return [EncodedImage(bytes([i]) * 90, (i,), str(i), 4, 5) for i in range(count)]


def write_shard(place: Location) -> None:
    with ShardWriter(place, 2) as writer:
        for row in rows(3):
            writer.add(row)


def write_parquet(place: Location) -> None:
    with parquet_output(place, pa.schema([("a", pa.int64())])) as writer:
        writer.write_table(pa.table({"a": [1, 2]}))


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, FULL)


def cannot_close(_: object) -> None:
    raise pa.ArrowInvalid("the file is not whole")


FAILURES: dict[str, dict[tuple[Any, str], Any]] = {
    "while it is written, and it cannot be closed": {
        (pq.ParquetWriter, "write_table"): full, (pq.ParquetWriter, "close"): cannot_close,
    },
    "while it is closed": {(pq.ParquetWriter, "close"): full},
    "while it is synced": {(storage.os, "fsync"): full},
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("write", [write_shard, write_parquet])
def test_a_disk_that_is_full_is_told_and_leaves_nothing(tmp_path, monkeypatch, write, failure):
    monkeypatch.setattr(pq.ParquetWriter, "__del__", lambda _: None)
    for place, fails in FAILURES[failure].items():
        monkeypatch.setattr(*place, fails)
    with pytest.raises(OSError, match=FULL):
        write(locate(str(tmp_path / "file")))
    assert list(tmp_path.iterdir()) == []


def test_facts_are_those_of_the_file(tmp_path):
    place = locate(str(tmp_path / "part.parquet"))
    with ShardWriter(place, 2) as writer:
        for row in rows(5):
            writer.add(row)
    facts = writer.facts()
    assert facts.rows == [2, 2, 1]
    assert facts.bytes == (tmp_path / "part.parquet").stat().st_size
    footer = pq.ParquetFile(tmp_path / "part.parquet").metadata
    groups = [footer.row_group(i) for i in range(3)]
    stored = [sum(g.column(c).total_compressed_size for c in range(6)) for g in groups]
    assert facts.row_group_bytes == stored
    entry = ShardFile("part.parquet", 5, facts.bytes, facts.crc32)
    assert problem_of_shard(place, entry) is None
    content = bytearray((tmp_path / "part.parquet").read_bytes())
    assert facts.crc32 == zlib.crc32(content)
    content[-20] ^= 1
    (tmp_path / "part.parquet").write_bytes(content)
    assert problem_of_shard(place, entry, is_read=True)
    (tmp_path / "part.parquet").write_bytes(content[:-9])
    assert "cut short" in str(problem_of_shard(place, entry))
    assert problem_of_shard(locate(str(tmp_path / "none")), entry) == "the file is missing"
