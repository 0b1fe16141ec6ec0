import json
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import add, converted
from tests.data.converting import convert
from tests.data.pictures import jpeg
from vit_ray.data import open_dataset
from vit_ray.data.images import decode
from vit_ray.data.shards import RowGroupReader

IMAGES = {f"{i:03d}": jpeg(i) for i in range(12)}


def test_tar_shards_in_webdataset_format(serial, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for shard in range(2):
        with tarfile.open(source / f"train-{shard}.tar", "w") as tar:
            for name, image in list(IMAGES.items())[shard::2]:
                add(tar, f"./a/{name}.jpg", image)
                add(tar, f"./a/{name}.cls", str(int(name) % 3).encode())
    rows = converted(source, tmp_path / "set")
    assert rows == {
        f"train-{int(name) % 2}/./a/{name}": (image, [str(int(name) % 3)])
        for name, image in IMAGES.items()
    }


def test_tar_samples_with_json_labels_and_without_any(serial, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    with tarfile.open(source / "only.tar", "w") as tar:
        add(tar, "one.jpeg", IMAGES["001"])
        add(tar, "one.json", json.dumps({"labels": ["cat", "dog"]}).encode())
        add(tar, "two.seg.png", b"not this one")
        add(tar, "two.json", json.dumps({"label": "dog"}).encode())
        add(tar, "three.jpg", IMAGES["003"])
        add(tar, "four.jpg", IMAGES["004"])
        add(tar, "four.json", b"{broken")
    rows = converted(source, tmp_path / "set", max_rejected_fraction=0.9)
    assert rows == {"only/one": (IMAGES["001"], ["cat", "dog"])}
    assert open_dataset(str(tmp_path / "set")).max_labels == 2
    rejected = pq.read_table(tmp_path / "set" / "rejected.parquet").to_pylist()
    reasons = {row["key"]: row["reason"] for row in rejected}
    assert "takes it for the file 'seg.png' of the sample" in reasons["only/two.seg.png"]
    assert "has no .cls or .json label" in reasons["only/three"]
    assert "its .json is not JSON" in reasons["only/four"]


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_lists_of_paths_and_labels(serial, tmp_path, format):
    (tmp_path / "images").mkdir()
    for name, image in IMAGES.items():
        (tmp_path / "images" / f"{name}.jpg").write_bytes(image)
    labels = {name: "cat;dog" if i % 3 == 0 else "cat" for i, name in enumerate(IMAGES)}
    listed = [(f"images/{name}.jpg", labels[name]) for name in IMAGES]
    listed += [(str(tmp_path / "images" / "000.jpg"), "dog"), ("images/none.jpg", "cat")]
    file = tmp_path / f"list.{format}"
    if format == "csv":
        rows = [f'"{path}","{label}"' for path, label in listed]
        file.write_text("\n".join(["path,labels", *rows]) + "\n", encoding="utf-8")
    else:
        lines = [json.dumps({"path": p, "labels": label.split(";")}) for p, label in listed]
        file.write_text("\n".join(lines), encoding="utf-8")
    found = converted(file, tmp_path / "set")
    assert found == {
        path: (IMAGES[Path(path).stem], label.split(";")) for path, label in listed[:-1]
    }
    rejected = pq.read_table(tmp_path / "set" / "rejected.parquet").to_pylist()
    assert [row["key"] for row in rejected] == ["images/none.jpg"]
    assert "no such file" in rejected[0]["reason"]


def test_a_key_is_taken_once(serial, tmp_path):
    """The second list names an image of the first, and one of its own twice."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b", "c"):
        (source / f"{name}.jpg").write_bytes(IMAGES["000"])
    (source / "one.csv").write_text("path,label\na.jpg,cat\nb.jpg,dog\n")
    (source / "two.csv").write_text("path,label\nc.jpg,cat\na.jpg,dog\nc.jpg,dog\n")
    report = convert(str(source), str(tmp_path / "set"), max_rejected_fraction=0.9)
    assert (report.num_images, report.num_rejected) == (3, 2)
    assert report.label_histogram == {"cat": 2, "dog": 1}
    rejected = pq.read_table(tmp_path / "set" / "rejected.parquet").to_pylist()
    assert sorted(row["key"] for row in rejected) == ["a.jpg", "c.jpg"]
    assert all("an earlier row of the source has the same key" in row["reason"] for row in rejected)


def test_large_images_are_shrunk_only_when_asked(serial, tmp_path):
    folder = tmp_path / "source" / "cat"
    folder.mkdir(parents=True)
    (folder / "large.jpg").write_bytes(jpeg(1, 120, 200))
    (folder / "small.jpg").write_bytes(jpeg(2, 50, 40))
    convert(str(tmp_path / "source"), str(tmp_path / "set"), shrink_to=60, index_jpeg=False)
    manifest = open_dataset(str(tmp_path / "set"))
    rows = pq.read_table(tmp_path / "set" / manifest.files[0].path).to_pylist()
    sizes = {row["key"]: (row["height"], row["width"]) for row in rows}
    assert sizes == {"cat/large.jpg": (60, 100), "cat/small.jpg": (50, 40)}
    images = {row["key"]: row["image"] for row in rows}
    assert images["cat/small.jpg"] == (folder / "small.jpg").read_bytes()
    assert len(images["cat/large.jpg"]) < (folder / "large.jpg").stat().st_size


def test_a_shrunk_image_has_restart_markers_too(serial, tmp_path):
    folder = tmp_path / "source" / "cat"
    folder.mkdir(parents=True)
    (folder / "large.jpg").write_bytes(jpeg(1, 300, 400))
    convert(str(tmp_path / "source"), str(tmp_path / "set"), shrink_to=60)
    manifest = open_dataset(str(tmp_path / "set"))
    rows = RowGroupReader(manifest).read(0)
    stored = rows.stored(0)
    assert (stored.size, decode(bytes(stored.content)).shape) == ((60, 80), (60, 80, 3))
    assert stored.index is not None
