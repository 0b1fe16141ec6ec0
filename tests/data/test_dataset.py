"""Manifests and shards: of every bit that is flipped verify finds it, and no row is used."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.damage import broken_copy
from tests.data.small_sets import SHARD, flips, used_rows, with_header, write_rows
from vit_ray.data import open_dataset
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.dataset import MANIFEST_FILE, Manifest, ShardFile, write_manifest
from vit_ray.data.parts import subset
from vit_ray.data.shards import RowGroupReader, first_labels
from vit_ray.storage import locate


def write_small(folder: Path, rows: list[int], **origin: int) -> str:
    manifest = Manifest(
        *(np.zeros(len(rows)), np.arange(len(rows)), np.array(rows), np.array(rows)),
        files=[ShardFile("part-00000.parquet", sum(rows), 10, 0)],
        classes=["cat", "dog"],
        origin=dict(origin),
    )
    return write_manifest(locate(str(folder)), manifest)


def test_a_manifest_says_what_was_converted_as_the_footers_of_the_shards_do(dataset):
    assert (dataset.num_images, dataset.num_classes, dataset.max_labels) == (300, 3, 1)
    assert dataset.classes == ["class_0", "class_1", "class_2"]
    assert dataset.rows.tolist() == [16] * 18 + [12]
    rows: list[int] = []
    for file in dataset.files:
        path = Path(dataset.root) / file.path
        metadata = pq.ParquetFile(path).metadata
        assert (file.rows, file.bytes) == (metadata.num_rows, path.stat().st_size)
        rows += [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert rows == dataset.rows.tolist()
    sizes = [file.bytes for file in dataset.files]
    assert max(sizes) < 0.15 * 2**20  # asked for 0.1 MiB, in whole row groups
    assert np.mean(sizes) > 0.07 * 2**20


def test_the_fingerprint_tells_content_apart_and_not_place(tmp_path):
    one = write_small(tmp_path / "a", [4, 4], seed=1)
    assert write_small(tmp_path / "b", [4, 4], seed=1) == one
    assert write_small(tmp_path / "c", [4, 4], seed=2) != one
    assert write_small(tmp_path / "d", [4, 3], seed=1) != one
    assert open_dataset(str(tmp_path / "a")).fingerprint == one


@pytest.mark.parametrize("secret", ["hush", "hu/sh"])
def test_credentials_in_an_address_are_refused_and_not_repeated(secret):
    with pytest.raises(ValueError, match="set AWS_ACCESS_KEY_ID and its secret") as caught:
        open_dataset(f"s3://key:{secret}@bucket/set")
    assert "sh@" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("other", b"", r"has no manifest\.parquet"),
        ("_staging/plan", b"", "run the same convert command again"),
        ("manifest.parquet", b"", "not a manifest of vit_ray or is damaged"),
        ("manifest.parquet", b"PAR1 nonsense", "not a manifest"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path, file, content, message):
    locate(str(tmp_path / file)).write(content)
    with pytest.raises(ValueError, match=message):
        open_dataset(str(tmp_path))


def test_another_format_and_other_classes_are_refused(tmp_path):
    write_small(tmp_path, [4])
    with_header(tmp_path, format_version=99)
    with pytest.raises(ValueError, match="has format 99; this code reads format 6"):
        open_dataset(str(tmp_path))
    with_header(tmp_path, format_version=6, classes=["dog", "cat"])
    with pytest.raises(ValueError, match="is damaged"):  # under the same fingerprint
        open_dataset(str(tmp_path))


# What becomes of a shard, and the message.
SHARDS: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "missing": (lambda _: None, "is missing"),
    "truncated": (lambda whole: whole[:-50], "has .* bytes and the manifest says"),
    "with a torn footer": (lambda whole: whole[:-200] + bytes(200), "cannot be read"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_that_is_not_as_it_was_written_is_named(dataset, tmp_path, name):
    changed, message = SHARDS[name]
    manifest, shard = broken_copy(dataset, tmp_path)
    content = changed(shard.read_bytes())
    shard.unlink() if content is None else shard.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{shard.name}' {message}"):
        RowGroupReader(manifest).read(0)


def test_a_full_disk_is_named_and_leaves_no_part_of_a_shard(small_disk):
    with pytest.raises(OSError, match="No space left on device"):
        write_rows(small_disk / "set", [(0,)] * 6, image_bytes=1 << 20)
    assert not [file for file in small_disk.rglob("*") if file.is_file()]


@pytest.fixture
def small(tmp_path: Path) -> Manifest:
    return write_rows(tmp_path / "small", [(0,), (1, 2), (2,), (1,), (0,), (2, 0)])


@pytest.mark.slow
def test_no_flipped_bit_of_a_shard_is_used(small):
    whole, is_refused = used_rows(small)
    assert (len(whole), is_refused) == (6, False)
    for flip in flips(Path(small.root) / SHARD, bits_per_byte=1):
        rows, is_refused = used_rows(small)
        assert rows.items() <= whole.items(), flip
        assert is_refused or rows == whole, flip  # some bits of parquet are read by no one


def test_verify_finds_every_flipped_bit_of_a_shard(small):
    assert check_file(0, small, 0.0).problems == []
    for flip in flips(Path(small.root) / SHARD, bits_per_byte=1):
        assert check_file(0, small, 0.0).problems, flip


@pytest.mark.slow
def test_a_manifest_with_a_flipped_bit_is_not_opened(small):
    """Unless it says the same of the data: bits of parquet that nobody reads, and the root."""
    for flip in flips(Path(small.root) / MANIFEST_FILE, bits_per_byte=2):
        try:
            opened = open_dataset(small.root)
        except ValueError:
            continue
        assert opened.fingerprint == small.fingerprint, flip
        assert list(opened.files) == list(small.files), flip
        for name in ("file_index", "row_group", "rows", "bytes"):
            np.testing.assert_array_equal(getattr(opened, name), getattr(small, name), flip)


def test_a_flipped_image_costs_no_other_row(small, tmp_path):
    """A subset keeps the checksums."""
    part = subset(small.path, str(tmp_path / "part"), count=6)
    whole, _ = used_rows(small)
    shard = Path(small.root) / SHARD
    content = bytearray(shard.read_bytes())
    content[bytes(content).index(whole[4][0]) + 9] ^= 4
    shard.write_bytes(content)
    for manifest in (small, part):
        assert used_rows(manifest)[0].keys() == whole.keys() - {4}
    (problem,) = check_file(0, small, 0.0).problems
    assert "key 4: " in problem
    assert "checksum" in problem


@pytest.mark.parametrize(
    ("labels", "wrong"), [((3,), "3"), ((-1,), "-1"), ((0, 2_000_000_000), "2000000000")]
)
def test_a_label_out_of_range_names_shard_and_row(tmp_path, labels, wrong):
    manifest = write_rows(tmp_path, [(0,), (1,), (2,), (), labels, (1,)])
    named = rf"{SHARD}', row group 1 has in row 1 the label {wrong}, .* 3 classes"
    with pytest.raises(ValueError, match=named):
        RowGroupReader(manifest).read(1)
    with pytest.raises(ValueError, match=named):
        list(first_labels(manifest))
