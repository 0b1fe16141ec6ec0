import itertools
import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.converting import convert
from tests.data.pictures import write_class_folders
from tests.data.small_sets import keys_of
from vit_ray.data import open_dataset
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.parts import subset
from vit_ray.data.shards import RowGroupReader


def test_parts_are_exact_nested_and_copy_nothing(dataset, tmp_path):
    counts = [7, 16, 100, 299, 300]
    parts = [subset(dataset.path, str(tmp_path / str(n)), count=n, seed=2) for n in counts]
    keys = [set(keys_of(part)) for part in parts]
    assert [len(part) for part in keys] == counts
    for smaller, larger in itertools.pairwise(keys):
        assert smaller < larger
    assert [file.name for file in (tmp_path / "7").iterdir()] == ["manifest.parquet"]
    again, other = (
        subset(dataset.path, str(tmp_path / f"seed {seed}"), count=100, seed=seed)
        for seed in (2, 1)
    )
    assert again.fingerprint == parts[2].fingerprint != other.fingerprint
    assert keys_of(open_dataset(again.path)) == keys_of(parts[2])
    checks = [check_file(int(file), parts[0], 1.0) for file in np.unique(parts[0].file_index)]
    assert sum(check.num_images for check in checks) == 7
    assert sum(check.num_decoded for check in checks) == 7


def test_a_part_that_was_copied_with_its_set_reads_the_copy(dataset, tmp_path):
    """And alone, or where the set is elsewhere, the files that it was made of."""
    shutil.copytree(dataset.path, tmp_path / "one" / "set")
    part = subset(str(tmp_path / "one" / "set"), str(tmp_path / "one" / "run" / "part"), count=50)
    expected = keys_of(part)
    shutil.copytree(tmp_path / "one" / "run" / "part", tmp_path / "alone")
    assert keys_of(open_dataset(str(tmp_path / "alone"))) == expected
    shutil.copytree(tmp_path / "one", tmp_path / "beside_another")
    manifest = tmp_path / "beside_another" / "set" / "manifest.parquet"
    header = json.loads(pq.read_metadata(manifest).metadata[b"vit_ray"])
    header["files"].append(header["files"][0])
    table = pq.read_table(manifest).replace_schema_metadata({"vit_ray": json.dumps(header)})
    pq.write_table(table, manifest)
    beside_another = open_dataset(str(tmp_path / "beside_another" / "run" / "part"))
    assert beside_another.root == str(tmp_path / "one" / "set")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "one")
    copy = open_dataset(str(tmp_path / "two" / "run" / "part"))
    assert (keys_of(copy), copy.fingerprint) == (expected, part.fingerprint)


def test_an_impossible_part_is_refused(dataset, tmp_path):
    target = str(tmp_path / "part")
    with pytest.raises(ValueError, match="give one of the three"):
        subset(dataset.path, target)
    with pytest.raises(ValueError, match="use from 1 to 300"):
        subset(dataset.path, target, count=301)
    subset(dataset.path, target, count=3)
    with pytest.raises(ValueError, match="already holds a data set"):
        subset(dataset.path, target, count=4)


def test_a_conversion_under_way_is_not_committed_by_a_part(serial, image_folder, tmp_path):
    convert(str(image_folder), str(tmp_path / "whole"))
    (tmp_path / "set" / "_staging").mkdir(parents=True)
    (tmp_path / "set" / "_staging" / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"\(_staging\); choose another folder"):
        subset(str(tmp_path / "whole"), str(tmp_path / "set"), count=7)


def test_a_part_is_chosen_by_a_list_of_keys(serial, tmp_path):
    write_class_folders(tmp_path / "source", num_classes=2, per_class=12)
    whole = str(tmp_path / "set")
    convert(
        tmp_path / "source", str(tmp_path / "all"), rows_per_row_group=5, license="CC-BY-4.0",
        shard_mib=0.005,
    )  # fmt: skip
    source = subset(str(tmp_path / "all"), whole, count=18)  # whose rows are not those of its files
    assert len(source.files) > 1
    reader = RowGroupReader(source)
    keys = [key for group in range(source.num_row_groups) for key in reader.keys(group)][1::2]
    listed = tmp_path / "keys.txt"
    listed.write_text("\n".join(keys) + "\n\n")
    part = subset(whole, str(tmp_path / "part"), keys=str(listed))
    assert part.num_images == len(keys) == 9
    assert part.origin["license"] == "CC-BY-4.0"
    reader = RowGroupReader(part)
    assert {key for group in range(part.num_row_groups) for key in reader.keys(group)} == set(keys)
    listed.write_text("\n".join([*keys, "no image"]))
    with pytest.raises(ValueError, match=r"1 of 10 keys are not in .* such as \['no image'\]"):
        subset(whole, str(tmp_path / "other"), keys=str(listed))
    listed.write_text("\n")
    with pytest.raises(ValueError, match="lists no key; give one key per line"):
        subset(whole, str(tmp_path / "other"), keys=str(listed))
