"""Few-shot accuracy against scikit-learn's Ridge and an explicit least-squares system."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from vit_ray.evaluation.few_shot import (
    ExampleSums,
    FewShot,
    few_shot_accuracy,
    ranks_in_class,
    require_shots,
)


def _digits():
    images, labels = load_digits(return_X_y=True)
    return images[:1000], labels[:1000], images[1000:], labels[1000:]


def _augmented(x, scaler):
    deviation = np.sqrt(scaler.var_) + 1e-5
    return np.hstack([(x - scaler.mean_) / deviation, np.full((len(x), 1), 100.0)])


def _predicted_by_ridge(examples, labels, tests, num_classes, l2):
    """Predictions of scikit-learn's Ridge on whitened features and the constant."""
    scaler = StandardScaler().fit(examples)
    ridge = Ridge(alpha=l2, fit_intercept=False, solver="svd")
    targets = np.where(labels[:, None] == np.arange(num_classes), 1.0, -1.0)
    ridge.fit(_augmented(examples, scaler), targets)
    return ridge.predict(_augmented(tests, scaler))


@settings(max_examples=25, deadline=None)
@given(
    per_class=st.integers(1, 15),
    width=st.integers(1, 40),
    l2=st.floats(1e-1, 1e4),
    offset=st.sampled_from([0.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_scores_are_those_of_scikit_learns_ridge_on_both_sides_of_n_equals_d(
    per_class, width, l2, offset, seed
):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(3), per_class)
    examples, tests = (offset + rng.normal(size=(n, width)) for n in (len(labels), 7))
    expected = _predicted_by_ridge(examples, labels, tests, 3, l2)
    sums = ExampleSums(width, 3)
    half = len(labels) // 2
    sums.add(examples[half:], labels[half:])
    if half:
        sums.add(examples[:half], labels[:half])
    found = sums.classifier(l2)
    scores = (tests - found.mean) @ found.weights + found.bias
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("constant", [0.0, 50.0, -1e4])
def test_a_feature_that_never_varies_changes_no_score(constant):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 11)
    examples, tests = rng.normal(size=(33, 4)), rng.normal(size=(7, 4))
    expected = _predicted_by_ridge(examples, labels, tests, 3, 1e-3)
    sums = ExampleSums(5, 3)
    sums.add(np.hstack([examples, np.full((33, 1), constant)]), labels)
    found = sums.classifier(1e-3)
    # Not the same constant: in float32 a model's constant output differs in the last bit.
    tests = np.hstack([tests, np.full((7, 1), constant * (1 + 1e-7))])
    scores = (tests - found.mean) @ found.weights + found.bias
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shot", "seed"), [(1, 0), (5, 1), (25, 0)])
def test_accuracy_is_that_of_scikit_learns_ridge_on_the_same_draws(shot, seed):
    pool, labels, test, test_labels = _digits()
    drawn = ranks_in_class(labels, 10, seed) < shot
    assert np.bincount(labels[drawn]).tolist() == [shot] * 10
    scores = _predicted_by_ridge(pool[drawn], labels[drawn], test, 10, 2.0**10)
    expected = np.mean(scores.argmax(axis=1) == test_labels)
    measured = FewShot(labels, 10, shots=(1, 5, 10, 25), seeds=2)
    for rows in np.array_split(np.random.default_rng(5).permutation(len(labels)), 7):
        measured.add_examples(pool[rows], rows)
    measured.solve()
    for rows in np.array_split(np.arange(len(test)), 3):
        measured.add_tests(test[rows], test_labels[rows])
    assert measured.accuracies()[shot][seed] == pytest.approx(expected, abs=1e-12)


def test_what_one_rank_finds_wrong_all_ranks_learn_from_the_sums():
    pool, labels, test, test_labels = _digits()
    broken = pool.copy()
    broken[ranks_in_class(labels, 10, 0) == 24, 3] = np.nan
    measured = FewShot(labels, 10, shots=(25,), seeds=1)
    measured.add_examples(broken, np.arange(len(labels)))
    with pytest.raises(ValueError, match="a train feature is not finite"):
        measured.solve()

    def counts_of(tests, its_labels):
        measured = FewShot(labels, 10, shots=(1,), seeds=1)
        measured.add_examples(pool, np.arange(len(labels)))
        measured.solve()
        measured.add_tests(tests, its_labels)
        return measured, measured.counts

    good, counts = counts_of(test, test_labels)
    _, of_infinite = counts_of(
        np.where(np.arange(len(test))[:, None] < 2, np.inf, test), test_labels
    )
    with pytest.raises(ValueError, match="features of 2 test images are not finite"):
        good.accuracies(counts + of_infinite)
    _, of_unlabelled = counts_of(test, np.full(len(test), -1))
    with pytest.raises(ValueError, match="797 test images have no label from 0 to 9"):
        good.accuracies(counts + of_unlabelled)
    good.accuracies(counts)


def test_images_without_a_label_are_never_drawn():
    labels = np.array([0, -1, 1, -1, 0, 1])
    ranks = ranks_in_class(labels, 2, 0)
    assert sorted(ranks[labels == 0]) == sorted(ranks[labels == 1]) == [0, 1]
    assert (ranks[labels < 0] >= len(labels)).all()


def test_half_precision_is_solved_in_double_and_classifiers_are_kept_in_the_features_precision():
    pool, labels, test, test_labels = _digits()  # digits hold 0..16: exact in float16
    half = few_shot_accuracy(
        pool.astype(np.float16), labels, test.astype(np.float16), test_labels, num_classes=10
    )
    assert half == few_shot_accuracy(pool, labels, test, test_labels, num_classes=10)
    measured = FewShot(np.arange(4), 4, shots=(1,), seeds=1)
    measured.add_examples(np.eye(4, dtype=np.float32), np.arange(4))
    measured.solve()
    (classifier,) = measured._classifiers.values()
    assert classifier.weights.dtype == classifier.mean.dtype == np.float32


def test_the_mean_over_seeds_is_the_mean_of_different_draws():
    one, two, three = (
        few_shot_accuracy(*_digits(), num_classes=10, shots=(1,), seeds=n)[1] for n in (1, 2, 3)
    )
    second, third = 2 * two - one, 3 * three - 2 * two
    assert len({round(value, 9) for value in (one, second, third)}) == 3
    assert all(0.0 < value < 1.0 for value in (second, third))


def test_a_class_with_too_few_examples_is_named():
    labels = np.array([0, 0, 0, 1, 1, 2])
    examples = np.bincount(labels)
    with pytest.raises(
        ValueError, match=r"class 2 has 1 examples.*5 are needed; use shots up to 1"
    ):
        require_shots(examples, shots=(1, 5))
    with pytest.raises(ValueError, match=r"class 2 \('dog'\) has 1 examples"):
        require_shots(examples, shots=(5,), classes=["ant", "cat", "dog"])
    with pytest.raises(ValueError, match=r"class 1 has 0 examples.*1 are needed; give a larger"):
        require_shots(np.array([3, 0]), shots=(1,))
    features = np.zeros((6, 4))
    with pytest.raises(ValueError, match="class 2 has 1 examples"):
        few_shot_accuracy(features, labels, features, labels, num_classes=3, shots=(2,))
    require_shots(examples, shots=(1,))


def test_bad_features_and_labels_are_refused():
    good, labels = np.eye(4), np.array([0, 1, 0, 1])

    def accuracy(train=good, train_labels=labels, test=good, test_labels=labels):
        few_shot_accuracy(train, train_labels, test, test_labels, num_classes=2, shots=(1,))

    with pytest.raises(ValueError, match="1 test images have no label from 0 to 1"):
        accuracy(test_labels=np.array([0, 1, 2, 0]))
    with pytest.raises(ValueError, match=r"test features \(4, 3\) and labels"):
        accuracy(test=good[:, :3])
    with pytest.raises(ValueError, match=r"train features \(4, 4\) and labels \(3,\)"):
        accuracy(train_labels=labels[:3])
    with pytest.raises(ValueError, match="few_shot_test is empty"):
        accuracy(test=good[:0], test_labels=labels[:0])
    broken = good.copy()
    broken[2, 1] = np.inf
    with pytest.raises(ValueError, match="a train feature is not finite"):
        accuracy(train=broken)
