"""Captions and other text that a source has beside its images."""

import csv
import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import tar_of
from tests.data.converting import convert, units
from tests.data.pictures import jpeg
from vit_ray.data import open_dataset
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.convert.labels import stored_text
from vit_ray.data.convert.sources import rows_of
from vit_ray.data.dataset import Manifest
from vit_ray.data.parts import subset
from vit_ray.data.shards import RowGroupReader

IMAGES = [jpeg(i, 20, 24) for i in range(6)]
CAPTIONS = ["a cat, sitting", "", "caf\xe9\nof two lines", 'said "so"', None, "\u732b"]
NUMBERS = [7, -1, 2**40, 0, 3, 4]


def write_parquet(folder: Path) -> Path:
    columns = {"image": [{"bytes": image} for image in IMAGES], "label": [0, 1, 0, 1, 0, 1]}
    pq.write_table(pa.table({**columns, "caption": CAPTIONS, "id": NUMBERS}), folder / "a.parquet")
    return folder / "a.parquet"


def write_images(folder: Path) -> list[str]:
    for i, image in enumerate(IMAGES):
        (folder / f"{i}.jpg").write_bytes(image)
    return [f"{i}.jpg" for i in range(len(IMAGES))]


def write_csv(folder: Path) -> Path:
    with (folder / "a.csv").open("w", newline="", encoding="utf-8") as sink:
        rows = zip(CAPTIONS, write_images(folder), ["cat"] * 6, NUMBERS, strict=True)
        csv.writer(sink).writerows([["Caption", "path", "label", "id"], *rows])
    return folder / "a.csv"


def write_jsonl(folder: Path) -> Path:
    rows = zip(write_images(folder), CAPTIONS, NUMBERS, strict=True)
    lines = [json.dumps({"path": p, "label": "x", "caption": c, "id": i}) for p, c, i in rows]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder / "a.jsonl"


def write_tar(folder: Path) -> Path:
    """Captions in files of their own, numbers in those of JSON."""
    members = []
    for i, (image, text, number) in enumerate(zip(IMAGES, CAPTIONS, NUMBERS, strict=True)):
        described = json.dumps({"label": "x", "id": number}).encode()
        members += [(f"{i}.jpg", image), (f"{i}.json", described)]
        members += [] if text is None else [(f"{i}.caption", text.encode())]
    (folder / "a.tar").write_bytes(tar_of(members))
    return folder / "a.tar"


def stored_rows(manifest: Manifest) -> dict[bytes, dict[str, Any]]:
    tables = [pq.read_table(Path(manifest.root) / file.path) for file in manifest.files]
    return {row["image"]: row for table in tables for row in table.to_pylist()}


@pytest.mark.parametrize("write", [write_parquet, write_csv, write_jsonl, write_tar])
def test_text_goes_with_its_image(serial, tmp_path, write):
    target = str(tmp_path / "set")
    convert(
        str(write(tmp_path)),
        target,
        columns=["caption", "id"],
        rows_per_row_group=2,
        index_jpeg=False,
    )
    manifest = open_dataset(target)
    assert manifest.text_columns == ("caption", "id")
    rows = stored_rows(manifest)
    # A list of text has no word for nothing.
    captions = [c or "" for c in CAPTIONS] if write is write_csv else CAPTIONS
    assert [rows[image]["caption"] for image in IMAGES] == captions
    assert [rows[image]["id"] for image in IMAGES] == list(map(str, NUMBERS))


def test_readers_of_images_do_not_see_it(serial, tmp_path):
    source = str(write_parquet(tmp_path))
    for name, columns in (("with", ["caption"]), ("without", [])):
        convert(source, str(tmp_path / name), columns=columns, rows_per_row_group=2)
    one, other = (open_dataset(str(tmp_path / name)) for name in ("with", "without"))
    assert one.fingerprint != other.fingerprint
    for group in range(3):
        rows, expected = (RowGroupReader(manifest).read(group) for manifest in (one, other))
        assert rows.images.equals(expected.images)
        assert rows.labels.equals(expected.labels)
        assert rows.is_whole


def test_a_changed_letter_is_found(serial, tmp_path):
    convert(str(write_parquet(tmp_path)), str(tmp_path / "set"), columns=["caption"])
    manifest = open_dataset(str(tmp_path / "set"))
    assert check_file(0, manifest, 1.0).problems == []
    file = tmp_path / "set" / manifest.files[0].path
    file.write_bytes(file.read_bytes().replace(b"sitting", b"sitteng"))
    (problem,) = check_file(0, manifest, 1.0).problems
    assert "checksum" in problem.what


def test_a_part_has_the_columns_of_the_whole(serial, tmp_path):
    convert(str(write_parquet(tmp_path)), str(tmp_path / "set"), columns=["id"])
    assert subset(str(tmp_path / "set"), str(tmp_path / "part"), count=3).text_columns == ("id",)


