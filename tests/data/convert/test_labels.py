"""Labels of images, the classes of a source, and text that goes with its images."""

import csv
import json
import unicodedata
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
    rejections,
    samples,
    tar_of,
    write_files,
)
from tests.data.converting import config_of, convert
from tests.data.pictures import jpeg
from vit_ray.data import open_dataset
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.convert.labels import SourceFacts, classes_of, stored_text
from vit_ray.data.shards import RowGroupReader

pytestmark = pytest.mark.usefixtures("serial")
IMAGES = [jpeg(i, 20, 24) for i in range(6)]
FILES = {f"{i}.jpg": image for i, image in enumerate(IMAGES)}
COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "caf\xe9") for form in ("NFC", "NFD"))


def source_of(folder: Path, name: str, labels: Any, features: Any = None) -> Path:
    """Images with these labels, in the format and under the header that its name says."""
    images = IMAGES[: len(labels)]
    if name.endswith(".parquet"):
        structs = [{"bytes": image} for image in images]
        content: bytes | str = parquet({"image": structs, "label": labels}, features)
    elif name.endswith(".tar"):
        content = tar_of(samples(images, [label.encode() for label in labels]))
    elif name.endswith(".csv"):
        rows = [f'{i}.jpg,"{label}"' for i, label in enumerate(labels)]
        content = "\n".join([f"path,{name.removesuffix('.csv')}", *rows])
    else:
        lines = [{"path": f"{i}.jpg", "labels": label} for i, label in enumerate(labels)]
        content = "\n".join(map(json.dumps, lines))
    return write_files(folder, FILES | {name: content}) / name


def class_label(names: list[str]) -> dict[str, Any]:
    return {"label": {"names": names, "_type": "ClassLabel"}}


def names_of(
    labels: set[str], kind: str, labels_are: str, *, of_folders: bool = False
) -> list[str]:
    """The classes of a source that names none."""
    facts = SourceFacts({}, labels=labels, kinds={kind}, rows=len(labels))
    config = config_of("source", "set", labels_are=labels_are)
    names, label_of = classes_of(facts, config, of_folders=of_folders)
    assert [names[label_of[label]] for label in labels] == list(labels)
    return names


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ({"0", "-1", "1"}, r"from -1 to 1, and not 0 to 2 \(-1 by convention: not labelled"),
        ({"0", "1", "3"}, "from 0 to 3, and not 0 to 2 .*labels_are=indices .*labels_are=names"),
        ({"0", "1", "01"}, "3 integers from 0 to 1, and not 0 to 2"),
        ({"2", "10"}, "2 integers from 2 to 10, and not 0 to 1"),
    ],
)
def test_integers_that_are_not_all_from_0_on_are_not_closed_up_without_a_word(labels, told):
    for kind in ("index", "text"):
        with pytest.raises(ValueError, match=told):
            names_of(labels, kind, "auto")
    # What a folder is called is a name; and names may be what they like.
    numbered = sorted(labels, key=lambda label: (int(label), label))
    assert names_of(labels, "text", "auto", of_folders=True) == numbered
    assert names_of(labels, "text", "names") == numbered


def test_indices_without_names_keep_their_places():
    assert names_of({"0", "3"}, "index", "indices") == ["0", "1", "2", "3"]
    assert names_of({"0", "1"}, "index", "auto") == ["0", "1"]
    for wrong in ("-1", "cat", "01", "999999999999"):
        with pytest.raises(ValueError, match=rf"\['{wrong}'\] are not indices of the 1 classes"):
            names_of({"0", wrong}, "text", "indices")
    with pytest.raises(ValueError, match="are not indices"):
        names_of({"cat", "dog"}, "text", "indices")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    "labels",
    [
        [[0, 0, 1], [0, 1, 0], [1, 0, 0]],
        [[0, 1, 1], [1, 1, 0], [0, 0, 1]],
        [[0, 1], [1, 0], [1, 0]],
        [["0", "0", "1"], ["0", "1", "0"], ["1", "0", "0"]],
    ],
)
def test_places_of_classes_are_not_taken_for_their_numbers(tmp_path, name, labels):
    source = source_of(tmp_path / "s", name, labels)
    for in_place in {False, name == "a.parquet"}:
        with pytest.raises(ValueError, match="with a place for each class"):
            convert(source, tmp_path / f"in place {in_place}", in_place=in_place)


