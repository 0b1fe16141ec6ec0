"""Which fields of a source are the image, the label, and text that goes with its image."""

import csv
import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import (
    converted,
    example,
    labels_of,
    parquet,
    record,
    tar_of,
    write_files,
)
from tests.data.converting import convert, units
from tests.data.pictures import jpeg
from vit_ray.data import open_dataset
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.convert.labels import stored_text
from vit_ray.data.convert.sources import rows_of
from vit_ray.data.parts import subset
from vit_ray.data.shards import RowGroupReader

pytestmark = pytest.mark.usefixtures("serial")
IMAGES = [jpeg(i, 20, 24) for i in range(6)]
FILES = {f"{i}.jpg": image for i, image in enumerate(IMAGES)}
STRUCTS = [{"bytes": image} for image in IMAGES]
CAPTIONS = ["a cat, sitting", "", "caf\xe9\nof two lines", 'said "so"', None, "\u732b"]
NUMBERS = [7, -1, 2**40, 0, 3, 4]

CLASS_LABELS = {
    name: {"names": names, "_type": "ClassLabel"}
    for name, names in (("label", ["bee", "cat"]), ("class", ["dog", "owl"]))
}
LISTED = {"left": "0.jpg", "right": "1.jpg", "label": "cat", "class": "dog"}
COLUMNS = {"left": STRUCTS[:1], "right": STRUCTS[1:2], "label": [1], "class": [0]}
MEMBERS = [
    ("0.left.jpg", IMAGES[0]),
    ("0.right.jpg", IMAGES[1]),
    ("0.json", b'{"label": "cat", "class": "dog"}'),
]
FEATURES = {"left": IMAGES[0], "right": IMAGES[1], "label": b"cat", "class": b"dog"}
SEVERAL: dict[str, Any] = {
    "a.csv": "Left,right,label,Class\n0.jpg,1.jpg,cat,dog\n",
    "a.jsonl": json.dumps(LISTED),
    "a.tar": tar_of(MEMBERS),
    "a.parquet": parquet(COLUMNS, CLASS_LABELS),
    "a.tfrecord": record(example(**FEATURES)),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_of_several_images_and_labels_the_user_chooses(tmp_path, name):
    source = write_files(tmp_path, FILES | {name: SEVERAL[name]}) / name
    image_field = "right.jpg" if name == "a.tar" else "right"
    for label_field, label in (("label", "cat"), ("class", "dog")):
        options = {"image_field": image_field, "label_field": label_field}
        rows = converted(source, tmp_path / label_field, **options)
        assert list(labels_of(rows).values()) == [label]
        assert [image for image, _ in rows.values()] == [IMAGES[1]]
    # Of records, `label` alone is a usual name.
    for label_field in ("kind",) if name == "a.tfrecord" else ("kind", None):
        options = {"image_field": image_field, "label_field": label_field}
        with pytest.raises(ValueError, match=r"field for the label \(.*\), and has class"):
            converted(source, tmp_path / "none", **options)


def write_with_text(folder: Path, name: str) -> Path:
    """Six images with a caption and a number each."""
    rows = [
        {"path": path, "label": "x", "caption": caption, "id": number}
        for path, caption, number in zip(FILES, CAPTIONS, NUMBERS, strict=True)
    ]
    write_files(folder, FILES)
    if name == "a.parquet":
        columns = {"image": STRUCTS, "label": [0, 1] * 3, "caption": CAPTIONS, "id": NUMBERS}
        write_files(folder, {name: parquet(columns)})
    elif name == "a.csv":
        with (folder / name).open("w", newline="", encoding="utf-8") as sink:
            writer = csv.DictWriter(sink, ["Caption", "path", "label", "id"])
            writer.writeheader()
            writer.writerows({"Caption": row.pop("caption")} | row for row in rows)
    elif name == "a.jsonl":
        write_files(folder, {name: "\n".join(map(json.dumps, rows))})
    else:  # captions in files of their own, numbers in those of JSON
        members = [*FILES.items()]
        for i, row in enumerate(rows):
            caption = row.pop("caption")
            members.append((f"{i}.json", json.dumps(row).encode()))
            members += [] if caption is None else [(f"{i}.caption", caption.encode())]
        write_files(folder, {name: tar_of(members)})
    return folder / name


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl", "a.tar"])
def test_text_goes_with_its_image(tmp_path, name):
    options = {"columns": ["caption", "id"], "rows_per_row_group": 2, "index_jpeg": False}
    convert(write_with_text(tmp_path, name), tmp_path / "set", **options)
    manifest = open_dataset(str(tmp_path / "set"))
    assert manifest.text_columns == ("caption", "id")
    (file,) = manifest.files
    rows = {row["image"]: row for row in pq.read_table(tmp_path / "set" / file.path).to_pylist()}
    # A list of text has no word for nothing.
    captions = [c or "" for c in CAPTIONS] if name == "a.csv" else CAPTIONS
    assert [rows[image]["caption"] for image in IMAGES] == captions
    assert [rows[image]["id"] for image in IMAGES] == list(map(str, NUMBERS))


def test_text_is_checked_and_goes_along_and_readers_of_images_do_not_see_it(tmp_path):
    source = write_with_text(tmp_path, "a.parquet")
    for name, columns in (("with", ["caption"]), ("without", [])):
        convert(source, tmp_path / name, columns=columns, rows_per_row_group=2)
    one, other = (open_dataset(str(tmp_path / name)) for name in ("with", "without"))
    assert one.fingerprint != other.fingerprint
    for group in range(3):
        rows, expected = (RowGroupReader(manifest).read(group) for manifest in (one, other))
        assert rows.images.equals(expected.images)
        assert rows.labels.equals(expected.labels)
    assert subset(one.path, str(tmp_path / "part"), count=3).text_columns == ("caption",)
    assert check_file(0, one, 1.0).problems == []
    file = tmp_path / "with" / one.files[0].path
    file.write_bytes(file.read_bytes().replace(b"sitting", b"sitteng"))
    (problem,) = check_file(0, one, 1.0).problems
    assert "checksum" in problem.what


def test_text_that_is_none_rejects_its_image(tmp_path):
    """By every format that can hold such text."""
    samples = [(f"{i}.{s}", c) for i, image in enumerate(IMAGES)
               for s, c in (("jpg", image), ("cls", b"x"), ("txt", b"fine"))]  # fmt: skip
    broken = [("x.jpg", IMAGES[0]), ("x.cls", b"x"), ("x.txt", b"caf\xe9")]
    (tmp_path / "a.tar").write_bytes(tar_of([*samples, *broken]))
    text = pa.array([b"fine", b"caf\xe9"]).cast(pa.binary()).view(pa.string())
    content = parquet({"image": STRUCTS[:2], "label": [0, 0], "txt": text})
    (tmp_path / "b.parquet").write_bytes(content)
    options = {"columns": ["txt"], "max_rejected_fraction": 0.5}
    for name, count, wrong in (("a.tar", 6, "a/x"), ("b.parquet", 1, "b/00000001")):
        report = convert(tmp_path / name, tmp_path / f"set of {name}", **options)
        assert report.num_images == count
        assert "can't decode" in report.rejected[wrong]


def test_a_file_of_a_sample_tells_more_than_its_json(tmp_path):
    members = [("a.jpg", IMAGES[0]), ("a.cls", b"x"), ("a.c", b"its own"), ("a.json", b'{"c": 1}')]
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    (unit,) = units(tmp_path / "a.tar", columns=["c"])
    assert [entry.extra for entry in rows_of(unit)] == [("its own",)]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([b"x"], pa.binary(1)),
        pa.array([{"a": [{"b": b"x"}]}]),
        pa.array([b"x"]).dictionary_encode(),
    ],
)
def test_bytes_are_not_stored_as_text(tmp_path, values):
    content = parquet({"image": STRUCTS[:1], "label": [0], "id": values})
    (tmp_path / "a.parquet").write_bytes(content)
    (row,) = rows_of(*units(tmp_path / "a.parquet", columns=["id"]))
    with pytest.raises(ValueError, match="contains bytes"):
        row.read()
    assert stored_text({"day": date(2026, 1, 2)}) == '{"day": "2026-01-02"}'


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_shards_with_text_have_the_size_that_is_asked_for(tmp_path, name):
    images, caption = [jpeg(i, 20, 24) for i in range(40)], "c" * 60_000
    rows = [{"path": f"{i}.jpg", "label": "x", "caption": caption} for i in range(40)]
    structs = [{"bytes": image} for image in images]
    columns = {"image": structs, "label": [0] * 40, "caption": [caption] * 40}
    write_files(tmp_path, {f"{i}.jpg": image for i, image in enumerate(images)})
    write_files(
        tmp_path, {"a.jsonl": "\n".join(map(json.dumps, rows)), "a.parquet": parquet(columns)}
    )
    options = {"columns": ["caption"], "rows_per_row_group": 2}
    convert(tmp_path / name, tmp_path / "set", shard_mib=10 * 61_000 / 2**20, **options)
    assert len(open_dataset(str(tmp_path / "set")).files) == 4
