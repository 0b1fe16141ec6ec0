"""CSV files and lines of JSON that list images."""

import csv
import errno
import json
import os
import unicodedata
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import converted, labels_of, rejections, write_files
from tests.data.converting import units
from tests.data.pictures import jpeg
from vit_ray.data import open_dataset
from vit_ray.data.convert.sources import rows_of

pytestmark = pytest.mark.usefixtures("serial")
IMAGES = {f"{i:03d}.jpg": jpeg(i, 40 + i, 60) for i in range(40)}
COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "caf\xe9") for form in ("NFC", "NFD"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path, IMAGES)


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_lists_of_paths_and_labels(folder, format):
    labels = {name: "cat;dog" if i % 3 == 0 else "cat" for i, name in enumerate(IMAGES)}
    listed = [*labels.items(), (str(folder / "000.jpg"), "dog"), ("none.jpg", "cat")]
    if format == "csv":
        rows = ["path,labels", *(f'"{path}","{label}"' for path, label in listed)]
    else:
        rows = [json.dumps({"path": p, "labels": label.split(";")}) for p, label in listed]
    (folder / f"list.{format}").write_text("\n".join(rows) + "\n")
    found = converted(folder / f"list.{format}", folder / "set")
    assert found == {
        path: (IMAGES[Path(path).name], label.split(";")) for path, label in listed[:-1]
    }
    ((key, reason),) = rejections(folder / "set").items()
    assert (key, "no such file" in reason) == ("none.jpg", True)


def test_a_key_is_taken_once(tmp_path):
    """The second list names an image of the first, one of its own twice, and one in two forms."""
    names = ("a.jpg", "b.jpg", "c.jpg", f"{COMPOSED}.jpg")
    source = write_files(tmp_path / "source", dict.fromkeys(names, IMAGES["000.jpg"]))
    second = ["c.jpg,cat", "a.jpg,dog", "c.jpg,dog", f"{COMPOSED}.jpg,cat", f"{DECOMPOSED}.jpg,dog"]
    write_files(
        source,
        {
            "one.csv": "path,label\na.jpg,cat\nb.jpg,dog\n",
            "two.csv": "\n".join(["path,label", *second]),
        },
    )
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
        b",cat": (f"{file}#22", "it has no path"),
        b"  ,cat": (f"{file}#23", "it has no path"),
        b"000.jpg,tench, Tinca": (f"{file}#24", "it has 3 fields, the header 2"),
        b"000.jpg": (f"{file}#25", "it has 1 fields, the header 2"),
        b"caf\xe9.jpg,cat": ("caf\\udce9.jpg", "not valid UTF-8"),
        b"none.jpg,cat": ("none.jpg", "no such file"),
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
    file.write_bytes(b"\n".join([*rows, "021.jpg,\u00b2".encode()]))
    found = labels_of(converted(file, folder / "set", max_rejected_fraction=0.5))
    assert found == {**dict.fromkeys(good, "cat"), "021.jpg": "\u00b2"}
    reasons, expected = rejections(folder / "set"), dict(bad.values())
    assert set(reasons) == set(expected)
    assert not [key for key, reason in expected.items() if reason not in reasons[key]]


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
    "of a label, closed late": ({10: '008.jpg,"cat', 12: 'x",n'}, 12, "its label has a line"),
    "of a path, closed late": ({10: '"008', 12: '.jpg",cat,n'}, 12, "its path has a line"),
    "of a note, closed late": (
        {10: '008.jpg,cat,"n', 13: '011.jpg,dog,5"'}, 13, "is itself a row",
    ),
    "an opening quote is missing": ({10: '008.jpg,cat",n'}, 10, 'write ""'),
    "a quote behind quotes": ({10: '008.jpg,"cat"s,n'}, 10, "'\"'"),
}  # fmt: skip


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
        b"[1, 2]": ("#21", "a JSON list"),
        b"null": ("#22", "a JSON NoneType"),
        b'{"path": "a.jpg"': ("#23", "not JSON"),
        b"\xff\xfe": ("#24", "not JSON"),
        b"[" * 10**5: ("#25", "recursion"),
        b'{"path": "", "label": "c"}': ("#26", "one field for the image"),
        b'{"path": 3.5, "label": "c"}': ("#27", "of type float"),
        b'{"label": "cat"}': ("#28", "field for the image"),
        b'{"path": "025.jpg", "label": "' + b"x" * (1 << 21): ("#29", "has 1,048,576 bytes or"),
        b'{"path": "\\ud800", "label": "c"}': ("\\ud800", "UTF-8"),
        b'{"path": "022.jpg", "label": true}': ("022.jpg", "of type bool"),
        b'{"path": "023.jpg", "label": {}}': ("023.jpg", "of type dict"),
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
    header = '\ufeffpath,label,"a note\nof two lines",caption\r\n'
    rows = "".join(f"{name},cat,x,y\r\n" for name in IMAGES)
    write_files(folder, {"list.csv": header + rows})
    found = labels_of(converted(folder / "list.csv", folder / "set", columns=["caption"]))
    assert found == dict.fromkeys(IMAGES, "cat")