@pytest.mark.parametrize("name", ["label.csv", "labels.csv", "a.jsonl", "a.tar"])
@pytest.mark.parametrize(
    "form",
    ["{};{};{}", "{};{}", "[{}, {}, {}]", "({}, {}, {})", "{},{},{}", "{}.0,{}.,{}.0", "{} {} {}"],
)
def test_places_of_classes_as_text_are_not_taken_for_names(tmp_path, name, form):
    rows = ("01", "10", "10") if form == "{};{}" else ("001", "010", "110")
    texts = [form.format(*places) for places in rows]
    with pytest.raises(ValueError, match="with a place for each class"):
        convert(source_of(tmp_path / "s", name, texts), tmp_path / "set")


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (["0.0", "1.0", "1"], "numbers with decimals"),
        (["0,0", "1,0", "0,0"], "numbers with decimals"),
        (["cat", "None", "dog"], r"\['None'\]"),
        (["cat", "nan", "dog"], r"\['nan'\] usually means that there is none"),
        (["True", "False", "True"], r"\['False', 'True'\] are truth values"),
        (["cat", "Cat", "dog"], r"labels \['Cat', 'cat'\] .* in convert.classes$"),
    ],
)
def test_labels_that_are_probably_none_are_refused_unless_they_are_given(tmp_path, labels, told):
    source = source_of(tmp_path / "s", "label.csv", labels)
    with pytest.raises(ValueError, match=told):
        convert(source, tmp_path / "set")
    found = converted(source, tmp_path / "given", classes=sorted(set(labels)))
    assert labels_of(found) == {f"{i}.jpg": label for i, label in enumerate(labels)}


BY_NUMBERS, CAT_AND_DOG = class_label(["1", "10", "2"]), class_label(["cat", "dog"])
LISTS = {"label": {"feature": CAT_AND_DOG["label"], "_type": "List"}}
FIXED = pa.array([[0, 1], [1, 0]], pa.list_(pa.int32(), 2))
CAFES = [COMPOSED, DECOMPOSED, "tea"]
# Source, labels, what parquet says of them, keys of `convert`, and the names they stand for.
MEANINGS: list[tuple[str, Any, Any, dict[str, Any], list[Any]]] = [
    ("a.parquet", [2, 0, 1], BY_NUMBERS, {}, ["2", "1", "10"]),
    ("a.parquet", ["0", "1"], None, {"classes": ["1", "0"]}, ["0", "1"]),
    ("a.parquet", [0, 1], None, {"classes": ["1", "0"]}, ["1", "0"]),
    ("a.parquet", [0, 1], CAT_AND_DOG, {"classes": ["dog", "cat"]}, ["cat", "dog"]),
    ("a.parquet", pa.array([0, 1]).dictionary_encode(), CAT_AND_DOG, {}, ["cat", "dog"]),
    ("a.parquet", [0, 1], CAT_AND_DOG | {"image": [[{"dtype": "int8"}]]}, {}, ["cat", "dog"]),
    ("a.parquet", pa.array([[0], [1]], pa.large_list(pa.int8())), LISTS, {}, ["cat", "dog"]),
    ("a.parquet", FIXED, LISTS, {}, [["cat", "dog"], ["dog", "cat"]]),
    ("a.tar", ["0", "1"], None, {"classes": ["1", "0"], "labels_are": "names"}, ["0", "1"]),
    ("a.tar", ["0", "1"], None, {"classes": ["1", "0"], "labels_are": "indices"}, ["1", "0"]),
    ("a.tar", ["0", "1"], None, {"classes": ["cat", "dog"]}, ["cat", "dog"]),
    ("a.jsonl", [[0, 2], [1], [0], [2, 1]], None, {}, [["0", "2"], "1", "0", ["2", "1"]]),
    ("labels.csv", ["cat;dog", "cat"], None, {}, [["cat", "dog"], "cat"]),
    ("label.csv", CAFES, None, {}, [COMPOSED, COMPOSED, "tea"]),
    ("label.csv", CAFES, None, {"classes": ["tea", DECOMPOSED]}, [COMPOSED, COMPOSED, "tea"]),
]


@pytest.mark.parametrize(("name", "labels", "features", "options", "expected"), MEANINGS)
def test_labels_are_what_source_and_user_say(tmp_path, name, labels, features, options, expected):
    source = source_of(tmp_path / "s", name, labels, features)
    found = labels_of(converted(source, tmp_path / "set", **options))
    assert [found[key] for key in sorted(found)] == expected


def test_labels_outside_the_classes_are_rejected(tmp_path):
    source = source_of(tmp_path / "s", "a.parquet", [-1, 2, None, 1, 1], CAT_AND_DOG)
    assert len(converted(source, tmp_path / "set", max_rejected_fraction=0.7)) == 2
    assert rejections(tmp_path / "set") == {
        "a/00000000": (
            "its labels [-1] (-1 by convention: not labelled) are not all of the 2 classes"
        ),
        "a/00000001": "its labels [2] are not all of the 2 classes",
        "a/00000002": "its label is None, not text, an integer, or a list of them",
    }
    convert(source, tmp_path / "in place", in_place=True, max_rejected_fraction=0.7)
    assert RowGroupReader(open_dataset(str(tmp_path / "in place"))).read(0).is_whole


