"""Parquet files of the hub: copied, and read where they lie, which never writes them."""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import (
    converted,
    labels_of,
    parquet,
    rejections,
    write_files,
    write_hub_file,
)
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


SAME = [IMAGES[1]] * 6


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (pa.array(IMAGES[:6], pa.binary_view()), pa.array(list("abcabc"), pa.string_view())),
        (pa.array(IMAGES[:6]).dictionary_encode(), pa.array(list("abcabc")).dictionary_encode()),
        (pa.array(SAME, pa.binary(len(SAME[0]))), pa.array(list("abcabc"), pa.large_string())),
        (pa.array([{"bytes": i} for i in IMAGES[:6]]), pa.array([["a"], ["b"], ["c"]] * 2)),
    ],
)
def test_arrows_other_types_are_read(serial, tmp_path, images, labels):
    content = parquet({"image": images, "label": labels})
    source = write_files(tmp_path / "hub", {"train.parquet": content}) / "train.parquet"
    expected = {f"train/{i:08d}": "abcabc"[i] for i in range(6)}
    rows = converted(source, tmp_path / "set")
    assert labels_of(rows) == expected
    convert(source, tmp_path / "in place", in_place=True)
    read = RowGroupReader(open_dataset(str(tmp_path / "in place"))).read(0)
    assert [read.image(i) for i in range(6)] == [rows[key][0] for key in expected]


def test_a_damaged_row_group_costs_its_own_rows(serial, tmp_path):
    file = tmp_path / "train.parquet"
    write_hub_file(file, IMAGES[:12], [i % 2 for i in range(12)])
    content = bytearray(file.read_bytes())
    column = pq.ParquetFile(file).metadata.row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin : begin + 20] = bytes(20)
    file.write_bytes(content)
    rows = converted(file, tmp_path / "set", max_rejected_fraction=0.9)
    assert sorted(rows) == [f"train/{i:08d}" for i in (0, 1, 2, 3, 4, 10, 11)]
    reasons = rejections(tmp_path / "set")
    assert sorted(reasons) == [f"train/{i:08d}" for i in range(5, 10)]
    assert all("row group 1 is damaged" in reason for reason in reasons.values())


def test_the_images_are_those_of_a_copy_and_the_files_stay_as_they_are(serial, source, tmp_path):
    def state() -> dict[Path, Any]:
        return {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in source.glob("*/*")}

    before = state()
    manifest = in_place(source, tmp_path / "set")
    convert(source, tmp_path / "copy", max_rejected_fraction=0.1, index_jpeg=False)
    assert stored(manifest) == stored(open_dataset(str(tmp_path / "copy")))
    assert state() == before
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


def test_a_file_that_changed_is_seen_when_it_is_opened(serial, source, tmp_path):
    manifest = in_place(source, tmp_path / "set")
    os.utime(source / "data" / "train-00000-of-00002.parquet", ns=(0, 0))
    with pytest.raises(ValueError, match=r"00000-of-00002.parquet has changed since the data set"):
        RowGroupReader(manifest).read(0)
    RowGroupReader(manifest).read(4)  # of the other file
    assert "has changed since" in check_file(0, manifest, 0.0).problems[0].what


def test_an_image_that_changed_is_seen_though_its_file_has_the_same_length_and_time(
    serial, source, tmp_path
):
    manifest = in_place(source, tmp_path / "set")
    file = source / "data" / "train-00000-of-00002.parquet"
    status, content = file.stat(), file.read_bytes()
    assert content.count(IMAGES[3]) == 1
    other = IMAGES[3][:-20] + b"y" * 18 + IMAGES[3][-2:]
    file.write_bytes(content.replace(IMAGES[3], other))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    rows = RowGroupReader(manifest).read(0)
    assert rows.image(2) == IMAGES[2]
    with pytest.raises(ChangedImageError):
        rows.image(3)
    assert [p.key for p in check_file(0, manifest, 0.0).problems] == [rows.key(3)]


@pytest.mark.parametrize("is_in_place", [False, True])
def test_images_may_have_several_labels(serial, tmp_path, is_in_place):
    labels: list[Any] = [[0, 1], [1], [2, 0], [1, None], [], None]
    features = {"label": {"feature": {"names": NAMES}}}
    write_hub_file(tmp_path / "hub" / "a.parquet", IMAGES[:6], labels, features)
    convert(tmp_path / "hub", tmp_path / "set", in_place=is_in_place, max_rejected_fraction=0.5)
    manifest = open_dataset(str(tmp_path / "set"))
    rows, found = RowGroupReader(manifest).read(0), {}
    for at in manifest.stored_rows(0).tolist():
        found[rows.key(at)] = [manifest.classes[label] for label in rows.labels_of(at)]
    expected = [["cat", "dog"], ["dog"], ["owl", "cat"]]
    assert found == {f"a/{i:08d}": names for i, names in enumerate(expected)}
    reasons = ["a label is null", "it has no label", "it has no label"]
    assert list(rejections(tmp_path / "set").values()) == reasons


def test_the_same_files_elsewhere_make_the_same_data_set(serial, source, tmp_path):
    first = in_place(source, tmp_path / "set")
    moved = source.rename(tmp_path / "moved")
    told = rf"{source}/.*parquet' is missing on {platform.node()} though the"
    with pytest.raises(ValueError, match=told):
        RowGroupReader(first).read(0)
    assert in_place(moved, tmp_path / "again").fingerprint == first.fingerprint


def test_a_destination_beside_the_files_is_refused(serial, source):
    for files, target in ((source, source / "set"), (source / "data/*.parquet", source / "data/a")):
        with pytest.raises(ValueError, match="or next to its files; choose a folder outside"):
            in_place(files, target)
    assert [path.name for path in source.iterdir()] == ["data"]
    assert len(list((source / "data").iterdir())) == 2


def test_row_groups_that_are_too_large_are_refused_before_any_image_is_read(
    serial, source, tmp_path, monkeypatch
):
    monkeypatch.setattr("vit_ray.data.convert.tables.MOST_ROW_GROUP_BYTES", 100)
    with pytest.raises(ValueError, match=r"row group 0 has 0 MiB of images; in place it needs"):
        in_place(source, tmp_path / "set")
    assert not (tmp_path / "set").exists()  # and so can be converted by copying


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
