"""Few-shot linear accuracy: how good frozen features are, by least squares in closed form.

The paper's on-the-fly measure (section 4.1, figures 4, 8, 9, 13, table 8). Protocol and constants
are those of the authors' later code, big_vision `evaluators/fewshot_lsr.py`: whiten with the
training examples' mean and standard deviation, append a constant, regress onto {-1, +1}^K,
take the argmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

BIAS_CONSTANT = 100.0  # appended feature; so large that its weight is hardly regularised
STD_FLOOR = 1e-5  # added to the deviation: features that never vary become 0, not inf


def few_shot_accuracy(
    train_features: NDArray[np.floating],
    train_labels: NDArray[np.integer],
    test_features: NDArray[np.floating],
    test_labels: NDArray[np.integer],
    *,
    num_classes: int,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 3,
    l2: float = 2.0**10,
) -> dict[int, float]:
    """Top-1 accuracy on the test images, from `shots` training images of every class.

    Args:
        train_features: (N, D), the pool that examples are drawn from; any float type.
        train_labels: (N,), 0 to `num_classes` - 1.
        test_features: (M, D).
        test_labels: (M,).
        shots: examples per class; one accuracy for each.
        seeds: random draws 0, 1, ...; draws of one seed are nested (1 shot is part of 5 shots).
        l2: weight of the ridge penalty.

    Returns:
        Shots to mean accuracy over the seeds, in [0, 1].

    Raises:
        ValueError: a class has fewer examples than shots, a label is out of range, shapes differ,
            or a feature is not finite.
    """
    x_train, y_train = _checked("train", train_features, train_labels, num_classes)
    x_test, y_test = _checked("test", test_features, test_labels, num_classes)
    if x_train.shape[1] != x_test.shape[1]:
        raise ValueError(
            f"few-shot: train features have width {x_train.shape[1]}, test features "
            f"{x_test.shape[1]}; take both from the same model"
        )
    require_shots(np.bincount(y_train, minlength=num_classes), shots=shots)
    accuracies: dict[int, list[float]] = {shot: [] for shot in shots}
    for seed in range(seeds):
        ranks = _ranks_in_class(y_train, num_classes, seed)
        for shot in shots:
            chosen = ranks < shot
            examples = x_train[chosen].astype(np.float64)
            predicted = _predict(examples, y_train[chosen], x_test, num_classes, l2)
            accuracies[shot].append(float(np.mean(predicted == y_test)))
    return {shot: float(np.mean(values)) for shot, values in accuracies.items()}


def require_shots(
    examples: NDArray[np.integer], *, shots: Sequence[int], classes: Sequence[str] = ()
) -> None:
    """Check, before hours of training, that every class has enough examples.

    Args:
        examples: (K,), how many each class has.
        classes: names, where they are known.

    Raises:
        ValueError: naming the class, its count and the largest shot number that would work.
    """
    scarce = int(np.argmin(examples))
    if examples[scarce] < max(shots):
        name = f" ({classes[scarce]!r})" if classes else ""
        remedy = f"use shots up to {examples[scarce]} or a" if examples[scarce] else "give a"
        raise ValueError(
            f"evaluate.shots={list(shots)}: class {scarce}{name} has {examples[scarce]} examples "
            f"in evaluate.few_shot_train, {max(shots)} are needed; {remedy} larger few_shot_train"
        )


def ridge_weights(x: FloatArray, y: FloatArray, l2: float) -> FloatArray:
    """The (D, K) weights that minimise |x w - y|^2 + l2 |w|^2.

    Solved in D dimensions where there are at least as many examples, in N dimensions otherwise:
    (X'X + l2 I)^-1 X'Y = X'(XX' + l2 I)^-1 Y.
    """
    num_examples, width = x.shape
    if num_examples >= width:
        return _solve_shifted(x.T @ x, l2, x.T @ y)
    return x.T @ _solve_shifted(x @ x.T, l2, y)


def _solve_shifted(gram: FloatArray, l2: float, right: FloatArray) -> FloatArray:
    eigenvalues, vectors = np.linalg.eigh(gram)
    # Rounding can leave a zero eigenvalue slightly negative.
    scale = 1.0 / (np.maximum(eigenvalues, 0.0) + l2)
    return np.asarray(vectors @ (scale[:, None] * (vectors.T @ right)))


def _predict(
    x_train: FloatArray,
    y_train: IntArray,
    x_test: NDArray[np.floating],
    num_classes: int,
    l2: float,
) -> IntArray:
    mean, std = x_train.mean(axis=0), x_train.std(axis=0) + STD_FLOOR
    targets = 2.0 * np.eye(num_classes)[y_train] - 1.0
    weights = ridge_weights(_augmented(x_train, mean, std), targets, l2)
    return np.argmax(_augmented(x_test, mean, std) @ weights, axis=1)


def _augmented(x: NDArray[np.floating], mean: FloatArray, std: FloatArray) -> FloatArray:
    bias = np.full((len(x), 1), BIAS_CONSTANT)
    return np.concatenate([(x - mean) / std, bias], axis=1)


def _ranks_in_class(labels: IntArray, num_classes: int, seed: int) -> IntArray:
    """Random place of every example among those of its class: places below s are s shots."""
    shuffled = np.random.default_rng([seed, len(labels)]).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels, minlength=num_classes)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    ranks = np.empty(len(labels), dtype=np.int64)
    ranks[by_class] = np.arange(len(labels)) - first
    return ranks


def _checked(
    which: str, features: NDArray[np.floating], labels: NDArray[np.integer], num_classes: int
) -> tuple[NDArray[np.floating], IntArray]:
    # Left as narrow as they came: of a large pool only the examples drawn are solved in float64.
    x, y = np.asarray(features), np.asarray(labels, dtype=np.int64)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ValueError(
            f"few-shot: {which} features {x.shape} and labels {y.shape} must be (N, D) and (N,)"
        )
    if len(y) == 0:
        raise ValueError(f"few-shot: no {which} images; evaluate.few_shot_{which} is empty")
    if y.min() < 0 or y.max() >= num_classes:
        raise ValueError(
            f"few-shot: {which} labels run from {y.min()} to {y.max()}, allowed are 0 to "
            f"{num_classes - 1}"
        )
    if not np.isfinite(x).all():
        bad = int(np.argmin(np.isfinite(x).all(axis=1)))
        raise ValueError(
            f"few-shot: {which} feature row {bad} is not finite; the model's weights or "
            "activations overflowed"
        )
    return x, y