def test_the_classes_are_those_with_images_and_what_is_odd_in_them_is_said(tmp_path):
    names = ("a/0.jpg", "a/1.jpg", "c/2.jpg")
    root = write_files(tmp_path / "s", dict(zip(names, IMAGES, strict=False)))
    for name in (f"b{DECOMPOSED}", "d"):
        (root / name).mkdir()
    assert convert(root, tmp_path / "set").notes == [
        "1 classes have one image: c",
        f"2 folders have no images and are no classes: b{COMPOSED}, d",
    ]
    assert open_dataset(str(tmp_path / "set")).classes == ["a", "c"]
    report = convert(root, tmp_path / "given", classes=["a", f"b{COMPOSED}", "c", "d"])
    assert report.notes[0] == f"2 classes have no images: b{COMPOSED}, d"


def test_numbered_folders_are_names_or_indices_as_the_user_says(tmp_path):
    names = ("10/a.jpg", "9/a.jpg", "09/a.jpg")
    root = write_files(tmp_path / "s", dict(zip(names, IMAGES, strict=False)))
    found = labels_of(converted(root, tmp_path / "set", classes=["9", "10", "09"]))
    assert found == {name: name.partition("/")[0] for name in names}
    names = ("0/1.jpg", "0/2.jpg", "2/3.jpg")
    root = write_files(tmp_path / "n", dict(zip(names, IMAGES, strict=False)))
    options = {"labels_are": "indices", "classes": ["cat", "dog", "owl"]}
    found = labels_of(converted(root, tmp_path / "numbered", **options))
    assert found == dict(zip(names, ["cat", "cat", "owl"], strict=True))


def test_folders_of_two_forms_of_one_letter_are_one_class(tmp_path):
    names = (f"{COMPOSED}/1.jpg", f"{DECOMPOSED}/1.jpg", "tea/3.jpg")
    root = write_files(tmp_path / "s", dict(zip(names, IMAGES, strict=False)))
    found = converted(root, tmp_path / "set", classes=["tea", DECOMPOSED])
    assert labels_of(found) == dict(zip(names, [COMPOSED, COMPOSED, "tea"], strict=True))
    assert open_dataset(str(tmp_path / "set")).classes == ["tea", COMPOSED]


STRUCTS = [{"bytes": image} for image in IMAGES]
CAPTIONS = ["a cat, sitting", "", "caf\xe9\nof two lines", 'said "so"', None, "\u732b"]
NUMBERS = [7, -1, 2**40, 0, 3, 4]

CLASS_LABELS = {
    name: {"names": names, "_type": "ClassLabel"}
    for name, names in (("label", ["bee", "cat"]), ("class", ["dog", "owl"]))
}
COLUMNS = {"left": STRUCTS[:1], "right": STRUCTS[1:2], "label": [1], "class": [0]}
MEMBERS = [
    ("0.left.jpg", IMAGES[0]),
    ("0.right.jpg", IMAGES[1]),
    ("0.json", b'{"label": "cat", "class": "dog"}'),
]
FEATURES = {"left": IMAGES[0], "right": IMAGES[1], "label": b"cat", "class": b"dog"}
SEVERAL: dict[str, Any] = {
    "a.csv": "left,right,label,class\n0.jpg,1.jpg,cat,dog\n",
    "a.jsonl": '{"left": "0.jpg", "right": "1.jpg", "label": "cat", "class": "dog"}',
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
    for label_field in ("kind", None):
        options = {"image_field": image_field, "label_field": label_field}
        with pytest.raises(ValueError, match=r"field for the label \(.*\), and has class"):
            converted(source, tmp_path / f"none {label_field}", **options)


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
            writer = csv.DictWriter(sink, ["caption", "path", "label", "id"])
            writer.writeheader()
            writer.writerows(rows)
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
    assert check_file(0, one, 1.0).problems == []
    file = tmp_path / "with" / one.files[0].path
    file.write_bytes(file.read_bytes().replace(b"sitting", b"sitteng"))
    (problem,) = check_file(0, one, 1.0).problems
    assert "checksum" in problem


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
        assert "can't decode" in rejections(tmp_path / f"set of {name}")[wrong]


def test_bytes_are_not_stored_as_text():
    with pytest.raises(ValueError, match="contains bytes"):
        stored_text({"a": [{"b": b"x"}]})
    assert stored_text({"day": date(2026, 1, 2)}) == '{"day": "2026-01-02"}'