@pytest.mark.parametrize(
    ("write", "columns", "message"),
    [
        (write_parquet, ["captoin"], r"has no columns 'captoin'; it has"),
        (write_parquet, ["image"], r"all data sets have columns .*'image'"),
        (write_parquet, ["id", "id"], r"has id twice; list each once"),
        (write_csv, ["captoin"], r"has no columns 'captoin'; it has"),
        (write_jsonl, ["captoin"], r"no image of the source has a field 'captoin'"),
        (write_tar, ["captoin"], r"no image of the source has a field 'captoin'"),
    ],
)
def test_a_column_that_cannot_be_had_is_an_error(serial, tmp_path, write, columns, message):
    with pytest.raises(ValueError, match=message):
        convert(str(write(tmp_path)), str(tmp_path / "set"), columns=columns)


def test_text_that_is_none_rejects_its_image(serial, tmp_path):
    """By every format that can hold such text."""
    samples = [(f"{i}.{s}", c) for i, image in enumerate(IMAGES)
               for s, c in (("jpg", image), ("cls", b"x"), ("txt", b"fine"))]  # fmt: skip
    broken = [("x.jpg", IMAGES[0]), ("x.cls", b"x"), ("x.txt", b"caf\xe9")]
    (tmp_path / "a.tar").write_bytes(tar_of([*samples, *broken]))
    options = {"columns": ["txt"], "max_rejected_fraction": 0.5}
    report = convert(str(tmp_path / "a.tar"), str(tmp_path / "set"), **options)
    assert report.num_images == 6
    assert "can't decode" in report.rejected["a/x"]
    text = pa.array([b"fine", b"caf\xe9"]).cast(pa.binary()).view(pa.string())
    images = [{"bytes": image} for image in IMAGES[:2]]
    pq.write_table(
        pa.table({"image": images, "label": [0, 0], "txt": text}), tmp_path / "b.parquet"
    )
    report = convert(str(tmp_path / "b.parquet"), str(tmp_path / "other"), **options)
    assert report.num_images == 1
    assert "can't decode" in report.rejected["b/00000001"]


def test_a_file_of_a_sample_tells_more_than_its_json(tmp_path):
    described = json.dumps({f"c{i}": "of the JSON" for i in range(9)}).encode()
    files = [(f"a.c{i}", b"of its own") for i in range(9)]
    members = [("a.jpg", IMAGES[0]), ("a.cls", b"x"), *files, ("a.json", described)]
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    (unit,) = units(tmp_path / "a.tar", columns=[f"c{i}" for i in range(9)])
    (entry,) = rows_of(unit)
    assert entry.extra == ("of its own",) * 9


def test_two_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("path,label,caption,Caption\n0.jpg,x,one,other\n")
    assert len(list(rows_of(*units(tmp_path / "a.csv")))) == 1
    with pytest.raises(ValueError, match="2 columns 'caption'"):
        list(rows_of(*units(tmp_path / "a.csv", columns=["Caption"])))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([b"x"], pa.binary(1)),
        pa.array([[b"x"]]),
        pa.array([{"a": [{"b": b"x"}]}]),
        pa.array([b"x"]).dictionary_encode(),
    ],
)
def test_bytes_are_not_stored_as_text(tmp_path, values):
    table = pa.table({"image": [{"bytes": IMAGES[0]}], "label": [0], "id": values})
    pq.write_table(table, tmp_path / "a.parquet")
    (row,) = rows_of(*units(tmp_path / "a.parquet", columns=["id"]))
    with pytest.raises(ValueError, match="contains bytes"):
        row.read()
    with pytest.raises(ValueError, match="contains bytes"):
        stored_text({"a": [b"x"]})
    assert stored_text({"day": date(2026, 1, 2)}) == '{"day": "2026-01-02"}'


def write_captions(file: Path, lengths: list[int]) -> str:
    for i, length in enumerate(lengths):
        (file.parent / f"{i}.jpg").write_bytes(jpeg(i, 20, 24))
        row = json.dumps({"path": f"{i}.jpg", "label": "x", "caption": "c" * length, "id": i})
        with file.open("a") as sink:
            sink.write(row + "\n")
    return str(file)


def write_captions_in_parquet(file: Path, lengths: list[int]) -> str:
    images = [{"bytes": jpeg(i, 20, 24)} for i in range(len(lengths))]
    captions = ["c" * length for length in lengths]
    table = pa.table({"image": images, "label": [0] * len(lengths), "caption": captions})
    pq.write_table(table, file)
    return str(file)


@pytest.mark.parametrize(
    ("write", "name"), [(write_captions, "a.jsonl"), (write_captions_in_parquet, "a.parquet")]
)
def test_shards_with_text_have_the_size_that_is_asked_for(serial, tmp_path, write, name):
    source = write(tmp_path / name, [60_000] * 40)
    options = {"columns": ["caption"], "rows_per_row_group": 2}
    convert(source, str(tmp_path / "set"), shard_mib=10 * 61_000 / 2**20, **options)
    assert len(open_dataset(str(tmp_path / "set")).files) == 4
