from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_ray.data import open_dataset
from vit_ray.data.dataset import Manifest, RowGroupColumns, write_part
from vit_ray.data.keyed_random import KeyedPermutation
from vit_ray.data.parts import select
from vit_ray.data.shards import keys
from vit_ray.storage import locate

HEADER: dict[str, Any] = {"path": "set", "root": "set", "classes": ["a"], "files": []}
GOLDEN = [0, 1, 2, 3, 16, 17, 18, 19, 28, 29]


@given(st.integers(1, 3000), st.integers(0, 10))
def test_a_keyed_permutation_gives_each_number_a_rank(size, key):
    permutation, everything = KeyedPermutation(size, key), np.arange(size, dtype=np.int64)
    ranks = permutation.ranks(everything)
    assert sorted(ranks.tolist()) == everything.tolist()


def test_a_keyed_permutation_leaves_no_trend():
    ranks = KeyedPermutation(100_000, 1).ranks(np.arange(100_000))
    assert abs(np.corrcoef(ranks, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) < 0.02


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
        (1_020, 0.1, 102),
        (100, 0.77, 77),
    ],
)
def test_dev_splits_have_the_published_sizes(total, fraction, held):
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


def test_a_part_that_is_written_reads_the_rows_of_the_one_in_memory(dataset, tmp_path):
    """By their keys, and again of a part of the written one."""
    for number, whole in enumerate((dataset, open_dataset(dataset.path).ranked(11, 260, 4))):
        part = whole.without(np.array(samples_of(whole)[5::3]))
        write_part(locate(str(tmp_path / str(number))), part, {})
        written = open_dataset(str(tmp_path / str(number)))
        expected = [key for some in keys(part) for key in some]
        assert [key for some in keys(written) for key in some] == expected
        assert written.num_images == len(expected) == part.num_images
        rest = written.without(np.arange(0, written.num_images, 2))
        assert [key for some in keys(rest) for key in some] == expected[1::2]


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


@pytest.mark.parametrize("fraction", [0.03, 0.1, 0.5])
def test_a_share_of_the_images_is_in_a_share_of_the_row_groups(fraction):
    part, _ = parts_of(manifest_of(80_000), 0.0, fraction, seed=4)
    assert part.rows.sum() == round(80_000 * fraction)
    assert np.count_nonzero(part.rows) == -(-round(80_000 * fraction) // 8)
    assert 0.4 < np.flatnonzero(part.rows).mean() / len(part.rows) < 0.6


def test_a_selection_never_changes_between_versions():
    """Runs resume by it; these numbers may not change."""
    assert samples_of(parts_of(manifest_of(40, group=4), 0.0, 0.25, seed=2)[0]) == GOLDEN


def manifest_of(total: int, group: int = 8) -> Manifest:
    rows = np.full(-(-total // group), group, np.int32)
    rows[-1] = total - group * (len(rows) - 1)
    index = np.arange(len(rows), dtype=np.int32)
    columns = RowGroupColumns(index * 0, index, rows, index * 0, {})
    return Manifest(**vars(columns), **HEADER, num_images=total, max_labels=1, fingerprint="0")
