"""Readable sets are read, and what is refused is refused with what to do about it."""

import errno
import json
import zlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import (
    converted,
    example,
    labels_of,
    record,
    rejections,
    tar_of,
)
from tests.data.converting import convert
from tests.data.pictures import jpeg
from vit_ray.data import open_dataset
from vit_ray.data.convert import rows
from vit_ray.data.convert.rows import Row
from vit_ray.data.shards import RowGroupReader
from vit_ray.storage import Location

pytestmark = pytest.mark.usefixtures("serial")
IMAGES = [jpeg(i, 20, 24) for i in range(6)]
SAME = [IMAGES[0]] * 6


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (pa.array(IMAGES, pa.binary_view()), pa.array(list("abcabc"), pa.string_view())),
        (pa.array(IMAGES).dictionary_encode(), pa.array(list("abcabc")).dictionary_encode()),
        (pa.array(SAME, pa.binary(len(SAME[0]))), pa.array(list("abcabc"), pa.large_string())),
        (pa.array([{"bytes": i} for i in IMAGES]), pa.array([["a"], ["b"], ["c"]] * 2)),
    ],
)
def test_arrows_other_types_are_read(tmp_path, images, labels):
    (tmp_path / "hub").mkdir()
    source = tmp_path / "hub" / "train.parquet"
    pq.write_table(pa.table({"image": images, "label": labels}), source)
    expected = {f"train/{i:08d}": "abcabc"[i] for i in range(6)}
    rows = converted(source, tmp_path / "set")
    assert labels_of(rows) == expected
    convert(source, tmp_path / "in place", in_place=True)
    read = RowGroupReader(open_dataset(str(tmp_path / "in place"))).read(0)
    assert [read.image(i) for i in range(6)] == [rows[key][0] for key in expected]


def test_images_that_are_not_embedded_are_said_so(tmp_path):
    images = [{"bytes": None, "path": f"images/{i}.jpg"} for i in range(3)]
    pq.write_table(pa.table({"image": images, "label": [0, 1, 0]}), tmp_path / "train.parquet")
    told = r"no bytes, only the path 'images/\d.jpg': it is not embedded; .*embed_table_storage"
    with pytest.raises(ValueError, match=told):
        convert(tmp_path / "train.parquet", tmp_path / "set")


def test_kaggles_imagenet_is_read_by_its_lists(tmp_path):
    root = tmp_path / "kaggle"
    images = root / "ILSVRC" / "Data" / "CLS-LOC" / "val"
    images.mkdir(parents=True)
    box = "{} 85 1 499 272 "
    names = ["n03995372", "n03481172", "n02120505"]
    boxes = [box.format(names[0]), box.format(names[1]) * 3, f"{names[2]} -1 0 3 4"]
    for i in range(3):
        (images / f"ILSVRC2012_val_{i:08d}.JPEG").write_bytes(IMAGES[i])
    for name in ("train_solution", "val_solution", "sample_submission"):
        rows = "".join(f"ILSVRC2012_val_{i:08d},{text}\n" for i, text in enumerate(boxes))
        (root / f"LOC_{name}.csv").write_text(f"ImageId,PredictionString\n{rows}")
    with pytest.raises(ValueError, match=r"several splits: \(files .*\), train, validation; give"):
        convert(root, tmp_path / "set")
    options = {"image_field": "ImageId", "label_field": "PredictionString", "split": "val"}
    pattern = "ILSVRC/Data/CLS-LOC/val/{}.JPEG"
    found = labels_of(converted(root, tmp_path / "set", image_pattern=pattern, **options))
    assert found == {
        pattern.format(f"ILSVRC2012_val_{i:08d}"): name for i, name in enumerate(names)
    }


def test_bare_ids_become_paths_by_a_pattern(tmp_path):
    (tmp_path / "val").mkdir()
    for i in range(3):
        (tmp_path / "val" / f"ILSVRC2012_val_{i}.JPEG").write_bytes(IMAGES[i])
        (tmp_path / f"{i}.jpg").write_bytes(IMAGES[i])
    rows = "".join(f"ILSVRC2012_val_{i},n0{i}\n" for i in range(3))
    (tmp_path / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + rows)
    options = {"image_field": "ImageId", "label_field": "PredictionString"}
    rows_found = converted(
        tmp_path / "LOC_val_solution.csv", tmp_path / "set", image_pattern="val/{}.JPEG", **options
    )
    assert labels_of(rows_found) == {f"val/ILSVRC2012_val_{i}.JPEG": f"n0{i}" for i in range(3)}
    lines = [json.dumps({"path": i, "label": "abc"[i]}) for i in range(3)]
    (tmp_path / "ids.jsonl").write_text("\n".join(lines))
    found = converted(tmp_path / "ids.jsonl", tmp_path / "ids", image_pattern="{}.jpg")
    assert labels_of(found) == {f"{i}.jpg": "abc"[i] for i in range(3)}
    pq.write_table(pa.table({"image": [b"x"], "label": [0]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"convert.image_pattern='x\{\}' is not for the format"):
        convert(tmp_path / "a.parquet", tmp_path / "no", image_pattern="x{}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("columns", ("caption",)), ("label_field", "breed"), ("image_field", "picture"),
        ("image_pattern", "{}.jpg"),
    ],
)  # fmt: skip
def test_class_folders_have_no_fields(tmp_path, image_folder, key, value):
    told = rf"convert.{key}=.* is not for the format .* is 'folder'; leave it out, or give a list"
    with pytest.raises(ValueError, match=told):
        convert(image_folder, tmp_path / "set", **{key: value})


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"cat/1.jpg": IMAGES[0], "dog/2.jpg": IMAGES[1]}, "If its folders are classes, unpack"),
        ({"n01_1.JPEG": IMAGES[0]}, "mkdir CLASS && tar -xf CLASS.tar -C CLASS"),
        ({"n01.tar": b"x", "n02.tar": b"x"}, "holds other archives; unpack it: "),
    ],
)
def test_archives_without_labels_are_to_be_unpacked(tmp_path, files, told):
    (tmp_path / "a.tar").write_bytes(tar_of([*files.items()]))
    with pytest.raises(ValueError, match=rf"a.tar' .*{told}"):
        convert(tmp_path / "a.tar", tmp_path / "set")


