import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.convert.archives import converted, labels_of, rejections, write_hub_file
from tests.data.pictures import jpeg
from vit_ray.data import open_dataset

IMAGES = [jpeg(i) for i in range(12)]
DIGITS_AS_TEXT = sorted(str(i) for i in range(1, 13))  # 1, 10, 11, 12, 2, ...


def class_label(names: list[str]) -> dict[str, object]:
    return {"label": {"names": names, "_type": "ClassLabel"}}


def test_an_index_of_a_class_label_is_no_name(serial, tmp_path):
    """Class names that are numbers, none of which is its own index."""
    file = tmp_path / "source" / "train.parquet"
    write_hub_file(file, IMAGES, list(range(12)), class_label(DIGITS_AS_TEXT))
    rows = converted(file, tmp_path / "set")
    assert rows == {f"train/{i:08d}": (IMAGES[i], [DIGITS_AS_TEXT[i]]) for i in range(12)}
    assert open_dataset(str(tmp_path / "set")).classes == DIGITS_AS_TEXT


def test_text_in_a_column_is_a_name(serial, tmp_path):
    """And stays so beside given classes, though it could be an index of them."""
    file = tmp_path / "train.parquet"
    write_hub_file(file, IMAGES, [str(i % 3) for i in range(12)])
    rows = converted(file, tmp_path / "set", classes=["2", "1", "0"])
    assert labels_of(rows) == {f"train/{i:08d}": str(i % 3) for i in range(12)}
    assert open_dataset(str(tmp_path / "set")).classes == ["2", "1", "0"]


def test_plain_integers_are_indices_of_given_classes(serial, tmp_path):
    file = tmp_path / "train.parquet"
    write_hub_file(file, IMAGES, [i % 3 for i in range(12)])
    rows = converted(file, tmp_path / "set", classes=["2", "1", "0"])
    assert labels_of(rows) == {f"train/{i:08d}": str(2 - i % 3) for i in range(12)}
    with pytest.raises(ValueError, match=r"labels \['2'\] are not indices of the 2 classes"):
        converted(file, tmp_path / "other", classes=["a", "b"])


def test_lists_of_class_labels_are_several(serial, tmp_path):
    feature = {"label": {"feature": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}
    file = tmp_path / "train.parquet"
    write_hub_file(file, IMAGES, [[0, 1] if i else [] for i in range(12)], feature)
    rows = converted(file, tmp_path / "set")
    assert set(map(tuple, labels_of(rows).values())) == {("cat", "dog")}
    assert rejections(tmp_path / "set") == {"train/00000000": "it has no label"}


def test_labels_outside_the_classes_are_rejected(serial, tmp_path):
    file = tmp_path / "train.parquet"
    labels = [-1, 2, None, *[1] * 9]
    write_hub_file(file, IMAGES, labels, class_label(["cat", "dog"]))
    rows = converted(file, tmp_path / "set", max_rejected_fraction=0.5)
    assert len(rows) == 9
    assert rejections(tmp_path / "set") == {
        "train/00000000": "its label is -1 (by convention: not labelled), of 2 classes",
        "train/00000001": "its label is 2, of 2 classes",
        "train/00000002": "it has no label",
    }


def test_files_that_declare_different_classes_are_refused(serial, tmp_path):
    for name, classes in (("a", ["cat", "dog"]), ("b", ["dog", "cat"])):
        file = tmp_path / "source" / f"{name}.parquet"
        write_hub_file(file, IMAGES, [0] * 12, class_label(classes))
    with pytest.raises(ValueError, match=r"files of the source declare different class names, \("):
        converted(tmp_path / "source", tmp_path / "set")
    rows = converted(tmp_path / "source", tmp_path / "given", classes=["dog", "cat"])
    assert {(key[0], name) for key, name in labels_of(rows).items()} == {("a", "cat"), ("b", "dog")}


def test_a_damaged_row_group_costs_its_own_rows(serial, tmp_path):
    file = tmp_path / "train.parquet"
    write_hub_file(file, IMAGES, [i % 2 for i in range(12)])
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


def test_a_file_without_its_footer_is_named(serial, tmp_path):
    for name in ("a", "b"):
        write_hub_file(tmp_path / "source" / f"{name}.parquet", IMAGES, [0] * 12)
    file = tmp_path / "source" / "b.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"b.parquet is damaged at byte .*footer cannot be read"):
        converted(tmp_path / "source", tmp_path / "set")


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"image": ["a.jpg"], "label": [1]}, "expected encoded images"),
        ({"image": [b"x"], "label": [1.5]}, "expected integers, text"),
        ({"image": [b"x"], "label": [[[1]]]}, "expected integers, text, or lists of one of them"),
        (
            {"image": [b"x"], "caption": ["a cat"]},
            "needs one field for the label .* and has caption, image; choose",
        ),
    ],
)
def test_columns_that_are_not_understood_are_refused(serial, tmp_path, columns, reason):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=rf"x.parquet'.*{reason}"):
        converted(tmp_path / "x.parquet", tmp_path / "set")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["cat", "cat\0"], r"train.parquet' has the class name 'cat\\x00' .* control char"),
        (["cat", "dog\nowl"], r"has the class name 'dog\\nowl' .* line break"),
        (["cat", " cat"], "has the class name 'cat' twice"),
        ("cd", "train.parquet': its class names are not a list of texts: cd"),
        (["cat", 1], r"not a list of texts: \['cat', 1\]"),
        ({"0": "cat", "1": "dog"}, "not a list of texts: {'0'"),
    ],
)
def test_declared_names_that_look_alike_or_are_none_are_refused(serial, tmp_path, names, why):
    write_hub_file(
        tmp_path / "train.parquet", IMAGES, [i % 2 for i in range(12)], class_label(names)
    )
    with pytest.raises(ValueError, match=why):
        converted(tmp_path / "train.parquet", tmp_path / "set")
    if "class name '" in why:
        with pytest.raises(ValueError, match=r"convert\.classes has "):
            converted(tmp_path / "train.parquet", tmp_path / "set", classes=names)


