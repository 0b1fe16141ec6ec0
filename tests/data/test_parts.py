"""Parts of data sets: held-out rows, shares, subsets and dev splits, in memory and written."""

import itertools
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.converting import convert
from tests.data.small_sets import keys_of, with_header, write_set
from vit_ray.data import open_dataset
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.dataset import Manifest
from vit_ray.data.parts import class_quotas, dev_split, select, subset
from vit_ray.data.shards import first_labels

GOLDEN = [0, 1, 2, 3, 16, 17, 18, 19, 28, 29]


def manifest_of(total: int, group: int = 8) -> Manifest:
    rows = np.full(-(-total // group), group, np.int32)
    rows[-1] = total - group * (len(rows) - 1)
    index = np.arange(len(rows), dtype=np.int32)
    return Manifest(index * 0, index, rows, index * 0, files=[], classes=["a"])


def parts_of(
    manifest: Manifest, held_out: float, fraction: float = 1.0, seed: int = 0
) -> tuple[Manifest, Manifest | None]:
    return select(manifest, seed=seed, held_out_fraction=held_out, fraction=fraction)


def samples_of(part: Manifest | None) -> list[int]:
    groups = np.flatnonzero(part.rows).tolist()
    return [sample for group in groups for sample in part.samples_of(group).tolist()]


@pytest.mark.parametrize(
    ("total", "fraction", "held"),
    [
        (1_281_167, 0.01, 12_812),
        (50_000, 0.02, 1_000),
        (3_680, 0.1, 368),
    ],
)
def test_held_out_parts_have_the_published_sizes(total, fraction, held):
    kept, held_out = parts_of(manifest_of(total), fraction)
    assert (kept.num_images, held_out.num_images) == (total - held, held)
    if total < 50_000:
        assert sorted(samples_of(kept) + samples_of(held_out)) == list(range(total))


@given(st.integers(0, 10), st.data())
def test_a_part_is_the_whole_without_the_others(seed, data):
    """As is a part of a part; and a sample has one place, whatever it is a part of."""
    whole = manifest_of(100)
    for part in (whole, whole.ranked(30, 91, seed), whole.without(np.arange(3, 100, 7))):
        numbers = samples_of(part)
        gone = data.draw(st.sets(st.sampled_from(numbers)))
        rest = part.without(np.array(sorted(gone), np.int64))
        assert samples_of(rest) == sorted({*numbers} - gone)
        assert rest.num_images == len(numbers) - len(gone) == int(rest.rows.sum())
        for sample in samples_of(rest):
            assert rest.place(sample) == (sample // 8, sample % 8)
            assert sample % 8 in rest.stored_rows(sample // 8)


@pytest.mark.parametrize(
    ("total", "held_out", "fraction", "named"),
    [
        (100, 0.0001, 1.0, "data.held_out_fraction"),
        (1, 0.5, 1.0, "data.held_out_fraction"),
        (100, 0.0, 0.0001, "data.fraction"),
        (100, 0.1, 0.0, "data.fraction"),
    ],
)
def test_an_empty_part_is_refused(total, held_out, fraction, named):
    with pytest.raises(ValueError, match=named):
        parts_of(manifest_of(total), held_out, fraction)


def test_a_selection_never_changes_between_versions():
    """Runs resume by it; these numbers may not change."""
    assert samples_of(parts_of(manifest_of(40, group=4), 0.0, 0.25, seed=2)[0]) == GOLDEN


def test_subsets_are_exact_nested_and_copy_nothing(dataset, tmp_path):
    counts = [7, 16, 100, 299, 300]
    parts = [subset(dataset.path, str(tmp_path / str(n)), count=n, seed=2) for n in counts]
    found = [set(keys_of(part)) for part in parts]
    assert [len(part) for part in found] == counts
    for smaller, larger in itertools.pairwise(found):
        assert smaller < larger
    assert [file.name for file in (tmp_path / "7").iterdir()] == ["manifest.parquet"]
    again, other = (
        subset(dataset.path, str(tmp_path / f"seed {seed}"), count=100, seed=seed)
        for seed in (2, 1)
    )
    assert again.fingerprint == parts[2].fingerprint != other.fingerprint
    assert keys_of(again) == keys_of(parts[2])
    checks = [check_file(int(file), parts[0], 1.0) for file in np.unique(parts[0].file_index)]
    assert sum(check.num_decoded for check in checks) == 7


def test_a_subset_that_was_copied_with_its_set_reads_the_copy(dataset, tmp_path):
    """And alone, or where the set is elsewhere, the files that it was made of."""
    shutil.copytree(dataset.path, tmp_path / "one" / "set")
    part = subset(str(tmp_path / "one" / "set"), str(tmp_path / "one" / "run" / "part"), count=50)
    expected = keys_of(part)
    shutil.copytree(tmp_path / "one" / "run" / "part", tmp_path / "alone")
    assert keys_of(open_dataset(str(tmp_path / "alone"))) == expected
    shutil.copytree(tmp_path / "one", tmp_path / "beside_another")
    with_header(tmp_path / "beside_another" / "set", files=[])
    beside_another = open_dataset(str(tmp_path / "beside_another" / "run" / "part"))
    assert beside_another.root == str(tmp_path / "one" / "set")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "one")
    copy = open_dataset(str(tmp_path / "two" / "run" / "part"))
    assert (keys_of(copy), copy.fingerprint) == (expected, part.fingerprint)


def test_a_subset_is_chosen_by_a_list_of_keys(serial, image_folder, tmp_path):
    options = {"rows_per_row_group": 16, "license": "CC-BY-4.0", "shard_mib": 0.1}
    convert(image_folder, tmp_path / "all", **options)
    source = subset(str(tmp_path / "all"), str(tmp_path / "set"), count=180)  # leaves rows out
    assert len(source.files) > 1
    wanted = keys_of(source)[1::2]
    listed = tmp_path / "keys.txt"
    listed.write_text("\n".join(wanted) + "\n\n")
    part = subset(source.path, str(tmp_path / "part"), keys=str(listed))
    assert set(keys_of(part)) == set(wanted)
    assert part.num_images == len(wanted) == 90
    assert part.origin["license"] == "CC-BY-4.0"
    for content, told in (("\n".join([*wanted, "no image"]), "no image"), ("\n", "no key")):
        listed.write_text(content)
        with pytest.raises(ValueError, match=told):
            subset(source.path, str(tmp_path / "other"), keys=str(listed))


def test_an_impossible_subset_is_refused(dataset, tmp_path):
    target = str(tmp_path / "part")
    with pytest.raises(ValueError, match="give one of the three"):
        subset(dataset.path, target)
    with pytest.raises(ValueError, match="use from 1 to 300"):
        subset(dataset.path, target, count=301)
    subset(dataset.path, target, count=3)
    (tmp_path / "converting" / "_staging").mkdir(parents=True)  # a conversion under way
    for taken in (target, str(tmp_path / "converting")):
        with pytest.raises(ValueError, match="choose another folder"):
            subset(dataset.path, taken, count=4)


def images_of(path: str) -> list[tuple[str, int]]:
    manifest = open_dataset(path)
    labels = np.concatenate(list(first_labels(manifest)))
    return list(zip(keys_of(manifest), labels.tolist(), strict=True))


def shuffled(counts: Sequence[int]) -> list[tuple[str, list[int]]]:
    labels = np.repeat(np.arange(len(counts)), counts)
    order = np.random.default_rng(0).permutation(len(labels))
    return [(str(place), [int(labels[place])]) for place in order]


def test_in_a_dev_split_every_class_has_its_share_and_every_image_is_in_one_part(tmp_path):
    whole = write_set(tmp_path / "set", shuffled([50, 30, 20]), ["a", "b", "c", "without images"])
    rest, dev = dev_split(whole.path, str(tmp_path / "split"), 0.2, seed=1)
    assert Counter(label for _, label in images_of(dev)) == {0: 10, 1: 6, 2: 4}
    assert sorted(images_of(rest) + images_of(dev)) == sorted(images_of(whole.path))
    # Four images a row group: 20 images of the dev split lie in fewer than all 25.
    assert open_dataset(dev).num_row_groups < 15
    again, other = (
        dev_split(whole.path, str(tmp_path / f"of {seed}"), 0.2, seed)[1] for seed in (1, 2)
    )
    assert images_of(again) == images_of(dev) != images_of(other)
    part = subset(whole.path, str(tmp_path / "part"), count=83)  # leaves rows out
    rest, dev = dev_split(part.path, str(tmp_path / "split of part"), 0.2, seed=0)
    assert sorted(images_of(rest) + images_of(dev)) == sorted(images_of(part.path))


@given(counts=st.lists(st.integers(2, 60), min_size=1, max_size=12), fraction=st.floats(0.01, 0.99))
def test_quotas_are_as_near_to_the_share_as_one_and_all_but_one_allow(counts, fraction):
    array = np.array(counts)
    total = round(array.sum() * fraction)
    if total < len(counts) or total > (array - 1).sum():
        return
    quotas = class_quotas(array, fraction, [str(k) for k in range(len(counts))])
    assert quotas.sum() == total
    assert (quotas >= 1).all()
    assert (quotas < array).all()
    exact = array * (total / array.sum())
    inside = (exact >= 1) & (exact <= array - 1)
    if inside.all():
        assert (np.abs(quotas - exact) < 1 + 1e-9).all()


@pytest.mark.parametrize(
    ("counts", "fraction", "told"),
    [
        ([5, 1, 5], 0.3, r"two images or more \(the rarest is 'b' with 1\)"),
        ([10, 12, 8], 0.06, r"is 2, .* gives 3 to 27 images, .* 'c' with 8"),
        ([5, 4], 0.9, r"is 8, .* gives 2 to 7 images, .* 'b' with 4"),
    ],
)
def test_a_class_that_would_be_empty_is_named(tmp_path, counts, fraction, told):
    whole = write_set(tmp_path / "set", shuffled(counts), ["a", "b", "c"])
    with pytest.raises(ValueError, match=told):
        dev_split(whole.path, str(tmp_path / "split"), fraction, seed=0)
    assert not (tmp_path / "split").exists()


def test_without_regard_to_classes_the_share_of_a_dev_split_is_exact(tmp_path):
    rows = [*shuffled([1, 2, 1, 3, 30]), ("unlabelled", [])]
    whole = write_set(tmp_path / "set", rows, ["a", "b", "c", "d", "e"])
    folder = str(tmp_path / "split")
    rest, dev = dev_split(whole.path, folder, 0.2, 0, by_class=False)
    assert len(images_of(dev)) == 7  # of the 37 that have a class
    assert ("unlabelled", -1) in images_of(rest)
    assert sorted(images_of(rest) + images_of(dev)) == sorted(images_of(whole.path))
    for fraction in (0.01, 0.99):
        with pytest.raises(ValueError, match=r"of 37 images is (0|37), but both the dev split"):
            dev_split(whole.path, folder, fraction, 0, by_class=False)


def test_every_image_has_the_first_label_that_pyarrow_reads(digits, tmp_path):
    """Of a whole set and of a part that leaves rows out; no image is read."""
    table = pa.concat_tables([pq.read_table(file) for file in Path(digits.train).glob("part-*")])
    stored = {row["key"]: row["labels"][0] for row in table.select(["key", "labels"]).to_pylist()}
    assert dict(images_of(digits.train)) == stored
    part = subset(digits.train, str(tmp_path / "part"), count=77)
    found = dict(images_of(part.path))
    assert len(found) == 77
    assert found.items() <= stored.items()