def test_the_files_of_a_sample_may_stand_apart(tmp_path):
    images = [(f"{i}.jpg", image) for i, image in enumerate(IMAGES)]
    labels = [(f"{i}.cls", b"ab"[i % 2 : i % 2 + 1]) for i in reversed(range(6))]
    (tmp_path / "a.tar").write_bytes(tar_of([*images, *labels]))
    assert converted(tmp_path / "a.tar", tmp_path / "set") == {
        f"a/{i}": (IMAGES[i], ["ab"[i % 2]]) for i in range(6)
    }


def test_a_label_named_after_the_whole_file_is_named(tmp_path):
    pairs = [("0.jpg", IMAGES[0]), ("0.cls", b"a"), ("1.jpg", IMAGES[1]), ("1.jpg.cls", b"a")]
    (tmp_path / "a.tar").write_bytes(tar_of(pairs))
    converted(tmp_path / "a.tar", tmp_path / "set", max_rejected_fraction=0.5)
    assert rejections(tmp_path / "set") == {
        "a/1": "the sample has no .cls or .json label, only ['jpg', 'jpg.cls']"
    }


def test_addresses_in_a_list_are_to_be_downloaded(tmp_path):
    (tmp_path / "list.csv").write_text("path,label\nhttps://x.org/1.jpg,a\nhttp://x.org/2.jpg,b\n")
    with pytest.raises(ValueError, match=r"it is a URL; download the images first"):
        convert(tmp_path / "list.csv", tmp_path / "set")


@pytest.mark.parametrize("level", [0, 1, 6, 9])
def test_records_that_zlib_packed_are_named_as_such(tmp_path, level):
    content = record(example(image=IMAGES[0], label=[0]))
    (tmp_path / "a.tfrecord").write_bytes(zlib.compress(content, level))
    with pytest.raises(ValueError, match=r"a.tfrecord' is compressed with zlib; decompress it"):
        convert(tmp_path / "a.tfrecord", tmp_path / "set")


def test_a_class_folder_with_a_line_break_is_refused(tmp_path):
    (tmp_path / "s" / "c\nat").mkdir(parents=True)
    (tmp_path / "s" / "c\nat" / "1.jpg").write_bytes(IMAGES[0])
    with pytest.raises(ValueError, match="line break"):
        convert(tmp_path / "s", tmp_path / "set")


def test_one_denied_object_is_one_rejected_row(monkeypatch):
    def denied(*_: Any) -> bytes:
        raise PermissionError(errno.EACCES, "Access Denied")

    monkeypatch.setattr(Location, "read_range", denied)
    monkeypatch.setattr(rows, "check_reachable", lambda _: None)
    with pytest.raises(ValueError, match=r"it cannot be read: .*Access Denied"):
        Row("key", path="s3://bucket/a.jpg").read()
    monkeypatch.setattr(rows, "check_reachable", denied)
    with pytest.raises(PermissionError):  # the credentials are refused as a whole
        Row("key", path="s3://bucket/a.jpg").read()
    with pytest.raises(PermissionError):  # of an archive, all rows would be denied
        Row("key", path="s3://bucket/a.tar", offset=512, length=9).read()


def test_a_full_temporary_disk_is_named(small_disk, tmp_path, monkeypatch):
    rows = "".join(f"{i}.jpg,x,{'c' * 1000}\n" for i in range(4000))
    (tmp_path / "list.csv").write_text("path,label,caption\n" + rows)
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    with pytest.raises(OSError, match=rf"set TMPDIR to a larger disk.*{small_disk}"):
        convert(tmp_path / "list.csv", tmp_path / "set", columns=["caption"])


def test_a_pack_that_is_gone_or_short_is_no_rejected_row(tmp_path):
    pack = tmp_path / "index-0.bin"
    with pytest.raises(FileNotFoundError):
        Row("key", path=str(pack), offset=0, length=9).read()
    pack.write_bytes(b"12345")
    with pytest.raises(OSError, match="3 of 9 bytes at 2 are there"):
        Row("key", path=str(pack), offset=2, length=9).read()
    assert Row("key", path=str(pack), offset=2, length=3).read() == b"345"
