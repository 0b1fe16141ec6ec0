import csv
import errno
import json
import os
from pathlib import Path

import pytest

from tests.data.convert.archives import converted, labels_of, rejections
from tests.data.converting import units
from tests.data.pictures import jpeg
from vit_ray.data import open_dataset
from vit_ray.data.convert.sources import rows_of

IMAGES = {f"{i:03d}.jpg": jpeg(i, 40 + i, 60) for i in range(40)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, image in IMAGES.items():
        (tmp_path / name).write_bytes(image)
    return tmp_path


def write_csv(file: Path, rows: list[list[str]], labels: str = "label") -> Path:
    with file.open("w", newline="", encoding="utf-8") as sink:
        csv.writer(sink).writerows([["path", labels], *rows])
    return file


def test_each_bad_row_of_a_csv_is_rejected_alone(serial, folder):
    good = list(IMAGES)[:20]
    bad = [
        b",cat", b"  ,cat", b"000.jpg,tench, Tinca", b"000.jpg", b"caf\xe9.jpg,cat",
        b"none.jpg,cat",
        b"/dev/zero,cat", b"nul\0.jpg,cat", b".,cat", b"020.jpg,",
        b"ftp://x/y.jpg,cat",
        "021.jpg,\u00b2".encode(),
    ]  # fmt: skip
    rows = [b"path,label", *(f"{name},cat".encode() for name in good), *bad]
    file = folder / "list.csv"
    file.write_bytes(b"\n".join(rows))
    found = labels_of(converted(file, folder / "set", max_rejected_fraction=0.5))
    assert found == {**dict.fromkeys(good, "cat"), "021.jpg": "\u00b2"}
    reasons = rejections(folder / "set")
    assert len(reasons) == len(bad) - 1
    expected = {
        f"{file}#22": "it has no path",
        f"{file}#23": "it has no path",
        f"{file}#24": "it has 3 fields, the header 2",
        f"{file}#25": "it has 1 fields, the header 2",
        "caf\\udce9.jpg": "not valid UTF-8",
        "none.jpg": "no such file",
        "/dev/zero": "not a regular file",
        "nul\0.jpg": "null",
        ".": "not a regular file",
        "020.jpg": "its label is empty",
        "ftp://x/y.jpg": "scheme",
    }
    assert set(expected) == set(reasons)
    assert not [key for key, reason in expected.items() if reason not in reasons[key]]


def numbered(lines: dict[int, str], count: int = 40) -> str:
    """A list of the images and a note each, some lines of it (the header is line 1) others."""
    rows = [f"{name},{'dog' if i % 2 else 'cat'},n" for i, name in enumerate(IMAGES)][:count]
    whole = ["path,label,note", *rows]
    return "\n".join(lines.get(at, line) for at, line in enumerate(whole, 1)) + "\n"


@pytest.mark.parametrize("line", ['"008.jpg,cat,n', '008.jpg,"cat,n', '008.jpg,cat,"n'])
def test_the_end_of_a_list_inside_quotes_is_an_error_with_its_line(serial, folder, line):
    (folder / "list.csv").write_text(numbered({10: line}))
    with pytest.raises(ValueError, match=r"list.csv': a quote in line 10 is never closed.* 32 li"):
        converted(folder / "list.csv", folder / "set", max_rejected_fraction=1.0)


REJECTED = {
    "a closing quote is missing": ({10: '008.jpg,"cat,n', 11: '009.jpg,"dog",n'}, 10, 11, "'\"'"),
    "of many lines": ({10: '008.jpg,cat,"n', 15: '013.jpg,dog,"n"'}, 10, 15, "'\"'"),
    "of a label, closed late": ({10: '008.jpg,"cat', 12: 'x",n'}, 10, 12, "its label has a line"),
    "of a path, closed late": ({10: '"008', 12: '.jpg",cat,n'}, 10, 12, "its path has a line"),
    "of a note, closed late": (
        {10: '008.jpg,cat,"n', 13: '011.jpg,dog,5"'},
        10,
        13,
        "is itself a row",
    ),
    "an opening quote is missing": ({10: '008.jpg,cat",n'}, 10, 10, 'write ""'),
    "a quote behind quotes": ({10: '008.jpg,"cat"s,n'}, 10, 10, "'\"'"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_an_odd_quote_rejects_every_line_that_it_takes_in(serial, folder, name):
    changed, first, last, why = REJECTED[name]
    (folder / "list.csv").write_text(numbered(changed))
    found = converted(folder / "list.csv", folder / "set", max_rejected_fraction=0.2)
    lost = range(first, last + 1)
    assert sorted(found) == [n for i, n in enumerate(IMAGES, 2) if i not in lost]
    assert open_dataset(str(folder / "set")).classes == ["cat", "dog"]
    reasons = rejections(folder / "set")
    assert sorted(reasons) == [f"{folder}/list.csv#{line:02d}" for line in lost]
    assert all(why in reason for reason in reasons.values()), reasons


def test_each_bad_line_of_json_is_rejected_alone(serial, folder):
    good = [json.dumps({"path": name, "label": "cat"}).encode() for name in list(IMAGES)[:20]]
    bad = {
        b"[1, 2]": "a JSON list", b"3": "a JSON int", b"null": "a JSON NoneType",
        b'{"path": "a.jpg"': "not JSON", b"\xff\xfe": "not JSON", b"[" * 10**5: "recursion",
        b'{"path": "", "label": "c"}': "one field for the image",
        b'{"path": 3.5, "label": "c"}': "of type float",
        b'{"label": "cat"}': "field for the image", b'{"path": "\\ud800", "label": "c"}': "UTF-8",
        b'{"path": "022.jpg", "label": true}': "of type bool",
        b'{"path": "023.jpg", "label": {}}': "of type dict", b'{"path": "024.jpg"}': "the label",
        b'{"path": "025.jpg", "label": "' + b"x" * (1 << 21): "has 1,048,576 bytes or more",
    }  # fmt: skip
    (folder / "list.jsonl").write_bytes(b"\n".join([*good, *bad, b"", b"  "]))
    found = converted(folder / "list.jsonl", folder / "set", max_rejected_fraction=0.5)
    assert sorted(found) == list(IMAGES)[:20]
    reasons = rejections(folder / "set")
    assert len(reasons) == len(bad)
    assert sorted(reasons) == sorted(
        [f"{folder}/list.jsonl#{line}" for line in (*range(21, 30), 34)]
        + ["\\ud800", "022.jpg", "023.jpg", "024.jpg"]
    )
    for line, reason in enumerate(bad.values(), 21):
        assert any(reason in given for given in reasons.values()), (line, reason)


@pytest.mark.parametrize(
    ("header", "what"),
    [("name,label", "path"), ("path,kind", "label"), ("path,label,label", "2 columns")],
)
def test_a_header_without_what_is_needed_is_refused(serial, folder, header, what):
    (folder / "list.csv").write_text(f"{header}\n")
    with pytest.raises(ValueError, match=what):
        converted(folder / "list.csv", folder / "set")


def test_utf16_is_refused(serial, folder):
    (folder / "list.csv").write_text("path,label\n000.jpg,cat\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"list.csv' is UTF-16; save it as UTF-8"):
        converted(folder / "list.csv", folder / "set")


TRICKY = [
    ["000.jpg", "a; b", "a, b\nc, d, e"],
    ["001.jpg", "a", "text of\nthree\nlines"],
    ["002.jpg", 'said "so"', ""],
    ["003.jpg", 'inch 5"', ""],
    ["004.jpg", "caf\xe9, \u00b2", "\u00b2\n\xe9"],
    ["005.jpg", '","', '",\n"'],
]


def test_rows_are_those_of_pythons_csv(folder):
    with (folder / "list.csv").open("w", newline="", encoding="utf-8") as sink:
        csv.writer(sink).writerows([["path", "label", "note"], *TRICKY * 3])
    (unit,) = units(folder / "list.csv", columns=["note"])
    rows = rows_of(unit)
    assert [[row.key, *row.labels, *row.extra] for row in rows] == TRICKY * 3


def test_shards_of_a_list_have_the_size_that_is_asked_for(serial, folder):
    for i in range(400):
        (folder / f"x{i}.jpg").write_bytes(IMAGES[f"{i % 40:03d}.jpg"])
    file = write_csv(folder / "list.csv", [[f"x{i}.jpg", "cat"] for i in range(400)])
    total = sum(map(len, IMAGES.values())) * 10
    converted(file, folder / "set", shard_mib=total / 10 / 2**20)
    sizes = [f.bytes for f in open_dataset(str(folder / "set")).files]
    assert 9 <= len(sizes) <= 11


def test_shards_of_shrunk_images_have_the_size_that_is_asked_for(serial, folder):
    """400 x 300 pixels shrink to a small part of their bytes; a shard holds many more."""
    (folder / "source" / "cat").mkdir(parents=True)
    for i in range(60):
        (folder / "source" / "cat" / f"{i}.jpg").write_bytes(jpeg(i, 300, 400))
    converted(folder / "source", folder / "set", shrink_to=60, shard_mib=0.01)
    files = open_dataset(str(folder / "set")).files
    assert len(files) > 1
    assert sum(f.bytes for f in files) / len(files) == pytest.approx(0.01 * 2**20, rel=0.35)


def test_a_path_that_no_disk_has_is_one_rejected_row(serial, folder):
    os.symlink("itself", folder / "itself")
    bad = {
        "x" * 300: "File name too long",
        "/".join(["y" * 200] * 30): "File name too long",
        "itself": "Too many levels of symbolic links",
        "itself/0.jpg": "Too many levels of symbolic links",
        "000.jpg/0.jpg": "Not a directory",
    }
    file = write_csv(folder / "list.csv", [[name, "cat"] for name in [*IMAGES, *bad]])
    assert len(converted(file, folder / "set", max_rejected_fraction=0.5)) == len(IMAGES)
    found = rejections(folder / "set")
    assert found == {name: f"it cannot be read: {reason}" for name, reason in bad.items()}


def test_a_process_without_files_to_open_rejects_nothing(serial, folder, monkeypatch):
    """It is no fault of the image."""

    def refuse(path: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files", path)

    file = write_csv(folder / "list.csv", [[name, "cat"] for name in IMAGES])
    monkeypatch.setattr("vit_ray.data.convert.rows.os.stat", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        next(rows_of(units(str(file))[0])).read()


def test_a_header_may_span_lines(serial, folder):
    header = '\ufeffpath,label,"a note\nof two lines",caption\r\n'
    rows = "".join(f"{name},cat,x,y\r\n" for name in IMAGES)
    (folder / "list.csv").write_bytes((header + rows).encode())
    found = labels_of(converted(folder / "list.csv", folder / "set", columns=["caption"]))
    assert found == dict.fromkeys(IMAGES, "cat")
    assert rejections(folder / "set") == {}


def test_of_several_columns_one_is_chosen_by_the_user(serial, folder):
    rows = [[name, f"old/{name}", str(i % 2), "dc"[i % 2]] for i, name in enumerate(IMAGES)]
    with (folder / "list.csv").open("w", newline="") as sink:
        csv.writer(sink).writerows([["Photo", "path", "label", "class"], *rows])
    with pytest.raises(ValueError, match=r"one field for the label .* and has class, label, "):
        converted(folder / "list.csv", folder / "set", image_field="Photo")
    options = {"image_field": "Photo", "label_field": "class"}
    found = labels_of(converted(folder / "list.csv", folder / "set", **options))
    assert found == {name: "dc"[i % 2] for i, name in enumerate(IMAGES)}


def test_of_several_keys_one_is_chosen_by_the_user(serial, folder):
    rows = [{"photo": name, "label": 0, "class": "cat"} for name in IMAGES]
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"image_field": "photo", "max_rejected_fraction": 1.0}
    with pytest.raises(ValueError, match=r"one field for the label .* and has class, label, "):
        converted(folder / "list.jsonl", folder / "none", **options)
    rows = converted(folder / "list.jsonl", folder / "set", **options, label_field="class")
    assert labels_of(rows) == dict.fromkeys(IMAGES, "cat")
