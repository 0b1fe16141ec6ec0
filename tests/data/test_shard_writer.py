"""Files that are whole or not there, whatever fails while they are written."""

import errno
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vit_ray import storage
from vit_ray.data.convert.index import parquet_output
from vit_ray.data.dataset import ShardFile
from vit_ray.data.shard_writer import EncodedImage, ShardWriter, closed_after
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


def write_bytes(place: Location) -> None:
    place.write(b"some bytes")


WRITERS = [write_shard, write_parquet, write_bytes]


@pytest.mark.parametrize("write", WRITERS)
def test_a_disk_that_is_full_at_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match=FULL):
        write(locate(str(tmp_path / "file")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [write_shard, write_parquet])
def test_the_first_error_is_the_one_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    """Closing after it fails too, otherwise, and must not hide that the storage was full."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, FULL)

    def cannot_close(_: object) -> None:
        raise pa.ArrowInvalid("the file is not whole")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    monkeypatch.setattr(pq.ParquetWriter, "close", cannot_close)
    monkeypatch.setattr(pq.ParquetWriter, "__del__", lambda _: None)
    with pytest.raises(OSError, match=FULL):
        write(locate(str(tmp_path / "file")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [write_shard, write_parquet])
def test_a_file_that_cannot_be_closed_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    def cannot_close(_: object) -> None:
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr(pq.ParquetWriter, "close", cannot_close)
    monkeypatch.setattr(pq.ParquetWriter, "__del__", lambda _: None)
    with pytest.raises(OSError, match=FULL):
        write(locate(str(tmp_path / "file")))
    assert list(tmp_path.iterdir()) == []


def test_closing_fails_where_nothing_else_did() -> None:
    class Broken:
        def close(self) -> None:
            raise OSError("while closing")

    with pytest.raises(OSError, match="while closing"), closed_after(Broken()):
        pass


def test_facts_are_those_of_the_file(tmp_path: Path) -> None:
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
