"""The classes of a source, from its labels and what it says of them."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.data.convert.archives import (
    converted,
    labels_of,
    parquet,
    rejections,
    samples,
    tar_of,
    write_files,
    write_hub_file,
)
from tests.data.converting import config_of, convert
from tests.data.pictures import jpeg
from vit_ray.data import open_dataset
from vit_ray.data.convert import labels as labels_module
from vit_ray.data.convert.rows import Row, row_table

pytestmark = pytest.mark.usefixtures("serial")
IMAGES = [jpeg(i, 20, 24) for i in range(12)]
FILES: dict[str, bytes | str] = {f"{i}.jpg": image for i, image in enumerate(IMAGES[:4])}
COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "caf\xe9") for form in ("NFC", "NFD"))


def write_csv(folder: Path, labels: list[str]) -> Path:
    rows = [f'{i}.jpg,"{label}"' for i, label in enumerate(labels)]
    write_files(folder, FILES | {"list.csv": "\n".join(["path,label", *rows])})
    return folder / "list.csv"


def write_jsonl(folder: Path, labels: list[Any]) -> Path:
    rows = [json.dumps({"path": f"{i}.jpg", "labels": one}) for i, one in enumerate(labels)]
    write_files(folder, FILES | {"list.jsonl": "\n".join(rows)})
    return folder / "list.jsonl"


def class_label(names: list[str]) -> dict[str, Any]:
    return {"label": {"names": names, "_type": "ClassLabel"}}


def test_a_column_that_is_no_label_is_refused():
    facts = labels_module.SourceFacts({})
    facts.add(row_table([Row(str(i), (f"caption {i}",)) for i in range(1000)]))
    config = config_of("source", "set")
    with pytest.raises(ValueError, match=r"1,000 different labels, .*check convert\.label_field"):
        labels_module.classes_of(facts, config, of_folders=False)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ({"0", "-1", "1"}, r"from -1 to 1 \(-1 by convention means that an image is not labelled"),
        ({"0", "1", "3"}, "from 0 to 3, and not 0 to 2, .*labels_are=indices .*labels_are=names"),
        ({"1", "2", "3"}, "from 1 to 3, and not 0 to 2"),
        ({"0", "1", "01"}, "3 integers from 0 to 1, and not 0 to 2"),
    ],
)
def test_integers_that_are_not_all_from_0_on_are_not_closed_up_without_a_word(labels, told):
    for kinds in ({"index"}, {"text"}):
        with pytest.raises(ValueError, match=told):
            labels_module.class_names(labels, kinds, None, "auto")
    # What a folder is called is a name; and names may be what they like.
    numbered = sorted(labels, key=lambda label: (int(label), label))
    assert labels_module.class_names(labels, {"text"}, None, "auto", of_folders=True) == (
        numbered,
        False,
    )
    assert labels_module.class_names(labels, {"text"}, None, "names") == (numbered, False)


def test_indices_without_names_keep_their_places():
    found = labels_module.class_names({"0", "3"}, {"index"}, None, "indices")
    assert found == (["0", "1", "2", "3"], True)
    assert labels_module.class_names({"0", "1"}, {"index"}, None, "auto") == (["0", "1"], False)
    for wrong in ({"0", "-1"}, {"0", "cat"}, {"0", "01"}):
        with pytest.raises(ValueError, match=r"are not integers from 0 on; correct them"):
            labels_module.class_names(wrong, {"text"}, None, "indices")
    with pytest.raises(ValueError, match=r"check convert\.label_field"):
        labels_module.class_names({"0", "999999999999"}, {"index"}, None, "indices")


PLACES = r"with a place for each class"


@pytest.mark.parametrize(
    "labels",
    [
        [[0, 0, 1], [0, 1, 0], [1, 0, 0]],
        [[0, 1, 1], [1, 1, 0], [0, 0, 1]],
        [[0, 1], [1, 0], [1, 0]],
        [[0, 0, 0], [0, 0, 1], [0, 0, 1]],
        [["0", "0", "1"], ["0", "1", "0"], ["1", "0", "0"]],
    ],
)
def test_places_of_classes_are_not_taken_for_their_numbers(tmp_path, labels):
    with pytest.raises(ValueError, match=PLACES):
        convert(write_jsonl(tmp_path, labels), tmp_path / "set")
    columns = {"image": [{"bytes": image} for image in IMAGES[:3]], "label": labels}
    write_files(tmp_path / "hub", {"a.parquet": parquet(columns)})
    for in_place in (False, True):
        with pytest.raises(ValueError, match=PLACES):
            convert(tmp_path / "hub", tmp_path / f"{in_place}", in_place=in_place)


@pytest.mark.parametrize(
    "form",
    ["{};{};{}", "{};{}", "[{}, {}, {}]", "({}, {}, {})", "{},{},{}", "{}.0,{}.,{}.0", "{} {} {}"],
)
def test_places_of_classes_as_text_are_not_taken_for_names(tmp_path, form):
    rows = ("01", "10", "10") if form == "{};{}" else ("001", "010", "110")
    texts = [form.format(*places) for places in rows]
    listed = "".join(f'{i}.jpg,"{text}"\n' for i, text in enumerate(texts))
    archive = tar_of(samples(IMAGES[:3], [text.encode() for text in texts]))
    lists = {f"{header}.csv": f"path,{header}\n{listed}" for header in ("label", "labels")}
    write_files(tmp_path, FILES | lists | {"a.tar": archive})
    for source in ("label.csv", "labels.csv", write_jsonl(tmp_path, texts).name, "a.tar"):
        with pytest.raises(ValueError, match=PLACES):
            convert(tmp_path / source, tmp_path / f"set of {source}")


def test_lists_of_class_numbers_stay_what_they_are(tmp_path):
    labels = [[0, 2], [1], [0], [2, 1]]
    found = labels_of(converted(write_jsonl(tmp_path, labels), tmp_path / "set"))
    assert found == {"0.jpg": ["0", "2"], "1.jpg": "1", "2.jpg": "0", "3.jpg": ["2", "1"]}


def test_two_forms_of_one_letter_are_one_class(tmp_path):
    names = (f"{COMPOSED}/1.jpg", f"{DECOMPOSED}/2.jpg", "tea/3.jpg")
    root = write_files(tmp_path / "s", dict(zip(names, IMAGES, strict=False)))
    found = converted(root, tmp_path / "set", classes=["tea", DECOMPOSED])
    assert list(labels_of(found).values()).count(COMPOSED) == 2
    assert open_dataset(str(tmp_path / "set")).classes == ["tea", COMPOSED]
    listed = write_csv(tmp_path / "l", [COMPOSED, DECOMPOSED, "tea"])
    found = converted(listed, tmp_path / "other")
    assert list(labels_of(found).values()).count(COMPOSED) == 2


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (["0.0", "1.0", "1"], "numbers with decimals"),
        (["0.5", "0.25", "1.75"], "numbers with decimals"),
        (["+1", "1e0", "2"], "numbers with decimals"),
        (["0,0", "1,0", "0,0"], "numbers with decimals"),
        (["cat", "nan", "dog"], r"\['nan'\] usually means that there is none"),
        (["cat", "None", "dog"], r"\['None'\] usually means that there is none"),
        (["True", "False", "True"], r"\['False', 'True'\] are truth values"),
        (["cat", "Cat", "dog"], r"labels \['Cat', 'cat'\] .* in convert.classes$"),
    ],
)
def test_labels_that_are_probably_none_are_refused_unless_they_are_given(tmp_path, labels, told):
    source = write_csv(tmp_path, labels)
    with pytest.raises(ValueError, match=told):
        convert(source, tmp_path / "set")
    given = sorted(set(labels))
    found = converted(source, tmp_path / "given", classes=given)
    assert labels_of(found) == {f"{i}.jpg": label for i, label in enumerate(labels)}


def test_text_beside_given_classes_is_what_the_user_says(tmp_path):
    file, classes = tmp_path / "a.tar", ["2", "0", "1"]
    file.write_bytes(tar_of(samples(IMAGES, [b"%d" % (i % 3) for i in range(12)])))
    for labels_are, names in (("names", ["0", "1", "2"]), ("indices", classes)):
        rows = converted(file, tmp_path / labels_are, classes=classes, labels_are=labels_are)
        assert labels_of(rows) == {f"a/{i}": names[i % 3] for i in range(12)}
    rows = converted(file, tmp_path / "words", classes=["cat", "dog", "eel"])
    assert labels_of(rows)["a/1"] == "dog"


NUMBERS_AS_NAMES = sorted(str(i) for i in range(1, 13))  # 1, 10, 11, 12, 2, ...
CAT_AND_DOG = class_label(["cat", "dog"])
OF_PARQUET: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "indices of names": (list(range(12)), class_label(NUMBERS_AS_NAMES), None, NUMBERS_AS_NAMES),
    "text": ([str(i % 3) for i in range(12)], None, ["2", "1", "0"], ["0", "1", "2"] * 4),
    "integers": ([i % 3 for i in range(12)], None, ["2", "1", "0"], ["2", "1", "0"] * 4),
    "others declared": ([0, 1] * 6, CAT_AND_DOG, ["dog", "cat"], ["cat", "dog"] * 6),
}


@pytest.mark.parametrize("name", OF_PARQUET)
def test_a_column_of_parquet_says_what_its_labels_are(tmp_path, name):
    """Also beside classes that are given."""
    labels, features, classes, expected = OF_PARQUET[name]
    write_hub_file(tmp_path / "train.parquet", IMAGES, labels, features)
    rows = converted(tmp_path / "train.parquet", tmp_path / "set", classes=classes)
    assert rows == {f"train/{i:08d}": (IMAGES[i], [expected[i]]) for i in range(12)}
    assert open_dataset(str(tmp_path / "set")).classes == (classes or features["label"]["names"])


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (pa.array([0, 1] * 6).dictionary_encode(), ["cat", "dog"] * 6),
        (pa.array([0, 1] * 6, pa.uint64()), ["cat", "dog"] * 6),
        (pa.array([[0], [1]] * 6, pa.large_list(pa.int8())), ["cat", "dog"] * 6),
        (pa.array([[0, 1]] * 12, pa.list_(pa.int32(), 2)), [["cat", "dog"]] * 12),
    ],
)
def test_an_index_is_one_in_whatever_integers(tmp_path, labels, expected):
    feature = {"label": {"feature": CAT_AND_DOG["label"], "_type": "List"}}
    write_hub_file(tmp_path / "train.parquet", IMAGES, labels, feature)
    found = labels_of(converted(tmp_path / "train.parquet", tmp_path / "set"))
    assert [found[f"train/{i:08d}"] for i in range(12)] == expected


def test_labels_outside_the_classes_are_rejected(tmp_path):
    file = tmp_path / "train.parquet"
    write_hub_file(file, IMAGES, [-1, 2, None, *[1] * 9], CAT_AND_DOG)
    assert len(converted(file, tmp_path / "set", max_rejected_fraction=0.5)) == 9
    assert rejections(tmp_path / "set") == {
        "train/00000000": "its label is -1 (by convention: not labelled), of 2 classes",
        "train/00000001": "its label is 2, of 2 classes",
        "train/00000002": "it has no label",
    }


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
