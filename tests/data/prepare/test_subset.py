import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.converting import convert
from tests.data.pictures import write_class_folders
from tests.data.small_sets import keys_of
from vit_ray.data import open_dataset
from vit_ray.data.format.manifest import Manifest
from vit_ray.data.format.row_groups import RowGroupReader
from vit_ray.data.order.samples import Plan
from vit_ray.data.prepare.subset import subset
from vit_ray.data.prepare.verify import check_file


def test_parts_are_exact_nested_and_copy_nothing(dataset: Manifest, tmp_path: Path) -> None:
    counts = [7, 16, 100, 299, 300]
    parts = [subset(dataset.path, str(tmp_path / str(n)), count=n, seed=2) for n in counts]
    keys = [set(keys_of(part)) for part in parts]
    assert [len(part) for part in keys] == counts
    for smaller, larger in itertools.pairwise(keys):
        assert smaller < larger
    assert [file.name for file in (tmp_path / "7").iterdir()] == ["manifest.parquet"]


def test_a_part_of_a_part_is_a_part(dataset: Manifest, tmp_path: Path) -> None:
    half = subset(dataset.path, str(tmp_path / "half"), fraction=0.5)
    quarter = subset(half.path, str(tmp_path / "quarter"), fraction=0.5)
    assert (half.num_images, quarter.num_images) == (150, 75)
    assert set(keys_of(quarter)) < set(keys_of(half))


def test_a_part_does_not_depend_on_where_it_is_written(dataset: Manifest, tmp_path: Path) -> None:
    one = subset(dataset.path, str(tmp_path / "one"), count=50)
    two = subset(dataset.path, str(tmp_path / "two"), count=50)
    other = subset(dataset.path, str(tmp_path / "other"), count=50, seed=1)
    assert one.fingerprint == two.fingerprint != other.fingerprint
    assert keys_of(open_dataset(one.path)) == keys_of(two)


def test_a_part_is_planned_over_its_own_rows(dataset: Manifest, tmp_path: Path) -> None:
    part = subset(dataset.path, str(tmp_path / "part"), count=50)
    rows = Plan(part, seed=1, rows=None).rows_at(np.arange(50))
    assert sorted(rows.samples.tolist()) == list(range(50))
    np.testing.assert_array_equal(part.first_samples[rows.groups] + rows.rows, rows.samples)


def test_an_impossible_part_is_refused(dataset: Manifest, tmp_path: Path) -> None:
    target = str(tmp_path / "part")
    with pytest.raises(ValueError, match="give one of the four"):
        subset(dataset.path, target)
    with pytest.raises(ValueError, match="use from 1 to 300"):
        subset(dataset.path, target, count=301)
    subset(dataset.path, target, count=3)
    with pytest.raises(ValueError, match="already holds a data set"):
        subset(dataset.path, target, count=4)


def test_a_conversion_under_way_is_not_committed_by_a_part(
    serial: None, image_folder: Path, tmp_path: Path
) -> None:
    convert(str(image_folder), str(tmp_path / "whole"))
    (tmp_path / "set" / "_staging").mkdir(parents=True)
    (tmp_path / "set" / "_staging" / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"\(_staging\); choose another folder"):
        subset(str(tmp_path / "whole"), str(tmp_path / "set"), count=7)


def test_verify_counts_the_images_of_a_part(serial: None, tmp_path: Path) -> None:
    write_class_folders(tmp_path / "source", num_classes=2, per_class=20)
    convert(tmp_path / "source", tmp_path / "set", rows_per_row_group=16)
    part = subset(str(tmp_path / "set"), str(tmp_path / "part"), count=7)
    checks = [check_file(int(file), part, 1.0) for file in np.unique(part.file_index)]
    assert sum(check.images for check in checks) == 7
    assert sum(check.decoded for check in checks) == 7


