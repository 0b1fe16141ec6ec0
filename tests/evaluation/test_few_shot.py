"""Few-shot accuracy against scikit-learn's Ridge and an explicit least-squares system."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from vit_ray.evaluation.few_shot import (
    FewShot,
    LinearClassifier,
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


def _scores(examples, labels, tests, num_classes, l2):
    of_class = np.eye(num_classes)[labels]
    sums = of_class.sum(axis=0), of_class.T @ examples, examples.T @ examples
    found = LinearClassifier.of_sums(*sums, l2)
    return (tests - found.mean) @ found.weights + found.bias


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
    scores = _scores(examples, labels, tests, 3, l2)
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("constant", [0.0, 50.0, -1e4])
def test_a_feature_that_never_varies_changes_no_score(constant):
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(3), 11)
    examples, tests = rng.normal(size=(33, 4)), rng.normal(size=(7, 4))
    expected = _predicted_by_ridge(examples, labels, tests, 3, 1e-3)
    examples = np.hstack([examples, np.full((33, 1), constant)])
    # Not the same constant: in float32 a model's constant output differs in the last bit.
    tests = np.hstack([tests, np.full((7, 1), constant * (1 + 1e-7))])
    scores = _scores(examples, labels, tests, 3, 1e-3)
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
    mean = few_shot_accuracy(
        pool, labels, test, test_labels, num_classes=10, shots=(shot,), seeds=2
    )
    assert mean[shot] == pytest.approx(np.mean(measured.accuracies()[shot]), abs=1e-12)


def test_images_without_a_label_are_never_drawn():
    labels = np.array([0, -1, 1, -1, 0, 1])
    ranks = ranks_in_class(labels, 2, 0)
    assert sorted(ranks[labels == 0]) == sorted(ranks[labels == 1]) == [0, 1]
    assert (ranks[labels < 0] >= len(labels)).all()


def test_half_precision_is_solved_in_double():
    pool, labels, test, test_labels = _digits()  # digits hold 0..16: exact in float16
    half = few_shot_accuracy(
        pool.astype(np.float16), labels, test.astype(np.float16), test_labels, num_classes=10
    )
    assert half == few_shot_accuracy(pool, labels, test, test_labels, num_classes=10)


def test_what_one_rank_finds_wrong_all_ranks_learn_from_the_sums():
    pool, labels, test, test_labels = _digits()
    measured = [FewShot(labels, 10, shots=(1,), seeds=1) for _ in range(3)]
    infinite = np.where(np.arange(len(test))[:, None] < 2, np.inf, test)
    given = [(test, test_labels), (infinite, test_labels), (test, np.full(len(test), -1))]
    for one, tests in zip(measured, given, strict=True):
        one.add_examples(pool, np.arange(len(labels)))
        one.solve()
        one.add_tests(*tests)
    good, of_infinite, of_unlabelled = measured
    with pytest.raises(ValueError, match="features of 2 test images are not finite"):
        good.accuracies(good.counts + of_infinite.counts)
    with pytest.raises(ValueError, match="797 test images have no label from 0 to 9"):
        good.accuracies(good.counts + of_unlabelled.counts)
    good.accuracies(good.counts)


@pytest.mark.parametrize(
    ("counts", "shots", "classes", "word"),
    [
        ([3, 2, 1], (1, 5), (), "class 2 has 1 examples.*5 are needed; use shots up to 1"),
        ([3, 2, 1], (5,), ("ant", "cat", "dog"), r"class 2 \('dog'\)"),
        ([3, 0], (1,), (), "class 1 has 0 examples"),
    ],
)
def test_a_class_with_too_few_examples_is_named(counts, shots, classes, word):
    with pytest.raises(ValueError, match=word):
        require_shots(np.array(counts), shots=shots, classes=classes)
    require_shots(np.array([3, 2, 1]), shots=(1,))


GOOD, TWO = np.eye(4), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("train", "train_labels", "test", "test_labels", "word"),
    [
        (GOOD, TWO, GOOD, [0, 1, 2, 0], "1 test images have no label"),
        (GOOD, TWO, GOOD[:, :3], TWO, "test features"),
        (GOOD, TWO[:3], GOOD, TWO, "train features"),
        (GOOD, TWO, GOOD[:0], TWO[:0], "few_shot_test"),
        (np.where(GOOD == 1, np.inf, GOOD), TWO, GOOD, TWO, "a train feature is not finite"),
        (GOOD, TWO, np.where(GOOD == 1, np.inf, GOOD), TWO, "4 test images are not finite"),
        (GOOD, [0, 0, 0, 1], GOOD, TWO, "class 1 has 1 examples"),
    ],
)
def test_bad_features_and_labels_are_refused(train, train_labels, test, test_labels, word):
    labels = np.array(train_labels), np.array(test_labels)
    with pytest.raises(ValueError, match=word):
        few_shot_accuracy(train, labels[0], test, labels[1], num_classes=2, shots=(2,))
