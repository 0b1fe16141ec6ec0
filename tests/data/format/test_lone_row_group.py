"""Row groups read without their file's footer: as pyarrow reads them with it, or not at all."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.s3_server import FaultProxy, serve_conditional_s3, this_process_uses
from tests.data.small_sets import SHARD, used_rows, write_rows
from vit_ray import s3
from vit_ray.data.format import row_groups
from vit_ray.data.format.lone_row_group import FooterTemplate, OtherLayoutError
from vit_ray.data.format.manifest import Manifest
from vit_ray.data.format.row_groups import RowGroupReader, ShardReader
from vit_ray.data.format.shard_writer import EncodedImage, ShardWriter
from vit_ray.data.jpeg_index.restart_index import RestartIndex
from vit_ray.data.prepare.subset import subset
from vit_ray.storage import locate

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with captions": {"text_columns": ("caption", "licence")},
    "indexed": {"is_indexed": True},
    "indexed, with captions": {"text_columns": ("caption",), "is_indexed": True},
}


def shard(file: Path, seed: int, image_bytes: int = 300, **kind: Any) -> bytes:
    """A file of row groups of 5, 5 and 3 images; its content."""
    random = np.random.default_rng(seed)
    with ShardWriter(locate(str(file)), 5, **kind) as writer:
        for i in range(13):
            offsets = np.sort(random.integers(0, 1 << 20, random.integers(1, 50))).astype(np.uint32)
            is_indexed = "is_indexed" in kind and random.random() < 0.6
            writer.add(
                EncodedImage(
                    random.bytes(random.integers(1, image_bytes)),
                    tuple(random.integers(0, 9, random.integers(0, 4)).tolist()),
                    f"key {i} \N{GREEK SMALL LETTER ALPHA}" * random.integers(1, 4),
                    *random.integers(1, 5000, 2).tolist(),
                    extra=tuple(
                        None if random.random() < 0.5 else f"text {i}"
                        for _ in kind.get("text_columns", ())
                    ),
                    index=RestartIndex(2, 3, 5, 8, 16, 1, offsets) if is_indexed else None,
                    original_crc32=int(random.integers(1 << 32)) if is_indexed else None,
                )
            )
    return file.read_bytes()


def footer_of(content: bytes) -> bytes:
    return content[-8 - int.from_bytes(content[-8:-4], "little") :]


def pieces(file: Path, content: bytes) -> list[pa.Buffer]:
    """The bytes of each row group, from the end of the one before."""
    groups = [pq.ParquetFile(file).metadata.row_group(i) for i in range(3)]
    ends = np.cumsum([4, *(group.total_byte_size for group in groups)]).tolist()
    return [pa.py_buffer(content[a:b]) for a, b in zip([0, *ends[1:]], ends[1:], strict=False)]


@pytest.mark.parametrize("image_bytes", [300, 900_000])  # in a page, or a page for each or two
@pytest.mark.parametrize("kind", list(KINDS))
def test_it_is_what_pyarrow_reads_by_the_whole_file(
    tmp_path: Path, kind: str, image_bytes: int
) -> None:
    template = FooterTemplate(footer_of(shard(tmp_path / "other", 1, **KINDS[kind])))
    content = shard(tmp_path / "file", 2, image_bytes, **KINDS[kind])
    for number, piece in enumerate(pieces(tmp_path / "file", content)):
        metadata = template.metadata_of(piece, 5 if number < 2 else 3)
        found = pq.ParquetFile(pa.BufferReader(piece), metadata=metadata).read()
        assert found.equals(pq.ParquetFile(tmp_path / "file").read_row_group(number))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("other", list(KINDS))
def test_a_file_of_other_columns_is_refused(tmp_path: Path, kind: str, other: str) -> None:
    template = FooterTemplate(footer_of(shard(tmp_path / "other", 1, **KINDS[other])))
    first, *_ = pieces(tmp_path / "file", shard(tmp_path / "file", 2, **KINDS[kind]))
    if kind != other:
        with pytest.raises(OtherLayoutError):
            template.metadata_of(first, 5)
    for count in (0, 4, 6):
        with pytest.raises(OtherLayoutError):
            template.metadata_of(first, count)


def test_a_cut_or_changed_row_group_is_refused_or_another(tmp_path: Path) -> None:
    """Nothing but an `OtherLayoutError` is raised, whatever the bytes are."""
    content = shard(tmp_path / "file", 2, is_indexed=True)
    template = FooterTemplate(footer_of(content))
    piece = pieces(tmp_path / "file", content)[1].to_pybytes()
    random = np.random.default_rng(3)
    refused = 0
    for _ in range(500):
        changed = bytearray(piece)
        changed[random.integers(len(piece))] ^= 1 << int(random.integers(8))
        for some in (changed, changed[: random.integers(len(piece))]):
            try:
                template.metadata_of(pa.py_buffer(bytes(some)), 5)
            except OtherLayoutError:
                refused += 1
    assert refused > 500  # each that is cut, and those with a changed header


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every data set had more files than are kept open."""
    monkeypatch.setattr(row_groups, "_OPEN_FILES", 0)


LABELS = [(0,), (1, 2), (2,), (1,), (0,), (2, 0), (1,)]


@pytest.fixture
def small(tmp_path: Path) -> Manifest:
    return write_rows(tmp_path / "small", LABELS)


@pytest.mark.usefixtures("alone")
def test_of_many_files_one_footer_is_read(small: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ShardReader] = []
    footer = ShardReader._read_footer

    def counted(reader: ShardReader) -> bytes:
        opened.append(reader)
        return footer(reader)

    monkeypatch.setattr(ShardReader, "_read_footer", counted)
    reader = RowGroupReader(small)
    rows = [reader.read(group) for group in (2, 0, 1, 0)]
    assert len(opened) == 1
    assert [one.key(0) for one in rows] == ["key 6", "key 0", "key 3", "key 0"]
    assert [one.labels_of(0).tolist() for one in rows] == [[1], [0], [1], [0]]
    assert all(one.is_whole for one in rows)


@pytest.mark.usefixtures("alone")
def test_on_s3_a_row_group_is_one_request() -> None:
    with serve_conditional_s3() as port, FaultProxy(port) as proxy, this_process_uses(proxy.port):
        s3.client().create_bucket(Bucket="sets")
        reader = RowGroupReader(write_rows("s3://sets/small", LABELS))
        reader.read(0)
        proxy.faults.set("", 0)
        assert [reader.read(group).key(0) for group in (1, 2)] == ["key 3", "key 6"]
        assert [line.split()[0] for line in proxy.faults.requests] == ["GET"] * 2


@pytest.mark.usefixtures("alone")
def test_a_flipped_image_costs_no_other_row(small: Manifest) -> None:
    whole, _ = used_rows(small)
    file = Path(small.root) / SHARD
    content = bytearray(file.read_bytes())
    content[bytes(content).index(whole[4][0]) + 9] ^= 4
    file.write_bytes(content)
    assert used_rows(small)[0].keys() == whole.keys() - {4}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("count", [1, 4, 6])
def test_a_part_of_a_set_has_the_rows_that_it_has_with_all_footers(
    small: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    part = subset(small.path, str(tmp_path / "part"), count=count, seed=3)
    found = used_rows(part)
    monkeypatch.setattr(row_groups, "_OPEN_FILES", 16)
    assert found == used_rows(part)