@pytest.fixture
def captioned(serial: None, tmp_path: Path) -> Path:
    """24 images; every third has no caption, and scores are i / 10."""
    write_class_folders(tmp_path / "source", num_classes=2, per_class=12)
    files = sorted((tmp_path / "source").rglob("*.*"))
    with (tmp_path / "source" / "list.jsonl").open("w") as sink:
        for i, file in enumerate(files):
            caption = None if i % 3 == 0 else f'it\'s "{i}"'
            row = {"path": str(file), "label": file.parent.name, "score": i / 10, "note": str(i)}
            sink.write(json.dumps(row | {"caption": caption}) + "\n")
    convert(
        tmp_path / "source" / "list.jsonl", tmp_path / "set",
        columns=["caption", "score", "note"], rows_per_row_group=5, license="CC-BY-4.0",
    )  # fmt: skip
    return tmp_path / "set"


def scores_of(folder: Path) -> list[float]:
    """Of the images of a data set or of a part, as pyarrow reads its shards."""
    manifest = open_dataset(str(folder))
    reader, found = RowGroupReader(manifest), []
    for group in range(manifest.num_row_groups):
        number, file = int(manifest.row_group[group]), manifest.shard_location(group).path
        rows = pq.ParquetFile(file).read_row_group(number, columns=["key", "score"]).to_pylist()
        keys = reader.texts(group, "key")
        found += [float(row["score"]) for row in rows if row["key"] in keys]
    return sorted(found)


WHERE = {
    "caption is not null and score > 0.3": lambda i: i % 3 != 0 and i > 3,
    "score > 0.95": lambda i: i > 9,
    "note > 9": lambda i: i > 9,
    "note in (7, '12') or caption like '%\"2\"'": lambda i: i in (2, 7, 12),
    "label = 'class_1' and width > 0": lambda i: i >= 12,
    "note = '5' -- the fifth": lambda i: i == 5,
}


@pytest.mark.parametrize("where", WHERE)
def test_a_part_is_chosen_by_what_is_passed_through(
    captioned: Path, tmp_path: Path, where: str
) -> None:
    part = subset(str(captioned), str(tmp_path / "part"), where=where)
    expected = [i / 10 for i in range(24) if WHERE[where](i)]
    assert scores_of(tmp_path / "part") == expected
    assert part.num_images == len(expected)
    again = subset(str(tmp_path / "part"), str(tmp_path / "again"), where="score <= 1.2")
    assert scores_of(tmp_path / "again") == [score for score in expected if score <= 1.2]
    assert (part.origin["where"], again.origin["license"]) == (where, "CC-BY-4.0")


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("scor > 1", r"no such column: scor; .*columns key, label, width, height, caption, score"),
        ("score >", "incomplete input|syntax error"),
        ('"scor" > 1', "no such column: scor; .*text needs single quotes"),
        ("score > (select avg(score) from images)", "it contains a query"),
        ("0) union select 1 where (1", "it contains a query"),
        ("score > 99", "no image of .* matches 'score > 99'"),
    ],
)
def test_an_expression_that_chooses_nothing_is_refused(
    captioned: Path, tmp_path: Path, where: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        subset(str(captioned), str(tmp_path / "part"), where=where)
    assert not (tmp_path / "part").exists()


def test_a_part_is_chosen_by_a_list_of_keys(captioned: Path, tmp_path: Path) -> None:
    keys = [
        key
        for group in range(2)
        for key in RowGroupReader(open_dataset(str(captioned))).texts(group, "key")
    ]
    (tmp_path / "keys.txt").write_text("\n".join(keys) + "\n\n")
    part = subset(str(captioned), str(tmp_path / "part"), keys=str(tmp_path / "keys.txt"))
    assert part.num_images == len(keys) == 10
    reader = RowGroupReader(part)
    assert {k for g in range(part.num_row_groups) for k in reader.texts(g, "key")} == set(keys)
    (tmp_path / "keys.txt").write_text("\n".join([*keys, "no image"]))
    with pytest.raises(ValueError, match=r"1 of 11 keys are not in .* such as \['no image'\]"):
        subset(str(captioned), str(tmp_path / "other"), keys=str(tmp_path / "keys.txt"))
