"""Rows drawn by weight: each has its share, none is twice in an epoch, at any world size."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.converting import convert, in_this_process
from tests.data.pictures import encoded, picture
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.data.format.labels import first_labels
from vit_ray.data.format.manifest import Manifest
from vit_ray.data.order.partition import Partition
from vit_ray.data.order.sample_weights import WeightedRows, row_weights
from vit_ray.data.order.selection import RowSelection, split_rows
from vit_ray.data.order.shuffle import Order, ShuffleWindow
from vit_ray.launch.inputs.rank_batches import training_batches

GOLDEN = [7, 9, 10, 6, 1, 3, 7, 8, 2, 6]

weights_of_groups = st.lists(
    st.lists(st.integers(0, 50), max_size=6), min_size=1, max_size=8
).filter(lambda groups: any(map(sum, groups)))


def order_of(groups: list[list[int]], seed: int, window: ShuffleWindow | None = None) -> Order:
    weights = np.array([w << 20 for group in groups for w in group], np.uint32)
    return Order(np.array([len(g) for g in groups]), seed, window=window, weights=weights)


@settings(max_examples=50)
@given(weights_of_groups, st.integers(0, 5), st.none() | st.just(ShuffleWindow(4, 2)))
def test_each_row_has_its_share_of_many_epochs_and_is_in_none_twice(
    groups: list[list[int]], seed: int, window: ShuffleWindow | None
) -> None:
    order, epochs = order_of(groups, seed, window), 200
    weights = np.array([w for group in groups for w in group], np.float64)
    assert order.num_images == sum(map(sum, groups)) // int(weights.max())
    samples = order.samples_at(0, epochs * order.num_images).reshape(epochs, -1)
    for epoch in samples:
        assert len(set(epoch.tolist())) == len(epoch)
    counts = np.bincount(samples.ravel(), minlength=len(weights))
    expected = weights / weights.sum() * samples.size  # drawn by chance they would be 7 off
    np.testing.assert_allclose(counts, expected, atol=4)
    assert not counts[weights == 0].any()


@given(weights_of_groups, st.integers(0, 5), st.data())
def test_a_range_is_the_slice_of_any_range_around_it(
    groups: list[list[int]], seed: int, data: st.DataObject
) -> None:
    order = order_of(groups, seed, ShuffleWindow(3, 2))
    stop = data.draw(st.integers(0, 100))
    start = data.draw(st.integers(0, stop))
    whole = order.samples_at(0, 100)
    np.testing.assert_array_equal(order.samples_at(start, stop), whole[start:stop])


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_global_batches_are_the_same_at_every_world_size(world_size: int) -> None:
    order = order_of([[3, 0, 9], [1, 1, 1, 20], [5]], 3, ShuffleWindow(12, 2))
    partition = Partition(world_size, 12 // world_size)
    for first in (0, 12, 84):
        positions = [
            first + partition.offsets(rank, 0, partition.batch_size_per_rank)
            for rank in range(world_size)
        ]
        places = order.places(np.concatenate(positions))
        samples = order.first_samples[places.groups] + places.rows
        np.testing.assert_array_equal(samples, order.samples_at(first, first + 12))


def test_equal_weights_have_every_row_once() -> None:
    order = order_of([[7] * 5, [7] * 3], 0)
    assert sorted(order.samples_at(0, 8).tolist()) == list(range(8))


def test_no_order_is_summed_past_64_bits() -> None:
    heavy = np.full(1 << 16, (1 << 31) - 1, np.uint32)
    rows = WeightedRows(heavy, np.array([0, 1 << 16]), 0)
    assert rows.counts(10**9).tolist() == [1 << 16]
    assert rows.rows_of(10**9, 0).tolist() == list(range(1 << 16))


def test_counts_of_many_row_groups_are_those_of_their_rows() -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(0, 4, 2100)
    weights = random.integers(0, 1 << 31, sizes.sum()).astype(np.uint32)
    rows = WeightedRows(weights, np.concatenate([[0], np.cumsum(sizes)]), seed=1)
    for epoch in (0, 5):
        each = [len(rows.rows_of(epoch, group)) for group in range(len(sizes))]
        assert rows.counts(epoch).tolist() == each
        assert sum(each) == rows.num_rows == weights.sum(dtype=np.int64) // weights.max()


def test_no_array_as_long_as_the_weights_is_made() -> None:
    """A process shares them with others, and would have each such array for itself."""
    weights, firsts = np.full(1_000_000, 7, np.uint32), np.arange(0, 1_000_001, 100)
    tracemalloc.start()
    try:
        WeightedRows(weights, firsts, seed=0).counts(1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(weights)


def test_a_weighted_order_never_changes_between_versions() -> None:
    """Runs resume by this order; these numbers may not change."""
    order = order_of([[1, 2, 3], [4, 0, 0, 6], [6, 5], [4, 4, 2]], 7, ShuffleWindow(2, 4))
    assert order.samples_at(10, 20).tolist() == GOLDEN


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """36 images, 24 of class a, 9 of b and 3 of c, each with its class's number as a score."""
    folder = tmp_path_factory.mktemp("weighted")
    lines = ["path,label,score,negative,words,nothing"]
    for i in range(36):
        label = "a" if i < 24 else "b" if i < 33 else "c"
        (folder / f"{i}.jpg").write_bytes(encoded(picture(i, 24, 24)))
        lines.append(f"{i}.jpg,{label},{'abc'.index(label)},{-i},{i}px,0")
    (folder / "list.csv").write_text("\n".join(lines))
    target = str(folder / "set")
    columns = ("score", "negative", "words", "nothing")
    with in_this_process():
        convert(str(folder / "list.csv"), target, rows_per_row_group=8, columns=columns)
    return open_dataset(target)


