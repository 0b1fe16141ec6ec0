import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.damage import broken_copy
from vit_ray.data import open_dataset
from vit_ray.data.dataset import Manifest, RowGroupColumns, ShardFile, write_manifest
from vit_ray.data.shards import RowGroupReader
from vit_ray.storage import locate


def write_small(folder: Path, rows: list[int], **origin: int) -> str:
    columns = RowGroupColumns(
        *(np.zeros(len(rows)), np.arange(len(rows)), np.array(rows), np.array(rows)),
        {},
    )
    return write_manifest(
        locate(str(folder)),
        columns,
        files=[ShardFile("part-00000.parquet", sum(rows), 10, 0)],
        classes=["cat", "dog"],
        max_labels=1,
        origin=dict(origin),
    )


def test_a_manifest_says_what_was_converted(dataset: Manifest) -> None:
    assert (dataset.num_images, dataset.num_classes, dataset.max_labels) == (300, 3, 1)
    assert dataset.classes == ["class_0", "class_1", "class_2"]
    assert dataset.rows.tolist() == [16] * 18 + [12]
    assert len(dataset.files) > 3
    assert sum(file.rows for file in dataset.files) == 300
    sizes = [file.bytes for file in dataset.files]
    assert max(sizes) < 0.15 * 2**20  # asked for 0.1 MiB, in whole row groups
    assert np.mean(sizes) > 0.07 * 2**20


def test_row_groups_and_bytes_equal_the_footers_of_the_shards(dataset: Manifest) -> None:
    rows: list[int] = []
    for file in dataset.files:
        path = Path(dataset.root) / file.path
        metadata = pq.ParquetFile(path).metadata
        assert path.stat().st_size == file.bytes
        rows += [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert rows == dataset.rows.tolist()


def test_a_manifest_survives_pickling(dataset: Manifest) -> None:
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.fingerprint == dataset.fingerprint
    np.testing.assert_array_equal(copy.first_samples, dataset.first_samples)


def test_the_fingerprint_tells_content_apart_and_not_place(tmp_path: Path) -> None:
    one = write_small(tmp_path / "a", [4, 4], seed=1)
    assert write_small(tmp_path / "b", [4, 4], seed=1) == one
    assert write_small(tmp_path / "c", [4, 4], seed=2) != one
    assert write_small(tmp_path / "d", [4, 3], seed=1) != one
    assert open_dataset(str(tmp_path / "a")).fingerprint == one


def test_a_path_without_a_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the folder does not exist"):
        open_dataset(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"has no manifest\.parquet"):
        open_dataset(str(tmp_path))


def test_credentials_in_an_address_are_refused_and_not_repeated() -> None:
    with pytest.raises(
        ValueError, match="set AWS_ACCESS_KEY_ID and its secret in the environment"
    ) as caught:
        open_dataset("s3://key:hush@bucket/set")
    assert "hush@" not in str(caught.value)
    with pytest.raises(
        ValueError, match="set AWS_ACCESS_KEY_ID and its secret in the environment"
    ) as caught:
        open_dataset("s3://key:hu/sh@bucket/set")
    assert "sh@" not in str(caught.value)


def test_an_unfinished_conversion_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_staging").mkdir()
    with pytest.raises(ValueError, match="run the same convert command again"):
        open_dataset(str(tmp_path))


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    write_small(tmp_path, [])
    with pytest.raises(ValueError, match="is empty"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize("version", [99, 3])
def test_another_format_is_refused_with_who_reads_it(tmp_path: Path, version: int) -> None:
    write_small(tmp_path, [4])
    file = tmp_path / "manifest.parquet"
    table = pq.read_table(file)
    header = json.loads(table.schema.metadata[b"vit_ray"]) | {"format_version": version}
    pq.write_table(table.replace_schema_metadata({"vit_ray": json.dumps(header)}), file)
    told = f"data set '{tmp_path}' has format {version}; this code reads format 4 only; use the"
    with pytest.raises(ValueError, match=told):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"PAR1 nonsense", b"{}" * 100])
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.parquet").write_bytes(content)
    with pytest.raises(ValueError, match="not a manifest of vit_ray or is damaged"):
        open_dataset(str(tmp_path))


def test_a_missing_shard_is_named(dataset: Manifest, tmp_path: Path) -> None:
    manifest, shard = broken_copy(dataset, tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"{shard.name}' is missing"):
        RowGroupReader(manifest).read(0)


def test_a_changed_or_truncated_shard_is_named(dataset: Manifest, tmp_path: Path) -> None:
    manifest, shard = broken_copy(dataset, tmp_path)
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(ValueError, match=rf"{shard.name}' has .* bytes and the manifest says"):
        RowGroupReader(manifest).read(0)


def test_a_shard_with_a_torn_footer_is_named(dataset: Manifest, tmp_path: Path) -> None:
    manifest, shard = broken_copy(dataset, tmp_path)
    content = shard.read_bytes()
    shard.write_bytes(content[:-200] + bytes(200))
    with pytest.raises(ValueError, match=rf"{shard.name}' cannot be read"):
        RowGroupReader(manifest).read(0)


def test_a_foreign_schema_is_named(dataset: Manifest, tmp_path: Path) -> None:
    manifest, shard = broken_copy(dataset, tmp_path)
    table = pq.read_table(shard).rename_columns(list("abcdefgh"))
    pq.write_table(table, shard)
    entry = ShardFile(shard.name, 0, shard.stat().st_size, 0)
    object.__setattr__(manifest, "files", [entry, *manifest.files[1:]])
    with pytest.raises(ValueError, match="has a foreign schema"):
        RowGroupReader(manifest).read(0)


def test_a_row_group_of_another_length_is_named(dataset: Manifest) -> None:
    manifest = pickle.loads(pickle.dumps(dataset))
    object.__setattr__(manifest, "rows", dataset.rows + 1)
    with pytest.raises(
        ValueError, match=r"part-00000.*has 16 rows in row group 0 and the manifest says 17"
    ):
        RowGroupReader(manifest).read(0)
