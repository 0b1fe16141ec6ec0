from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_ray.data.dataset import Manifest, RowGroupColumns
from vit_ray.data.keyed_random import KeyedPermutation
from vit_ray.data.selection import RowSelection, split_rows

HEADER: dict[str, Any] = {"path": "set", "root": "set", "classes": ["a"], "files": []}
GOLDEN = [0, 1, 2, 3, 16, 17, 18, 19, 28, 29]


@given(st.integers(1, 3000), st.integers(0, 10))
def test_a_keyed_permutation_sends_every_number_to_one_other(size: int, key: int) -> None:
    ranks = KeyedPermutation(size, key).ranks(np.arange(size))
    assert sorted(ranks.tolist()) == list(range(size))


def test_a_keyed_permutation_leaves_no_trend() -> None:
    ranks = KeyedPermutation(100_000, 1).ranks(np.arange(100_000))
    assert abs(np.corrcoef(ranks, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("total", "fraction", "held"),
    [(1_281_167, 0.01, 12_812), (50_000, 0.02, 1_000), (3_680, 0.1, 368), (1_020, 0.1, 102)],
)
def test_dev_splits_have_the_published_sizes(total: int, fraction: float, held: int) -> None:
    kept, held_out = split_rows(manifest_of(total), fraction)
    assert (kept.count, held_out.count) == (total - held, held)


def test_kept_and_held_out_rows_are_a_partition(dataset: Manifest) -> None:
    kept, held_out = split_rows(dataset, 0.1, seed=5)
    samples = np.arange(dataset.num_images)
    assert held_out.mask(dataset, samples).sum() == 30
    np.testing.assert_array_equal(kept.mask(dataset, samples), ~held_out.mask(dataset, samples))
    assert kept.rows_per_group(dataset).sum() == 270


def test_rows_are_counted_in_every_row_group(
    dataset: Manifest,
) -> None:
    part = RowSelection.all(dataset, seed=9).take(0.3)
    is_chosen = part.mask(dataset, np.arange(300))
    starts = dataset.first_samples[:-1]
    np.testing.assert_array_equal(part.rows_per_group(dataset), np.add.reduceat(is_chosen, starts))


def test_smaller_parts_are_inside_larger_ones() -> None:
    manifest = manifest_of(1000)
    whole = RowSelection.all(manifest)
    small, large = (whole.take(f).mask(manifest, np.arange(1000)) for f in (0.1, 0.5))
    assert small.sum() == 100
    assert not (small & ~large).any()


@pytest.mark.parametrize("part", [0, 1])
def test_counts_per_group_equal_the_mask(part: int) -> None:
    manifest = manifest_of(100)
    selection = split_rows(manifest, 0.3)[part]
    mask = selection.mask(manifest, np.arange(100))
    groups = [selection.rows_of_group(manifest, group) for group in range(13)]
    np.testing.assert_array_equal(
        np.concatenate([8 * i + rows for i, rows in enumerate(groups)]), np.flatnonzero(mask)
    )
    expected = [
        mask[a:b].sum() for a, b in zip(range(0, 100, 8), [*range(8, 100, 8), 100], strict=True)
    ]
    assert selection.rows_per_group(manifest).tolist() == expected


@pytest.mark.parametrize("fraction", [0.0, 1.0, 0.0001])
def test_an_empty_part_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="use a fraction from"):
        split_rows(manifest_of(100), fraction)
    if fraction < 1:
        with pytest.raises(ValueError, match="use a fraction from"):
            RowSelection.all(manifest_of(100)).take(fraction)


def test_of_one_image_none_is_held_out() -> None:
    with pytest.raises(ValueError, match="1 images: none can be held out"):
        split_rows(manifest_of(1), 0.5)


def test_a_selection_of_another_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="was made for 100 images"):
        RowSelection.all(manifest_of(100)).rows_per_group(manifest_of(90))


@pytest.mark.parametrize("fraction", [0.03, 0.1, 0.5])
def test_a_share_of_the_images_is_in_a_share_of_the_row_groups(fraction: float) -> None:
    manifest = manifest_of(80_000)
    part = RowSelection.all(manifest, seed=4).take(fraction)
    counts = part.rows_per_group(manifest)
    assert counts.sum() == round(80_000 * fraction)
    assert np.count_nonzero(counts) == -(-round(80_000 * fraction) // 8)
    assert 0.4 < np.flatnonzero(counts).mean() / len(counts) < 0.6


def test_a_selection_never_changes_between_versions() -> None:
    """Runs resume by it; these numbers may not change."""
    manifest = manifest_of(40, group=4)
    part = RowSelection.all(manifest, seed=2).take(0.25)
    assert np.flatnonzero(part.mask(manifest, np.arange(40))).tolist() == GOLDEN


def manifest_of(total: int, group: int = 8) -> Manifest:
    rows = np.full(-(-total // group), group, np.int32)
    rows[-1] = total - group * (len(rows) - 1)
    index = np.arange(len(rows), dtype=np.int32)
    columns = RowGroupColumns(index * 0, index, rows, index * 0, {})
    return Manifest(**vars(columns), **HEADER, num_images=total, max_labels=1, fingerprint="0")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000])
def test_a_permutation_is_walked_backwards(size: int) -> None:
    permutation = KeyedPermutation(size, 3, 1)
    everything = np.arange(size, dtype=np.int64)
    ranks = permutation.ranks(everything)
    assert sorted(ranks.tolist()) == everything.tolist()
    np.testing.assert_array_equal(permutation.values(ranks), everything)
