"""What people's data are really like: read right, or refused with what to do, never in silence."""

import json
import unicodedata
from pathlib import Path
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
from tests.data.convert.test_orientation import turned
from tests.data.converting import config_of, convert, units
from tests.data.pictures import encoded, jpeg, picture
from vit_ray.commands import predict
from vit_ray.data import open_dataset
from vit_ray.data.convert.checks import estimate_conversion
from vit_ray.data.images import FORMAT_SUFFIXES, is_image_name

pytestmark = pytest.mark.usefixtures("serial")
IMAGES = [jpeg(i, 20, 24) for i in range(12)]
COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "caf\xe9") for form in ("NFC", "NFD"))


def write_files(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(IMAGES[number % len(IMAGES)])
    return root


def write_csv(folder: Path, labels: list[str], delimiter: str = ",") -> Path:
    write_files(folder, *(f"{i}.jpg" for i in range(len(labels))))
    rows = [delimiter.join([f"{i}.jpg", f'"{label}"']) for i, label in enumerate(labels)]
    lines = [f"path{delimiter}label", *rows]
    (folder / "list.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "list.csv"


def write_jsonl(folder: Path, labels: list[Any]) -> Path:
    write_files(folder, *(f"{i}.jpg" for i in range(len(labels))))
    rows = [json.dumps({"path": f"{i}.jpg", "labels": one}) for i, one in enumerate(labels)]
    (folder / "list.jsonl").write_text("\n".join(rows))
    return folder / "list.jsonl"


@pytest.mark.parametrize(
    "labels",
    [
        [[0, 0, 1], [0, 1, 0], [1, 0, 0]],
        [[0, 1, 1], [1, 1, 0], [0, 0, 1]],
        [[0, 1], [1, 0], [1, 0]],
        [[0, 0, 0], [0, 0, 1], [0, 0, 1]],
    ],
)
def test_places_of_classes_are_not_taken_for_their_numbers(tmp_path, labels):
    told = r"(zeros and ones, )?with a place for each class \(one-hot"
    with pytest.raises(ValueError, match=told):
        convert(write_jsonl(tmp_path, labels), tmp_path / "set")
    table = pa.table({"image": [{"bytes": i} for i in IMAGES[:3]], "label": labels})
    (tmp_path / "hub").mkdir()
    pq.write_table(table, tmp_path / "hub" / "a.parquet")
    for in_place in (False, True):
        with pytest.raises(ValueError, match=told):
            convert(tmp_path / "hub", tmp_path / f"{in_place}", in_place=in_place)


@pytest.mark.parametrize("header", ["label", "labels"])
def test_places_of_classes_as_text_are_refused_too(tmp_path, header):
    write_files(tmp_path, *(f"{i}.jpg" for i in range(3)))
    for name, labels in (("many", ["0;0;1", "0;1;0", "1;0;0"]), ("two", ["0;1", "1;0", "1;0"])):
        rows = "".join(f"{i}.jpg,{label}\n" for i, label in enumerate(labels))
        (tmp_path / f"{name}.csv").write_text(f"path,{header}\n{rows}")
        with pytest.raises(ValueError, match=r"with a place for each class"):
            convert(tmp_path / f"{name}.csv", tmp_path / name)
    forms = ('"[{}, {}, {}]"', '"({}, {}, {})"', '"{},{},{}"', '"{}.0,{}.,{}.0"', "{} {} {}")
    for number, form in enumerate((*forms, "{};{};{}")):
        texts = [form.format(*places) for places in ("001", "010", "110")]
        rows = "".join(f"{i}.jpg,{text}\n" for i, text in enumerate(texts))
        (tmp_path / f"{number}.csv").write_text(f"path,{header}\n{rows}")
        with pytest.raises(ValueError, match=r"with a place for each class"):
            convert(tmp_path / f"{number}.csv", tmp_path / f"of csv {number}")
        texts = [text.strip('"') for text in texts]
        with pytest.raises(ValueError, match=r"with a place for each class"):
            convert(write_jsonl(tmp_path / f"j{number}", texts), tmp_path / f"of j{number}")
        files = [(f"{i}.jpg", IMAGES[i]) for i in range(3)]
        labels = [(f"{i}.cls", text.encode()) for i, text in enumerate(texts)]
        (tmp_path / f"{number}.tar").write_bytes(tar_of([*files, *labels]))
        with pytest.raises(ValueError, match=r"with a place for each class"):
            convert(tmp_path / f"{number}.tar", tmp_path / str(number))
    texts = [["0", "0", "1"], ["0", "1", "0"], ["1", "0", "0"]]
    with pytest.raises(ValueError, match=r"with a place for each class"):
        convert(write_jsonl(tmp_path / "j", texts), tmp_path / "json")


def test_lists_of_class_numbers_stay_what_they_are(tmp_path):
    labels = [[0, 2], [1], [0], [2, 1]]
    found = converted(write_jsonl(tmp_path, labels), tmp_path / "set")
    assert [names for _, (_, names) in sorted(found.items())] == [[*map(str, n)] for n in labels]


def test_two_forms_of_one_letter_are_one_class(tmp_path):
    root = write_files(tmp_path / "s", f"{COMPOSED}/1.jpg", f"{DECOMPOSED}/2.jpg", "tea/3.jpg")
    found = converted(root, tmp_path / "set", classes=["tea", DECOMPOSED])
    assert set(labels_of(found).values()) == {COMPOSED, "tea"}
    assert open_dataset(str(tmp_path / "set")).classes == ["tea", COMPOSED]
    listed = write_csv(tmp_path / "l", [COMPOSED, DECOMPOSED, "tea"])
    assert set(labels_of(converted(listed, tmp_path / "other")).values()) == {COMPOSED, "tea"}


def test_a_path_in_the_other_form_finds_its_file(tmp_path):
    write_files(tmp_path, f"{COMPOSED}.jpg")
    (tmp_path / "list.csv").write_text(f"path,label\n{DECOMPOSED}.jpg,x\n", encoding="utf-8")
    assert converted(tmp_path / "list.csv", tmp_path / "set") == {
        f"{DECOMPOSED}.jpg": (IMAGES[0], ["x"])
    }


@pytest.mark.parametrize("in_place", [False, True])
def test_a_missing_shard_is_an_error(tmp_path, in_place):
    for number in (0, 2):
        table = pa.table({"image": [{"bytes": IMAGES[number]}], "label": ["a"]})
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "data" / f"train-{number:05d}-of-00003.parquet")
    told = r"1 of the 3 shards of '.*train' are missing, the first 00001"
    for source in (tmp_path / "data", f"{tmp_path}/data/*.parquet"):
        with pytest.raises(ValueError, match=told):
            convert(source, tmp_path / "set", in_place=in_place)
    some = f"{tmp_path}/data/train-{{00000,00002}}-of-00003.parquet"
    assert convert(some, tmp_path / "some", in_place=in_place).num_images == 2


def test_a_missing_tfrecord_is_an_error(tmp_path):
    content = record(example(image=IMAGES[0], label=[0]))
    (tmp_path / "pets-train.tfrecord-00001-of-00002").write_bytes(content)
    with pytest.raises(ValueError, match=r"1 of the 2 shards .* are missing, the first 00000"):
        units(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("a/airfield/1.jpg", "b/bar/2.jpg"), r"they lie deeper, such as in '.*/a/airfield'"),
        (("Aves/123/x.jpg", "Fungi/9/y.jpg"), r"they lie deeper, such as in '.*/Aves/123'"),
        (("train_images/1.jpg", "val_images/2.jpg"), r"train_images, val_images, which are splits"),
        (("train/1.jpg", "val/2.jpg"), r"train, val, which are splits"),
        (("train2017/1.jpg", "val2017/2.jpg", "annotations/a.json"), r"train2017, val2017, which"),
        (("Aves/123/1.jpg", "Fungi/cover.jpg"), r"they lie deeper, such as in '.*/Aves/123'"),
        (("a/1.jpg", "a/airfield/2.jpg"), r"at most half of its images itself, .*they lie deeper"),
        (("a/cover.jpg", "a/airfield/1.jpg", "a/bar/2.jpg"), r"they lie deeper, .*'.*/a/airfield'"),
        (
            ("a/airfield/1.jpg", *(f"a/airfield/@eaDir/1.jpg/SYNO_{size}.jpg" for size in "SM")),
            r"they lie deeper, .*'.*/a/airfield'",
        ),
        (("train/cat/1.jpg", "images/3.jpg"), r"they lie deeper, such as in '.*/train/cat'"),
        (("ILSVRC/Data/CLS-LOC/train/n01/1.JPEG",), r"such as in '.*/CLS-LOC/train/n01'"),
        (
            ("Data/CLS-LOC/train/n01/1.JPEG", "Data/CLS-LOC/val/2.JPEG", "Annotations/x.xml"),
            r"they lie deeper, such as in '.*/CLS-LOC/train/n01'",
        ),
    ],
)
def test_class_folders_are_not_looked_for_at_the_wrong_depth(tmp_path, names, told):
    root = write_files(tmp_path / "s", *names)
    with pytest.raises(ValueError, match=told):
        convert(root, tmp_path / "set")
    assert {u.name for u in units(root, format="folder")} >= {names[0].partition("/")[0]}


