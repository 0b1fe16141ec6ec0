"""Lists of images, and parquet files: copied, and read where they lie, which never writes them."""

import csv
import errno
import json
import os
import platform
import unicodedata
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
from tests.data.converting import convert, units
from tests.data.pictures import encoded, jpeg, picture
from vit_ray.data import open_dataset
from vit_ray.data.boxes import Augmentation
from vit_ray.data.convert import shards
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.convert.rows import Unit
from vit_ray.data.convert.sources import rows_of
from vit_ray.data.dataset import Manifest
from vit_ray.data.order import Partition
from vit_ray.data.parts import subset
from vit_ray.data.shards import RowGroupReader, first_labels, keys
from vit_ray.data.stream.batches import BatchReader, StreamJob, StreamSpec

pytestmark = pytest.mark.usefixtures("serial")
IMAGES = {f"{i:03d}.jpg": jpeg(i, 40 + i, 60) for i in range(40)}
COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "caf\xe9") for form in ("NFC", "NFD"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path, IMAGES)


def test_a_key_is_taken_once(tmp_path):
    """The second list names an image of the first, one of its own twice, and one in two forms."""
    names = ("a.jpg", "b.jpg", "c.jpg", f"{COMPOSED}.jpg")
    source = write_files(tmp_path / "source", dict.fromkeys(names, IMAGES["000.jpg"]))
    rows = ["c.jpg,cat", "a.jpg,dog", "c.jpg,dog", f"{COMPOSED}.jpg,cat", f"{DECOMPOSED}.jpg,dog"]
    write_files(source, {"one.csv": "path,label\na.jpg,cat\nb.jpg,dog\n"})
    write_files(source, {"two.csv": "\n".join(["path,label", *rows])})
    found = labels_of(converted(source, tmp_path / "set", max_rejected_fraction=0.9))
    assert found == dict(zip(names, ("cat", "dog", "cat", "cat"), strict=True))
    rejected = pq.read_table(tmp_path / "set" / "rejected.parquet").to_pylist()
    assert sorted(row["key"] for row in rejected) == ["a.jpg", "c.jpg", f"{DECOMPOSED}.jpg"]
    assert all("an earlier row of the source has the same key" in row["reason"] for row in rejected)


def test_a_path_in_the_other_form_of_unicode_finds_its_file(tmp_path):
    files = {f"{COMPOSED}.jpg": IMAGES["000.jpg"], "a.csv": f"path,label\n{DECOMPOSED}.jpg,x\n"}
    found = converted(write_files(tmp_path / "s", files) / "a.csv", tmp_path / "set")
    assert found == {f"{DECOMPOSED}.jpg": (IMAGES["000.jpg"], ["x"])}


def test_each_bad_row_of_a_csv_is_rejected_alone(folder):
    os.symlink("itself", folder / "itself")
    file = folder / "list.csv"
    bad: dict[bytes, tuple[str, str]] = {
        b",cat": (f"{file}#22", "its path is ''"),
        b"000.jpg,tench, Tinca": (f"{file}#23", "it has 3 fields, the header 2"),
        b"000.jpg": (f"{file}#24", "it has 1 fields, the header 2"),
        b"caf\xe9.jpg,cat": ("caf\\udce9.jpg", "not valid UTF-8"),
        b"none.jpg,cat": ("none.jpg", "No such file"),
        b"/dev/zero,cat": ("/dev/zero", "not a regular file"),
        b"nul\0.jpg,cat": ("nul\0.jpg", "null"),
        b".,cat": (".", "not a regular file"),
        b"020.jpg,": ("020.jpg", "its label is empty"),
        b"ftp://x/y.jpg,cat": ("ftp://x/y.jpg", "scheme"),
        b"x" * 300 + b",cat": ("x" * 300, "File name too long"),
        b"itself,cat": ("itself", "Too many levels of symbolic links"),
        b"itself/0.jpg,cat": ("itself/0.jpg", "Too many levels of symbolic links"),
        b"000.jpg/0.jpg,cat": ("000.jpg/0.jpg", "Not a directory"),
    }
    good = list(IMAGES)[:20]
    rows = [b"path,label", *(f"{name},cat".encode() for name in good), *bad]
    absolute = str(folder / "022.jpg")
    file.write_bytes(b"\n".join([*rows, "021.jpg,\u00b2".encode(), f"{absolute},cat".encode()]))
    found = converted(file, folder / "set", max_rejected_fraction=0.5)
    expected = dict.fromkeys([*good, absolute], "cat") | {"021.jpg": "\u00b2"}
    assert labels_of(found) == expected
    assert all(image == IMAGES[Path(key).name] for key, (image, _) in found.items())
    reasons, told = rejections(folder / "set"), dict(bad.values())
    assert set(reasons) == set(told)
    assert not [key for key, reason in told.items() if reason not in reasons[key]]


