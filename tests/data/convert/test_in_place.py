"""Parquet files that are read where they lie: the same images as copied ones, and never written."""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import rejections, write_hub_file
from tests.data.converting import convert
from tests.data.pictures import encoded, picture
from vit_ray.data import open_dataset
from vit_ray.data.boxes import Augmentation
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.dataset import Manifest
from vit_ray.data.order import Partition
from vit_ray.data.parts import subset
from vit_ray.data.shards import ChangedImageError, RowGroupReader, first_labels, keys
from vit_ray.data.stream.batches import BatchReader, StreamJob, StreamSpec

NAMES = ["cat", "dog", "owl"]
FEATURES = {"label": {"names": NAMES, "_type": "ClassLabel"}}
IMAGES = [encoded(picture(i, 30 + i, 40), "JPEG" if i % 3 else "PNG") for i in range(24)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two files of 14 and 10 images, sorted by class, in row groups of 5; the 7th is broken."""
    images: list[bytes | None] = [*IMAGES]
    images[6] = b"no image"
    labels = [i // 8 for i in range(24)]
    for number, part in enumerate((slice(0, 14), slice(14, 24))):
        file = tmp_path / "hub" / "data" / f"train-{number:05d}-of-00002.parquet"
        write_hub_file(file, images[part], labels[part], FEATURES)
    return tmp_path / "hub"


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}"
        for path in files
    }


def in_place(source: Path, target: Path, **options: Any) -> Manifest:
    convert(source, target, in_place=True, max_rejected_fraction=0.1, **options)
    return open_dataset(str(target))


def stored(manifest: Manifest) -> dict[str, tuple[bytes, str, tuple[int, int]]]:
    """Key to bytes, class and size of each image that counts."""
    reader, found = RowGroupReader(manifest), {}
    for group in range(manifest.num_row_groups):
        rows = reader.read(group)
        for at in manifest.stored_rows(group).tolist():
            (label,) = rows.labels_of(at)
            found[rows.key(at)] = rows.image(at), manifest.classes[label], rows.size(at)
    return found


def batch_of(manifest: Manifest) -> dict[str, Any]:
    spec = StreamSpec(manifest, Augmentation(size=16), seed=2)
    job = StreamJob(spec, Partition(1, 46), 0, is_training=True)
    return BatchReader(job).batch(0, 0, 46)[0]


def test_the_images_are_those_of_a_copy_and_the_files_stay_as_they_are(serial, source, tmp_path):
    before = digests(source)
    manifest = in_place(source, tmp_path / "set")
    convert(source, tmp_path / "copy", max_rejected_fraction=0.1, index_jpeg=False)
    assert stored(manifest) == stored(open_dataset(str(tmp_path / "copy")))
    assert digests(source) == before
    assert sum(path.stat().st_size for path in (tmp_path / "set").iterdir()) < 40_000
    assert list(rejections(tmp_path / "set")) == ["data/train-00000-of-00002/00000006"]
    counted = b"".join(b"data/train-0000%d-of-00002.parquet %d\n" % n for n in ((0, 14), (1, 10)))
    assert manifest.origin["source_digest"] == hashlib.sha256(counted).hexdigest()[:16]
    assert manifest.num_images == 23
    assert manifest.rows.tolist() == [5, 4, 4, 5, 5]
    assert [len(some) for some in keys(manifest)] == [13, 10]


def test_it_is_read_verified_and_cut_as_any_data_set(serial, source, tmp_path):
    manifest = in_place(source, tmp_path / "set")
    batch = batch_of(manifest)
    assert sorted(np.bincount(batch["sample"])) == [2] * 23  # two epochs
    labels = np.concatenate(list(first_labels(manifest)))
    np.testing.assert_array_equal(batch["labels"][:, 0], labels[batch["sample"]])
    part = subset(manifest.path, str(tmp_path / "part"), count=9)
    assert stored(part).items() <= stored(manifest).items()
    assert len(stored(part)) == 9
    for file in (0, 1):
        report = check_file(file, manifest, 1.0)
        assert (report.problems, report.num_images) == ([], (13, 10)[file])


def test_a_damaged_page_of_images_that_lie_elsewhere_costs_none(serial, source, tmp_path):
    manifest = in_place(source, tmp_path / "set")
    before = stored(manifest)
    shard = Path(manifest.shard_location(0).path)
    column = pq.read_metadata(shard).row_group(0).column(0)
    assert column.path_in_schema == "image"
    content = bytearray(shard.read_bytes())
    first = column.dictionary_page_offset or column.data_page_offset
    content[first + column.total_compressed_size - 1] ^= 1
    shard.write_bytes(content)
    assert stored(manifest) == before


@pytest.mark.parametrize("change", ["longer", "touched", "other bytes of equal length and time"])
def test_a_file_that_changed_is_seen_when_it_is_opened_or_read(serial, source, tmp_path, change):
    manifest = in_place(source, tmp_path / "set")
    file = next((source / "data").glob("*00000-of*"))
    status = file.stat()
    if change == "longer":
        file.write_bytes(file.read_bytes() + b"x")
    elif change == "touched":
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    else:
        content = file.read_bytes()
        assert content.count(IMAGES[3]) == 1
        other = IMAGES[3][:-20] + b"y" * 18 + IMAGES[3][-2:]
        file.write_bytes(content.replace(IMAGES[3], other))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        rows = RowGroupReader(manifest).read(0)
        assert rows.image(2) == IMAGES[2]
        with pytest.raises(ChangedImageError):
            rows.image(3)
        assert [p.key for p in check_file(0, manifest, 0.0).problems] == [rows.key(3)]
        return
    with pytest.raises(ValueError, match=r"00000-of-00002.parquet has changed since the data set"):
        RowGroupReader(manifest).read(0)
    RowGroupReader(manifest).read(4)  # of the other file
    assert "has changed since" in check_file(0, manifest, 0.0).problems[0].what


def test_a_file_that_changes_while_its_images_are_looked_at_is_an_error(
    serial, source, tmp_path, monkeypatch
):
    from vit_ray.data.convert import shards

    rows = shards.parquet_rows

    def touching(unit: Any) -> Any:
        os.utime(unit.path, ns=(0, 0))
        return rows(unit)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "parquet_rows", touching)
        with pytest.raises(ValueError, match=r"00000-of-00002.parquet has changed since this conv"):
            in_place(source, tmp_path / "set")
    assert not (tmp_path / "set" / "manifest.parquet").exists()
    assert in_place(source, tmp_path / "set").num_images == 23


@pytest.mark.parametrize("kind", ["names", "indices"])
def test_images_may_have_several_labels(serial, tmp_path, kind):
    lists: list[Any] = [[0, 1], [1], [2, 0], [1, None], [], None]
    names: Any = [one and [n if n is None else NAMES[n] for n in one] for one in lists]
    features = {"label": {"feature": {"names": NAMES}}} if kind == "indices" else None
    file = tmp_path / "hub" / "train.parquet"
    write_hub_file(file, IMAGES[:6], lists if kind == "indices" else names, features)
    found = []
    for place in (True, False):
        target = tmp_path / f"set {place}"
        convert(file, target, in_place=place, max_rejected_fraction=0.5, index_jpeg=False)
        manifest, rows = (
            open_dataset(str(target)),
            RowGroupReader(open_dataset(str(target))).read(0),
        )
        at = manifest.stored_rows(0).tolist()
        found.append({rows.key(i): [manifest.classes[k] for k in rows.labels_of(i)] for i in at})
    assert found[0] == found[1]
    assert list(found[0].values()) == [["cat", "dog"], ["dog"], ["owl", "cat"]]


def test_the_same_files_elsewhere_make_the_same_data_set(serial, source, tmp_path):
    first = in_place(source, tmp_path / "set")
    moved = source.rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=rf"{source}/.*parquet' is missing on {platform.node()} though the"
    ):
        RowGroupReader(first).read(0)
    assert in_place(moved, tmp_path / "again").fingerprint == first.fingerprint


def test_what_cannot_be_exact_is_refused(serial, source, tmp_path):
    folder = tmp_path / "images" / "a"
    folder.mkdir(parents=True)
    (folder / "1.jpg").write_bytes(IMAGES[1])
    with pytest.raises(ValueError, match=r"is of the format 'folder'; only parquet files in the"):
        in_place(folder.parent, tmp_path / "set")
    with pytest.raises(ValueError, match=r"is in convert.source=.*; choose a folder outside"):
        in_place(source, source / "set")
    with pytest.raises(ValueError, match=r"next to its files; choose a folder outside '.*/data'"):
        in_place(source / "data" / "*.parquet", source / "data" / "set")
    for change in ({"shrink_to": 64}, {"apply_orientation": True}):
        with pytest.raises(ValueError, match=r"in_place=true with shrink_to or apply_orientation"):
            in_place(source, tmp_path / "set", **change)
    assert not (source / "set").exists()


def test_row_groups_that_cannot_be_read_are_refused_before_any_image_is(
    serial, source, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("vit_ray.data.convert.tables.MOST_ROW_GROUP_BYTES", 100)
        with pytest.raises(ValueError, match=r"row group 0 has 0 MiB of images; in place it needs"):
            in_place(source, tmp_path / "set")
    assert not (tmp_path / "set").exists()  # and so can be converted by copying
    file = tmp_path / "empty" / "train.parquet"
    file.parent.mkdir()
    table = pa.table({"image": [{"bytes": IMAGES[0], "path": "0"}], "label": ["a"]})
    with pq.ParquetWriter(file, table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
    assert pq.ParquetFile(file).metadata.num_row_groups == 2
    with pytest.raises(ValueError, match="row group 0 has no rows"):
        in_place(file, tmp_path / "empty set")
    assert not (tmp_path / "empty set").exists()


def test_a_set_without_rows_is_refused(serial, tmp_path):
    file = tmp_path / "hub" / "train.parquet"
    file.parent.mkdir()
    schema = pa.schema({"image": pa.struct({"bytes": pa.binary()}), "label": pa.string()})
    with pq.ParquetWriter(file, schema):
        pass
    with pytest.raises(ValueError, match=r"train.parquet' holds no images; check its format"):
        in_place(file, tmp_path / "set")


def test_equal_images_that_a_file_has_once_count_as_often_as_they_are_read(
    serial, tmp_path, monkeypatch
):
    """By a dictionary of parquet: its footer says the bytes of one of them."""
    file = tmp_path / "hub" / "train.parquet"
    write_hub_file(file, [IMAGES[0]] * 5, ["a"] * 5)
    chunk = pq.ParquetFile(file).metadata.row_group(0).column(0)
    assert chunk.total_uncompressed_size < 3.1 * len(IMAGES[0])
    convert(file, tmp_path / "set", in_place=True)
    assert 5 * len(IMAGES[0]) < open_dataset(str(tmp_path / "set")).bytes[0]
    monkeypatch.setattr("vit_ray.data.convert.tables.MOST_ROW_GROUP_BYTES", 5 * len(IMAGES[0]) - 1)
    with pytest.raises(ValueError, match=r"group 0 has 0 MiB of images; .* to another folder"):
        convert(file, tmp_path / "other", in_place=True)
    assert not (tmp_path / "other" / "manifest.parquet").exists()


def test_a_row_group_without_a_usable_image_is_left_out(serial, tmp_path):
    file = tmp_path / "hub" / "train.parquet"
    images, labels = [*IMAGES[:5], *[b"junk"] * 5, IMAGES[5], None, *IMAGES[6:9]], "abcabaaaaabcbac"
    write_hub_file(file, images, list(labels))
    convert(file, tmp_path / "set", in_place=True, max_rejected_fraction=0.5)
    manifest = open_dataset(str(tmp_path / "set"))
    assert manifest.rows.tolist() == [5, 4]
    assert manifest.row_group.tolist() == [0, 2]
    assert [image for image, *_ in stored(manifest).values()] == IMAGES[:9]
    assert "".join(label for _, label, _ in stored(manifest).values()) == "abcabbbac"


def test_an_interrupted_one_makes_no_shard_twice(serial, source, tmp_path, monkeypatch):
    from vit_ray.data.convert import shards

    made: list[int] = []
    written = shards.write_in_place

    def dying(shard: int, *rest: Any) -> Any:
        if shard == 1 and len(made) == 1:
            made.append(-1)
            raise KeyboardInterrupt
        made.append(shard)
        return written(shard, *rest)

    monkeypatch.setattr(shards, "write_in_place", dying)
    with pytest.raises(KeyboardInterrupt):
        in_place(source, tmp_path / "set")
    assert in_place(source, tmp_path / "set").num_images == 23
    assert made == [0, -1, 1]