def test_class_folders_of_the_second_level_are_named_by_a_glob(tmp_path):
    root = write_files(tmp_path / "s", "a/airfield/1.jpg", "b/bar/2.jpg")
    assert labels_of(converted(f"{root}/*/*", tmp_path / "set")) == {
        "a/airfield/1.jpg": "airfield",
        "b/bar/2.jpg": "bar",
    }


def test_what_systems_and_downloads_leave_is_no_image_and_no_class(tmp_path):
    root = write_files(
        tmp_path / "s", "cat/1.jpg", "dog/2.jpg", "@eaDir/cat/3.jpg", "cat/@eaDir/4.jpg",
        "$RECYCLE.BIN/5.jpg", "System Volume Information/6.jpg", "dog/7.jpg.part", "cat/Thumbs.db",
        "cat/desktop.ini", "dog/.DS_Store", "dog/._0.jpg", "__MACOSX/cat/._0.jpg",
    )  # fmt: skip
    assert labels_of(converted(root, tmp_path / "set")) == {"cat/1.jpg": "cat", "dog/2.jpg": "dog"}
    assert rejections(tmp_path / "set") == {}


def test_every_format_that_is_decoded_is_found(tmp_path):
    suffixes = sorted(suffix for each in FORMAT_SUFFIXES.values() for suffix in each)
    assert {"avif", "jp2", "jfif", "jpe", "pgm"} < set(suffixes)
    assert all(is_image_name(f"a.{suffix}") for suffix in suffixes)
    kinds = {"avif": "AVIF", "jp2": "JPEG2000", "jfif": "JPEG", "jpe": "JPEG", "pgm": "PPM"}
    for suffix, kind in kinds.items():
        (tmp_path / "s" / "x").mkdir(parents=True, exist_ok=True)
        (tmp_path / "s" / "x" / f"1.{suffix}").write_bytes(encoded(picture(1, 20, 24), kind))
        (tmp_path / "s" / f"{suffix}.{suffix}").write_bytes(encoded(picture(1, 20, 24), kind))
    report = convert(tmp_path / "s", tmp_path / "set", max_rejected_fraction=0.9)
    assert report.num_images == 5
    assert set(report.rejected.values()) == {"it is not in a class folder"}
    assert len(report.rejected) == 5
    assert estimate_conversion(config_of(tmp_path / "s", "unused")).num_images == 10
    assert len(list(predict._images_at(str(tmp_path / "s")))) == 10
    images = [(file.name, file.read_bytes()) for file in (tmp_path / "s").glob("*.*")]
    labels = [(f"{suffix}.cls", b"x") for suffix in kinds]
    (tmp_path / "a.tar").write_bytes(tar_of([*images, *labels]))
    assert len(converted(tmp_path / "a.tar", tmp_path / "of a tar")) == 5


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (["0.0", "1.0", "0.0"], "numbers with decimals"),
        (["0.0", "1.0", "1"], "numbers with decimals"),
        (["0.5", "0.25", "1.75"], "numbers with decimals"),
        (["+1", "1e0", "2"], "numbers with decimals"),
        (["0,0", "1,0", "0,0"], "numbers with decimals"),
        (["cat", "nan", "dog"], r"\['nan'\] usually means that there is none"),
        (["cat", "None", "dog"], r"\['None'\] usually means that there is none"),
        (["True", "False", "True"], r"\['False', 'True'\] are truth values"),
        (
            ["cat", "Cat", "dog"],
            r"labels \['Cat', 'cat'\] differ only in capitals; .* in convert.classes$",
        ),
    ],
)
def test_labels_that_are_probably_none_are_refused(tmp_path, labels, told):
    source = write_csv(tmp_path, labels)
    with pytest.raises(ValueError, match=told):
        convert(source, tmp_path / "set")
    given = sorted(set(labels))
    found = converted(source, tmp_path / "given", classes=given)
    assert labels_of(found) == {f"{i}.jpg": label for i, label in enumerate(labels)}


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_a_csv_may_have_other_delimiters(tmp_path, delimiter):
    source = write_csv(tmp_path, ["a, b", "c", 'x ""y""'], delimiter)
    assert labels_of(converted(source, tmp_path / "set")) == {
        "0.jpg": "a, b", "1.jpg": "c", "2.jpg": 'x "y"',
    }  # fmt: skip