def test_two_columns_of_one_name_are_refused(serial, tmp_path):
    images = pa.array([{"bytes": image} for image in IMAGES])
    labels = [pa.array([label] * 12) for label in (0, 1)]
    table = pa.Table.from_arrays([images, *labels], names=["image", "label", "label"])
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"train.parquet' has 2 columns 'label'"):
        converted(tmp_path / "train.parquet", tmp_path / "set")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (pa.array([0, 1] * 6).dictionary_encode(), ["cat", "dog"] * 6),
        (pa.array([0, 1] * 6, pa.uint64()), ["cat", "dog"] * 6),
        (pa.array([[0], [1]] * 6, pa.large_list(pa.int8())), ["cat", "dog"] * 6),
        (pa.array([[0, 1]] * 12, pa.list_(pa.int32(), 2)), [["cat", "dog"]] * 12),
    ],
)
def test_an_index_is_one_in_whatever_integers(serial, tmp_path, labels, expected):
    feature = {"label": {"feature": class_label(["cat", "dog"])["label"], "_type": "List"}}
    write_hub_file(tmp_path / "train.parquet", IMAGES, labels, feature)
    found = labels_of(converted(tmp_path / "train.parquet", tmp_path / "set"))
    assert [found[f"train/{i:08d}"] for i in range(12)] == expected


def cifar_100(file: Path) -> None:
    fine, coarse = (["apple", "bee", "cat"], ["fruit", "animal"])
    labels = {name: {"names": names, "_type": "ClassLabel"}
              for name, names in (("fine_label", fine), ("coarse_label", coarse))}  # fmt: skip
    images = pa.array([{"bytes": image} for image in IMAGES])
    columns = {"img": images, "small": images.take(pa.array([0] * 12)),
               "fine_label": [i % 3 for i in range(12)],
               "coarse_label": [min(i % 3, 1) for i in range(12)]}  # fmt: skip
    metadata = {"huggingface": json.dumps({"info": {"features": labels}})}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), file)


def test_of_several_labels_one_is_chosen_by_the_user(serial, tmp_path):
    cifar_100(tmp_path / "train.parquet")
    why = r"one field for the label .* and has coarse_label, fine_label, .*convert.label_field"
    with pytest.raises(ValueError, match=why):
        converted(tmp_path / "train.parquet", tmp_path / "set")
    for field, names in (("coarse_label", ["fruit", "animal"]), ("fine_label", ["apple", "bee"])):
        options = {"label_field": field, "image_field": "small"}
        rows = converted(tmp_path / "train.parquet", tmp_path / field, **options)
        assert [labels_of(rows)[f"train/{i:08d}"] for i in range(2)] == names
        assert {image for image, _ in rows.values()} == {IMAGES[0]}
    with pytest.raises(ValueError, match=r"field for the label \(kind\), and has coarse_label"):
        converted(tmp_path / "train.parquet", tmp_path / "set", label_field="kind")
