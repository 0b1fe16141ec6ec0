"""A dev split has every class in proportion, and no image of the rest."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.small_sets import write_set
from vit_ray.data import open_dataset
from vit_ray.data.parts import class_quotas, dev_split, subset
from vit_ray.data.shards import first_labels, keys


def images_of(path: str) -> list[tuple[str, int]]:
    manifest = open_dataset(path)
    names = [key for some in keys(manifest) for key in some]
    labels = np.concatenate(list(first_labels(manifest)))
    return list(zip(names, labels.tolist(), strict=True))


def shuffled(counts: Sequence[int]) -> list[tuple[str, list[int]]]:
    labels = np.repeat(np.arange(len(counts)), counts)
    order = np.random.default_rng(0).permutation(len(labels))
    return [(str(place), [int(labels[place])]) for place in order]


def test_every_class_has_its_share_and_every_image_is_in_one_part(tmp_path):
    whole = write_set(tmp_path / "set", shuffled([50, 30, 20]), ["a", "b", "c"])
    rest, dev = dev_split(whole.path, str(tmp_path / "split"), 0.2, seed=1)
    assert Counter(label for _, label in images_of(dev)) == {0: 10, 1: 6, 2: 4}
    assert sorted(images_of(rest) + images_of(dev)) == sorted(images_of(whole.path))
    # Four images a row group: 20 images of the dev split lie in fewer than all 25.
    assert open_dataset(dev).num_row_groups < 15
    part = subset(whole.path, str(tmp_path / "part"), count=83)  # leaves rows out
    rest, dev = dev_split(part.path, str(tmp_path / "split of part"), 0.2, seed=0)
    assert sorted(images_of(rest) + images_of(dev)) == sorted(images_of(part.path))


def test_the_split_is_the_same_for_the_same_seed_and_kept(tmp_path):
    whole = write_set(tmp_path / "set", shuffled([30, 30]), ["a", "b"])

    def dev(folder: str, seed: int) -> list[tuple[str, int]]:
        _, path = dev_split(whole.path, str(tmp_path / folder), 0.2, seed)
        return images_of(path)

    assert dev("one", 0) == dev("other", 0) == dev("one", 0)
    assert dev("one", 0) != dev("one", 1)


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


def test_a_class_that_would_be_empty_is_named(tmp_path):
    classes = ["ant", "bee", "cat"]
    with pytest.raises(ValueError, match="class 'bee' has a single image"):
        class_quotas(np.array([5, 1, 5]), 0.3, classes)
    with pytest.raises(
        ValueError, match=r"of 30 images is 2, fewer than the 3 classes: class 'cat'.*at least 0\.1"
    ):
        class_quotas(np.array([10, 12, 8]), 0.06, classes)
    told = r"of 9 images is 8: class 'b' would have none left to train on; use at most 0\.777"
    with pytest.raises(ValueError, match=told):
        class_quotas(np.array([5, 4]), 0.9, ["a", "b"])
    assert class_quotas(np.array([5, 4]), 0.777, ["a", "b"]).tolist() == [4, 3]
    # A class without images is nobody's loss.
    assert class_quotas(np.array([10, 0, 10]), 0.1, classes).tolist() == [1, 0, 1]
    whole = write_set(tmp_path / "set", [("a", [0]), ("b", [1]), ("c", [1])], ["a", "b"])
    with pytest.raises(ValueError, match="class 'a' has a single image"):
        dev_split(whole.path, str(tmp_path / "split"), 0.5, seed=0)
    assert not (tmp_path / "split").exists()


def test_without_regard_to_classes_the_share_is_exact(tmp_path):
    rows = [*shuffled([1, 2, 1, 3, 30]), ("unlabelled", [])]
    whole = write_set(tmp_path / "set", rows, ["a", "b", "c", "d", "e"])
    folder = str(tmp_path / "split")
    for seed in (0, 1):
        rest, dev = dev_split(whole.path, folder, 0.2, seed, by_class=False)
        assert len(images_of(dev)) == 7  # of the 37 that have a class
        assert ("unlabelled", -1) in images_of(rest)
        assert sorted(images_of(rest) + images_of(dev)) == sorted(images_of(whole.path))
    for fraction in (0.01, 0.99):
        with pytest.raises(ValueError, match=r"of 37 images is (0|37), but both the dev split"):
            dev_split(whole.path, folder, fraction, 0, by_class=False)
