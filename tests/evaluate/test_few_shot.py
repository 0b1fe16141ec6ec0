"""Few-shot accuracy against scikit-learn's Ridge and an explicit least-squares system."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from vit_ray.evaluate.few_shot import few_shot_accuracy, require_shots, ridge_weights


def _digits():
    images, labels = load_digits(return_X_y=True)
    return images[:1000], labels[:1000], images[1000:], labels[1000:]


@settings(max_examples=25, deadline=None)
@given(
    num_examples=st.integers(1, 40),
    width=st.integers(1, 40),
    l2=st.floats(1e-2, 1e4),
    seed=st.integers(0, 2**16),
)
def test_weights_solve_the_stacked_least_squares_problem_on_both_sides_of_n_equals_d(
    num_examples, width, l2, seed
):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(num_examples, width)), rng.normal(size=(num_examples, 3))
    stacked_x = np.vstack([x, np.sqrt(l2) * np.eye(width)])
    stacked_y = np.vstack([y, np.zeros((width, 3))])
    expected = np.linalg.lstsq(stacked_x, stacked_y, rcond=None)[0]
    np.testing.assert_allclose(ridge_weights(x, y, l2), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shot", [1, 5, 25])  # 65 features: 10 and 50 examples dual, 250 primal
def test_using_the_whole_pool_gives_the_accuracy_of_scikit_learns_ridge(shot):
    pool, labels, test, test_labels = _digits()
    # Exactly `shot` images of every class, so that any draw is the whole pool.
    whole = np.concatenate([np.flatnonzero(labels == k)[:shot] for k in range(10)])
    pool, labels = pool[whole], labels[whole]

    scaler = StandardScaler().fit(pool)
    deviation = np.sqrt(scaler.var_) + 1e-5

    def augmented(x):
        return np.hstack([(x - scaler.mean_) / deviation, np.full((len(x), 1), 100.0)])

    ridge = Ridge(alpha=2.0**10, fit_intercept=False, solver="svd")
    ridge.fit(augmented(pool), np.where(labels[:, None] == np.arange(10), 1.0, -1.0))
    expected = np.mean(ridge.predict(augmented(test)).argmax(1) == test_labels)

    found = few_shot_accuracy(pool, labels, test, test_labels, num_classes=10, shots=(shot,))
    assert found == {shot: pytest.approx(expected, abs=1e-12)}


def test_more_shots_recognise_more_digits_and_the_result_is_repeatable():
    found = few_shot_accuracy(*_digits(), num_classes=10)
    assert list(found) == [1, 5, 10, 25]
    assert found[1] < found[5] < found[10] < found[25]
    assert found[25] > 0.8
    assert found == few_shot_accuracy(*_digits(), num_classes=10)


def test_the_mean_over_seeds_is_the_mean_of_different_draws():
    one, two, three = (
        few_shot_accuracy(*_digits(), num_classes=10, shots=(1,), seeds=n)[1] for n in (1, 2, 3)
    )
    second, third = 2 * two - one, 3 * three - 2 * two
    assert len({round(value, 9) for value in (one, second, third)}) == 3
    assert all(0.0 < value < 1.0 for value in (second, third))


def test_a_feature_that_never_varies_in_the_examples_changes_nothing():
    pool, labels, test, test_labels = _digits()
    with_constant = [np.hstack([x, np.full((len(x), 1), 7.0)]) for x in (pool, test)]
    plain = few_shot_accuracy(pool, labels, test, test_labels, num_classes=10, shots=(5,))
    found = few_shot_accuracy(
        with_constant[0], labels, with_constant[1], test_labels, num_classes=10, shots=(5,)
    )
    assert found == plain


def test_half_precision_features_are_solved_in_double_precision():
    pool, labels, test, test_labels = _digits()  # digits hold 0..16: exact in float16
    half = few_shot_accuracy(
        pool.astype(np.float16), labels, test.astype(np.float16), test_labels, num_classes=10
    )
    assert half == few_shot_accuracy(pool, labels, test, test_labels, num_classes=10)


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

    with pytest.raises(ValueError, match="test labels run from 0 to 2, allowed are 0 to 1"):
        accuracy(test_labels=np.array([0, 1, 2, 0]))
    with pytest.raises(ValueError, match="width 4, test features 3"):
        accuracy(test=good[:, :3])
    with pytest.raises(ValueError, match=r"train features \(4, 4\) and labels \(3,\)"):
        accuracy(train_labels=labels[:3])
    with pytest.raises(ValueError, match="few_shot_test is empty"):
        accuracy(test=good[:0], test_labels=labels[:0])
    broken = good.copy()
    broken[2, 1] = np.inf
    with pytest.raises(ValueError, match="train feature row 2 is not finite"):
        accuracy(train=broken)