def numbered(lines: dict[int, str]) -> str:
    """A list of the images and a note each, some lines of it (the header is line 1) others."""
    rows = [f"{name},{'dog' if i % 2 else 'cat'},n" for i, name in enumerate(IMAGES)]
    whole = ["path,label,note", *rows]
    return "\n".join(lines.get(at, line) for at, line in enumerate(whole, 1)) + "\n"


@pytest.mark.parametrize("line", ['"008.jpg,cat,n', '008.jpg,"cat,n', '008.jpg,cat,"n'])
def test_the_end_of_a_list_inside_quotes_is_an_error_with_its_line(folder, line):
    (folder / "list.csv").write_text(numbered({10: line}))
    with pytest.raises(ValueError, match=r"list.csv': a quote in line 10 is never closed.* 32 li"):
        converted(folder / "list.csv", folder / "set", max_rejected_fraction=1.0)


REJECTED = {
    "a closing quote is missing": ({10: '008.jpg,"cat,n', 11: '009.jpg,"dog",n'}, 11, "'\"'"),
    "of many lines": ({10: '008.jpg,cat,"n', 15: '013.jpg,dog,"n"'}, 15, "'\"'"),
    "of a label, closed late": ({10: '008.jpg,"cat', 12: 'x",n'}, 12, "has a line break"),
    "of a path, closed late": ({10: '"008', 12: '.jpg",cat,n'}, 12, "has a line break"),
    "of a note": ({10: '008.jpg,cat,"n', 13: '011.jpg,dog,5"'}, 13, "is itself a row"),
    "an opening quote is missing": ({10: '008.jpg,cat",n'}, 10, 'write ""'),
    "a quote behind quotes": ({10: '008.jpg,"cat"s,n'}, 10, "'\"'"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_an_odd_quote_rejects_every_line_that_it_takes_in(folder, name):
    changed, last, why = REJECTED[name]
    (folder / "list.csv").write_text(numbered(changed))
    found = converted(folder / "list.csv", folder / "set", max_rejected_fraction=0.2)
    lost = range(10, last + 1)
    assert sorted(found) == [n for i, n in enumerate(IMAGES, 2) if i not in lost]
    assert open_dataset(str(folder / "set")).classes == ["cat", "dog"]
    reasons = rejections(folder / "set")
    assert sorted(reasons) == [f"{folder}/list.csv#{line:02d}" for line in lost]
    assert all(why in reason for reason in reasons.values()), reasons


def test_each_bad_line_of_json_is_rejected_alone(folder):
    file, good = folder / "list.jsonl", list(IMAGES)[:20]
    bad = {
        b"[1, 2]": ("#21", "'list' object"),
        b"null": ("#22", "'NoneType' object"),
        b'{"path": "a.jpg"': ("#23", "not a JSON object"),
        b"\xff\xfe": ("#24", "not a JSON object"),
        b"[" * 10**5: ("#25", "recursion"),
        b'{"path": "", "label": "c"}': ("#26", "its path is ''"),
        b'{"path": 3.5, "label": "c"}': ("#27", "its path is 3.5"),
        b'{"label": "cat"}': ("#28", "field for the image"),
        b'{"path": "\\ud800", "label": "c"}': ("\\ud800", "UTF-8"),
        b'{"path": "022.jpg", "label": true}': ("022.jpg", "its label is True"),
        b'{"path": "023.jpg", "label": {}}': ("023.jpg", "its label is {}"),
        b'{"path": "024.jpg"}': ("024.jpg", "the label"),
        b'{"path": "026.jpg", "label": " "}': ("026.jpg", "its label is empty"),
        b'{"path": "027.jpg", "label": ["x", ""]}': ("027.jpg", "its label is empty"),
    }
    lines = [json.dumps({"path": name, "label": "cat"}).encode() for name in good]
    file.write_bytes(b"\n".join([*lines, *bad, b"", b"  "]))
    assert sorted(converted(file, folder / "set", max_rejected_fraction=0.5)) == good
    reasons = rejections(folder / "set")
    expected = {f"{file}{k}" if k[0] == "#" else k: reason for k, reason in bad.values()}
    assert set(reasons) == set(expected)
    assert not [key for key, reason in expected.items() if reason not in reasons[key]]


TRICKY = [
    ["000.jpg", "a; b", "a, b\nc, d, e"],
    ["001.jpg", "a", "text of\nthree\nlines"],
    ["002.jpg", 'said "so"', ""],
    ["003.jpg", 'inch 5"', ""],
    ["004.jpg", "caf\xe9, \u00b2", "\u00b2\n\xe9"],
    ["005.jpg", '","', '",\n"'],
]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_rows_are_those_of_pythons_csv(folder, delimiter):
    with (folder / "list.csv").open("w", newline="", encoding="utf-8") as sink:
        rows = [["path", "label", "note"], *TRICKY * 3]
        csv.writer(sink, delimiter=delimiter).writerows(rows)
    (unit,) = units(folder / "list.csv", columns=["note"])
    found = [[row.key, *row.labels, *row.extra] for row in rows_of(unit)]
    assert found == TRICKY * 3


def test_a_header_may_span_lines(folder):
    header = '\ufeffPath,Label,"a note\nof two lines",caption\r\n'
    write_files(folder, {"list.csv": f"{header}000.jpg,cat,x,y\r\n"})
    found = converted(folder / "list.csv", folder / "set", columns=["caption"])
    assert labels_of(found) == {"000.jpg": "cat"}


def test_a_process_without_files_to_open_rejects_nothing(folder, monkeypatch):
    """It is no fault of the image."""

    def refuse(path: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files", path)

    (folder / "list.csv").write_text("path,label\n000.jpg,cat\n")
    monkeypatch.setattr("vit_ray.data.convert.rows.os.stat", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        next(rows_of(units(str(folder / "list.csv"))[0])).read()


def test_kaggles_imagenet_is_read_by_its_lists(tmp_path):
    names, box = ["n03995372", "n03481172", "n02120505"], "{} 85 1 499 272 "
    boxes = [box.format(names[0]), box.format(names[1]) * 3, f"{names[2]} -1 0 3 4"]
    rows = "".join(f"ILSVRC2012_val_{i:08d},{text}\n" for i, text in enumerate(boxes))
    pattern = "ILSVRC/Data/CLS-LOC/val/{}.JPEG"
    paths = [pattern.format(f"ILSVRC2012_val_{i:08d}") for i in range(3)]
    root = write_files(tmp_path / "kaggle", dict(zip(paths, IMAGES.values(), strict=False)))
    for name in ("train_solution", "val_solution", "sample_submission"):
        write_files(root, {f"LOC_{name}.csv": f"ImageId,PredictionString\n{rows}"})
    options = {"image_field": "ImageId", "label_field": "PredictionString", "split": "val"}
    found = labels_of(converted(root, tmp_path / "set", image_pattern=pattern, **options))
    assert found == dict(zip(paths, names, strict=True))


def test_ids_that_are_numbers_become_paths_by_a_pattern(folder):
    lines = [json.dumps({"path": i, "label": "abc"[i]}) for i in range(3)]
    (folder / "ids.jsonl").write_text("\n".join(lines))
    found = converted(folder / "ids.jsonl", folder / "set", image_pattern="00{}.jpg")
    assert labels_of(found) == {f"00{i}.jpg": "abc"[i] for i in range(3)}


NAMES = ["cat", "dog", "owl"]
FEATURES = {"label": {"names": NAMES, "_type": "ClassLabel"}}
PICTURES = [encoded(picture(i, 30 + i, 40), "JPEG" if i % 3 else "PNG") for i in range(24)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two files of 14 and 10 images, sorted by class, in row groups of 5; the 7th is broken."""
    images: list[bytes | None] = [*PICTURES]
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
            found[rows.key(at)] = rows.image(at), manifest.classes[label], rows.sizes[at]
    return found


SAME = [PICTURES[1]] * 6


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (pa.array(PICTURES[:6], pa.binary_view()), pa.array(list("abcabc"), pa.string_view())),
        (pa.array(PICTURES[:6]).dictionary_encode(), pa.array(list("abcabc")).dictionary_encode()),
        (pa.array(SAME, pa.binary(len(SAME[0]))), pa.array(list("abcabc"), pa.large_string())),
        (pa.array([{"bytes": i} for i in PICTURES[:6]]), pa.array([["a"], ["b"], ["c"]] * 2)),
    ],
)
def test_arrows_other_types_are_read(tmp_path, images, labels):
    content = parquet({"image": images, "label": labels})
    source = write_files(tmp_path / "hub", {"train.parquet": content}) / "train.parquet"
    expected = {f"train/{i:08d}": "abcabc"[i] for i in range(6)}
    rows = converted(source, tmp_path / "set")
    assert labels_of(rows) == expected
    convert(source, tmp_path / "in place", in_place=True)
    read = RowGroupReader(open_dataset(str(tmp_path / "in place"))).read(0)
    assert [read.image(i) for i in range(6)] == [rows[key][0] for key in expected]


def test_a_damaged_row_group_costs_its_own_rows(tmp_path):
    file = tmp_path / "train.parquet"
    write_hub_file(file, PICTURES[:12], [i % 2 for i in range(12)])
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


def test_the_images_are_those_of_a_copy_and_the_files_stay_as_they_are(source, tmp_path):
    def state() -> dict[Path, Any]:
        return {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in source.glob("*/*")}

    before = state()
    manifest = in_place(source, tmp_path / "set")
    convert(source, tmp_path / "copy", max_rejected_fraction=0.1, index_jpeg=False)
    assert stored(manifest) == stored(open_dataset(str(tmp_path / "copy")))
    assert state() == before
    assert sum(path.stat().st_size for path in (tmp_path / "set").iterdir()) < 40_000
    assert list(rejections(tmp_path / "set")) == ["data/train-00000-of-00002/00000006"]
    assert manifest.num_images == 23
    assert manifest.rows.tolist() == [5, 4, 4, 5, 5]
    assert [len(some) for some in keys(manifest)] == [13, 10]


def test_it_is_read_verified_and_cut_as_any_data_set(source, tmp_path):
    manifest = in_place(source, tmp_path / "set")
    spec = StreamSpec(manifest, Augmentation(size=16), seed=2)
    job = StreamJob(spec, Partition(1, 46), 0, is_training=True)
    batch = BatchReader(job).batch(0, 0, 46)[0]
    assert sorted(np.bincount(batch["sample"])) == [2] * 23  # two epochs
    labels = np.concatenate(list(first_labels(manifest)))
    np.testing.assert_array_equal(batch["labels"][:, 0], labels[batch["sample"]])
    part = stored(subset(manifest.path, str(tmp_path / "part"), count=9))
    assert len(part) == 9
    assert part.items() <= stored(manifest).items()
    for file, count in enumerate((13, 10)):
        report = check_file(file, manifest, 1.0)
        assert (report.problems, report.num_images) == ([], count)


def test_a_file_that_changed_is_seen_when_it_is_opened(source, tmp_path):
    manifest = in_place(source, tmp_path / "set")
    os.utime(source / "data" / "train-00000-of-00002.parquet", ns=(0, 0))
    with pytest.raises(ValueError, match=r"00000-of-00002.parquet has changed since the data set"):
        RowGroupReader(manifest).read(0)
    RowGroupReader(manifest).read(4)  # of the other file
    assert "has changed since" in check_file(0, manifest, 0.0).problems[0]


def test_a_file_that_changes_while_its_images_are_looked_at_is_an_error(
    source, tmp_path, monkeypatch
):
    rows = shards.parquet_rows

    def touching(unit: Unit) -> Any:
        os.utime(unit.path, ns=(0, 0))
        return rows(unit)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "parquet_rows", touching)
        with pytest.raises(ValueError, match=r"00000-of-00002.parquet has changed since this conv"):
            in_place(source, tmp_path / "set")
    assert not (tmp_path / "set" / "manifest.parquet").exists()
    assert in_place(source, tmp_path / "set").num_images == 23


def test_an_image_that_changed_is_seen_though_its_file_has_the_same_length_and_time(
    source, tmp_path
):
    manifest = in_place(source, tmp_path / "set")
    file = source / "data" / "train-00000-of-00002.parquet"
    status, content = file.stat(), file.read_bytes()
    assert content.count(PICTURES[3]) == 1
    other = PICTURES[3][:-20] + b"y" * 18 + PICTURES[3][-2:]
    file.write_bytes(content.replace(PICTURES[3], other))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    rows = RowGroupReader(manifest).read(0)
    assert rows.image(2) == PICTURES[2]
    with pytest.raises(ValueError, match="checksum differs"):
        rows.image(3)
    (problem,) = check_file(0, manifest, 0.0).problems
    assert rows.key(3) in problem


@pytest.mark.parametrize("is_in_place", [False, True])
def test_images_may_have_several_labels(tmp_path, is_in_place):
    labels: list[Any] = [[0, 1], [1], [2, 0], [1, None], [], None]
    features = {"label": {"feature": {"names": NAMES}}}
    write_hub_file(tmp_path / "hub" / "a.parquet", PICTURES[:6], labels, features)
    convert(tmp_path / "hub", tmp_path / "set", in_place=is_in_place, max_rejected_fraction=0.5)
    manifest = open_dataset(str(tmp_path / "set"))
    rows, found = RowGroupReader(manifest).read(0), {}
    for at in manifest.stored_rows(0).tolist():
        found[rows.key(at)] = [manifest.classes[label] for label in rows.labels_of(at)]
    expected = [["cat", "dog"], ["dog"], ["owl", "cat"]]
    assert found == {f"a/{i:08d}": names for i, names in enumerate(expected)}
    reasons = [reason for _, reason in sorted(rejections(tmp_path / "set").items())]
    assert [r.partition(", not")[0] for r in reasons] == [
        "its label is [1, None]", "its label is []", "its label is None",
    ]  # fmt: skip


def test_the_same_files_elsewhere_make_the_same_data_set(source, tmp_path):
    first = in_place(source, tmp_path / "set")
    moved = source.rename(tmp_path / "moved")
    told = rf"{source}/.*parquet' is missing on {platform.node()} though the"
    with pytest.raises(ValueError, match=told):
        RowGroupReader(first).read(0)
    assert in_place(moved, tmp_path / "again").fingerprint == first.fingerprint


def test_a_destination_beside_the_files_is_refused(source):
    for files, target in ((source, source / "set"), (source / "data/*.parquet", source / "data/a")):
        with pytest.raises(ValueError, match="or next to its files; choose a folder outside"):
            in_place(files, target)
    assert [path.name for path in source.iterdir()] == ["data"]
    assert len(list((source / "data").iterdir())) == 2


def test_a_row_group_without_a_usable_image_is_left_out(tmp_path):
    file = tmp_path / "hub" / "train.parquet"
    images, labels = (
        [*PICTURES[:5], *[b"junk"] * 5, PICTURES[5], None, *PICTURES[6:9]],
        "abcabaaaaabcbac",
    )
    write_hub_file(file, images, list(labels))
    convert(file, tmp_path / "set", in_place=True, max_rejected_fraction=0.5)
    manifest = open_dataset(str(tmp_path / "set"))
    assert manifest.rows.tolist() == [5, 4]
    assert manifest.row_group.tolist() == [0, 2]
    assert [image for image, *_ in stored(manifest).values()] == PICTURES[:9]
    assert "".join(label for _, label, _ in stored(manifest).values()) == "abcabbbac"


def test_a_row_group_of_too_many_bytes_is_refused_before_any_image_is_read(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr("vit_ray.data.convert.tables.MOST_ROW_GROUP_BYTES", 100)
    with pytest.raises(ValueError, match=r"row group 0 has 0 MiB of images; in place it needs"):
        in_place(source, tmp_path / "set")
    assert not (tmp_path / "set").exists()  # and so can be converted by copying