def test_a_process_without_files_to_open_rejects_nothing(folder, monkeypatch):
    """It is no fault of the image."""

    def refuse(path: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files", path)

    (folder / "list.csv").write_text("path,label\n000.jpg,cat\n")
    monkeypatch.setattr("vit_ray.data.convert.rows.os.stat", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        next(rows_of(units(str(folder / "list.csv"))[0])).read()


def test_kaggles_imagenet_is_read_by_its_lists(tmp_path):
    root, names = tmp_path / "kaggle", ["n03995372", "n03481172", "n02120505"]
    box = "{} 85 1 499 272 "
    boxes = [box.format(names[0]), box.format(names[1]) * 3, f"{names[2]} -1 0 3 4"]
    rows = "".join(f"ILSVRC2012_val_{i:08d},{text}\n" for i, text in enumerate(boxes))
    pattern = "ILSVRC/Data/CLS-LOC/val/{}.JPEG"
    paths = [pattern.format(f"ILSVRC2012_val_{i:08d}") for i in range(3)]
    write_files(root, dict(zip(paths, IMAGES.values(), strict=False)))
    for name in ("train_solution", "val_solution", "sample_submission"):
        write_files(root, {f"LOC_{name}.csv": f"ImageId,PredictionString\n{rows}"})
    with pytest.raises(ValueError, match=r"several splits: \(files .*\), train, validation; give"):
        converted(root, tmp_path / "set")
    options = {"image_field": "ImageId", "label_field": "PredictionString", "split": "val"}
    found = labels_of(converted(root, tmp_path / "set", image_pattern=pattern, **options))
    assert found == dict(zip(paths, names, strict=True))


def test_bare_ids_become_paths_by_a_pattern(folder):
    lines = [json.dumps({"path": i, "label": "abc"[i]}) for i in range(3)]
    (folder / "ids.jsonl").write_text("\n".join(lines))
    found = converted(folder / "ids.jsonl", folder / "ids", image_pattern="00{}.jpg")
    assert labels_of(found) == {f"00{i}.jpg": "abc"[i] for i in range(3)}


def test_shards_of_a_list_have_the_size_that_is_asked_for(folder):
    """Nobody has said how large its images are."""
    rows = [f"x{i}.jpg" for i in range(400)]
    write_files(folder, {name: IMAGES[f"{i % 40:03d}.jpg"] for i, name in enumerate(rows)})
    (folder / "list.csv").write_text("path,label\n" + "".join(f"{name},cat\n" for name in rows))
    total = sum(map(len, IMAGES.values())) * 10
    converted(folder / "list.csv", folder / "set", shard_mib=total / 10 / 2**20)
    assert 9 <= len(open_dataset(str(folder / "set")).files) <= 11