def test_orientations_are_counted_and_what_turns_them_is_said(tmp_path):
    (tmp_path / "s" / "a").mkdir(parents=True)
    for number in range(10):
        content = turned("JPEG", 6 if number < 3 else 1)
        (tmp_path / "s" / "a" / f"{number}.jpg").write_bytes(content)
    report = convert(tmp_path / "s", tmp_path / "set")
    assert report.notes[0].startswith("3 images have an orientation in EXIF and are kept as they")
    assert "convert.apply_orientation=true turns them" in report.notes[0]
    report = convert(tmp_path / "s", tmp_path / "turned", apply_orientation=True)
    assert report.notes[0] == "3 images were turned as their EXIF says"
    assert open_dataset(str(tmp_path / "turned")).origin["apply_orientation"] is True


def test_classes_of_one_image_and_sets_of_one_class_are_said(tmp_path):
    root = write_files(tmp_path / "s", "cat/1.jpg", "cat/2.jpg", "dog/3.jpg")
    assert convert(root, tmp_path / "set").notes == ["1 classes have one image: dog"]
    one = write_files(tmp_path / "o", "cat/1.jpg", "cat/2.jpg")
    assert convert(one, tmp_path / "one").notes == ["there is one class only: 'cat'"]


def test_folders_without_images_are_said(tmp_path):
    root = write_files(tmp_path / "s", *(f"{name}/{i}.jpg" for name in "ac" for i in range(2)))
    for name in (f"b{DECOMPOSED}", "d"):
        (root / name).mkdir()
    note = f"2 folders have no images and are no classes: b{COMPOSED}, d"
    assert convert(root, tmp_path / "set").notes == [note]
    report = convert(root, tmp_path / "given", classes=["a", f"b{COMPOSED}", "c", "d"])
    assert report.notes == [f"2 classes have no images: b{COMPOSED}, d"]
    root = write_files(tmp_path / "n", "0/1.jpg", "0/2.jpg", "2/3.jpg", "2/4.jpg")
    (root / "1").mkdir()
    settings = {"labels_are": "indices", "classes": ["cat", "dog", "owl"]}
    report = convert(root, tmp_path / "numbered", **settings)
    assert report.notes == ["1 classes have no images: dog"]