def shares(dataset: Manifest, by: str, rows: RowSelection) -> list[float]:
    """Of each class in an order by these weights."""
    weights = row_weights(dataset.path, dataset.fingerprint, by, rows)
    order = Order(dataset.rows, 1, weights=weights)
    labels = np.concatenate(list(first_labels(dataset)))
    samples = order.samples_at(0, 6000)
    assert rows.mask(dataset, samples).all()
    return (np.bincount(labels[samples], minlength=3) / 6000).tolist()


def test_classes_are_equally_frequent_by_their_labels(dataset: Manifest) -> None:
    found = shares(dataset, "labels", RowSelection.all(dataset))
    assert found == pytest.approx([1 / 3] * 3, abs=0.01)


def test_classes_are_balanced_within_the_rows_that_take_part(dataset: Manifest) -> None:
    found = shares(dataset, "labels", RowSelection.all(dataset, 1).take(0.6))
    assert found == pytest.approx([1 / 3] * 3, abs=0.01)


def test_a_column_gives_the_weights(dataset: Manifest) -> None:
    found = shares(dataset, "score", RowSelection.all(dataset))
    assert found == pytest.approx([0, 9 / 15, 6 / 15], abs=0.01)


def test_a_column_that_is_no_weight_is_refused(dataset: Manifest) -> None:
    whole = RowSelection.all(dataset)
    with pytest.raises(ValueError, match=r"no such column; use 'labels' or one of \['score'"):
        row_weights(dataset.path, dataset.fingerprint, "scores", whole)
    with pytest.raises(ValueError, match=r"a value is -\d+.0; each image needs a finite number"):
        row_weights(dataset.path, dataset.fingerprint, "negative", whole)
    with pytest.raises(ValueError, match=r"a value is no number \(.*'\d+px'\)"):
        row_weights(dataset.path, dataset.fingerprint, "words", whole)
    with pytest.raises(ValueError, match=r"all images of '.*' weigh 0"):
        row_weights(dataset.path, dataset.fingerprint, "nothing", whole)


def test_a_recipe_trains_on_balanced_classes_at_any_world_size_and_from_any_step(
    dataset: Manifest,
) -> None:
    def samples_of(world_size: int, first: int = 0) -> list[list[int]]:
        recipe = Recipe(
            name="run",
            output="runs",
            data={"train": dataset.path, "sample_weights": "labels", "held_out_fraction": 0.25},
            train={"global_batch_size": 12},
            optim={"steps": 30},
            model={"name": "ViT-Ti/16", "image_size": 16},
        )
        ranks = [training_batches(recipe, rank, world_size)[first:] for rank in range(world_size)]
        steps = [[rank[i]["sample"] for rank in ranks] for i in range(len(ranks[0]))]
        return [np.concatenate(parts).tolist() for parts in steps]

    samples = samples_of(1)
    assert samples_of(3) == samples
    assert samples_of(2, 17) == samples[17:]
    classes = np.concatenate(list(first_labels(dataset)))[np.ravel(samples)]
    assert np.bincount(classes) / classes.size == pytest.approx([1 / 3] * 3, abs=0.03)
    kept, _ = split_rows(dataset, 0.25)
    assert kept.mask(dataset, np.ravel(samples)).all()