def test_truths_and_empty_labels_are_rejected(tmp_path):
    source = write_jsonl(tmp_path, [True, "", ["x", ""], "x", "x"])
    found = converted(source, tmp_path / "set", max_rejected_fraction=0.9)
    assert sorted(found) == ["3.jpg", "4.jpg"]
    reasons = rejections(tmp_path / "set")
    assert "of type bool" in reasons["0.jpg"]
    assert reasons["1.jpg"] == reasons["2.jpg"] == "its label is empty"


def test_a_destination_in_the_source_through_a_link_is_refused(tmp_path):
    root = write_files(tmp_path / "s", "cat/1.jpg", "dog/2.jpg")
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(ValueError, match=r"is in convert\.source="):
        convert(root, tmp_path / "link" / "set")
    assert sorted(path.name for path in root.iterdir()) == ["cat", "dog"]


def test_what_a_refused_conversion_leaves_is_no_class_of_the_next(tmp_path):
    root = write_files(tmp_path / "s", "in/cat/1.jpg", "in/dog/2.jpg")
    (root / "in" / "cat" / "0.jpg").write_bytes(b"broken")
    with pytest.raises(ValueError, match="not usable images"):
        convert(root / "in", root / "out")
    with pytest.raises(ValueError, match=r"'.*/out' holds '.*', of a conversion; move that folder"):
        convert(root, tmp_path / "set", format="folder", max_rejected_fraction=0.9)
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no images"):
        convert(tmp_path / "empty", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
