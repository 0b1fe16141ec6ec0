"""Few-shot accuracy: how good frozen features are, by least squares.

Least squares in closed form is the paper's on-the-fly measure (section 4.1, figures 4, 8, 9, 13,
table 8). Protocol and constants are those of the authors' later code, big_vision
`evaluators/fewshot_lsr.py`: whiten with the training examples' mean and standard deviation, append
a constant, regress onto {-1, +1}^K with one fixed penalty, take the argmax.

The system is solved from sums over examples, which add up over batches and ranks, so the features
of a set are never in memory all at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

BIAS_CONSTANT: Final = 100.0  # appended feature; so large that its weight is hardly regularised
STD_FLOOR: Final = 1e-5  # added to the deviation: features that never vary become 0, not inf
L2: Final = 2.0**10  # big_vision `configs/common_fewshot.py`
_ROWS_AT_A_TIME: Final = 4096
_FLAT: Final = 1e-12  # variance / mean^2 that sums in float64 cannot distinguish from 0
_OVERFLOW: Final = "the model's weights or activations overflowed"


@dataclass(frozen=True)
class LinearClassifier:
    """Scores of K classes: (features (N, D) - mean (D,)) @ weights (D, K) + bias (K,)."""

    mean: NDArray[np.floating]
    weights: NDArray[np.floating]
    bias: NDArray[np.floating]

    @classmethod
    def of_sums(
        cls,
        counts: FloatArray,
        sums: FloatArray,
        products: FloatArray,
        l2: float,
        dtype: DTypeLike = np.float64,
    ) -> "LinearClassifier":
        """The ridge regression onto {-1, +1}^K of the whitened examples and the constant.

        Whitened features have mean zero, so the constant has an independent equation.

        Args:
            counts: (K,) examples by class.
            sums: (K, D) of features, by class.
            products: (D, D) of features with features.
            l2: weight of the ridge penalty.
            dtype: precision of the scores; the system is solved in float64.
        """
        total = counts.sum()
        mean = sums.sum(axis=0) / total
        variance = np.diag(products) / total - mean**2
        varies = variance > _FLAT * mean**2
        scale = varies / (np.sqrt(np.where(varies, variance, 0.0)) + STD_FLOOR)
        gram = (products - total * np.outer(mean, mean)) * np.outer(scale, scale)
        gram[np.diag_indices_from(gram)] += l2
        right = 2.0 * (sums - counts[:, None] * mean).T * scale[:, None]
        weights = np.linalg.solve(gram, right) * scale[:, None]
        of_constant = BIAS_CONSTANT * (2.0 * counts - total)
        bias = BIAS_CONSTANT * of_constant / (total * BIAS_CONSTANT**2 + l2)
        return cls(*(array.astype(dtype) for array in (mean, weights, bias)))

    def predict(self, features: NDArray[np.floating]) -> IntArray:
        """The best-scored class of each row, (N,), computed in the classifier's precision."""
        whitened = features.astype(self.mean.dtype) - self.mean
        return np.argmax(whitened @ self.weights + self.bias, axis=1)


class FewShot:
    """Few-shot accuracy from batches of features: first of examples, then of test images.

    Labels and seed decide which images of the pool are examples; the others are ignored.

    Args:
        pool_labels: (N,), of the images that examples are drawn from; -1 is never drawn.

    Raises:
        ValueError: a class has fewer examples than shots, or a label is out of range.
    """

    def __init__(
        self,
        pool_labels: NDArray[np.integer],
        num_classes: int,
        *,
        shots: Sequence[int],
        seeds: int,
        l2: float = L2,
    ) -> None:
        self._labels = np.asarray(pool_labels, dtype=np.int64)
        if self._labels.max(initial=-1) >= num_classes or self._labels.min(initial=0) < -1:
            raise ValueError(
                f"few-shot: train labels run from {self._labels.min()} to {self._labels.max()}, "
                f"allowed are 0 to {num_classes - 1}"
            )
        self._num_classes, self._l2 = num_classes, l2
        self._shots = sorted(set(shots))
        drawable = self._labels[self._labels >= 0]
        require_shots(np.bincount(drawable, minlength=num_classes), shots=self._shots)
        # By seed, for each image of the pool: index of the first of `shots` that includes the
        # image, or len(shots).
        self._stages = [
            np.searchsorted(self._shots, ranks, side="right").astype(np.int32)
            for ranks in (ranks_in_class(self._labels, num_classes, s) for s in range(seeds))
        ]
        # Sums over examples, as in `LinearClassifier.of_sums`; each (seeds, shots, ...). Ranks add
        # them up in place before `solve`.
        self.sums: list[FloatArray] = []
        self._classifiers: list[LinearClassifier] = []
        self._dtype: np.dtype[Any] = np.dtype(np.float32)
        self._draws = (seeds, len(self._shots))
        # Correct predictions of each draw; then all test images, those without a valid label, and
        # those with infinite features. For ranks to add up.
        self.counts = np.zeros(seeds * len(self._shots) + 3)

    def add_examples(self, features: NDArray[np.floating], samples: IntArray) -> None:
        """Add features (B, D) of images of the pool; `samples` (B,) are indices in the pool."""
        self._dtype = np.result_type(features, self._dtype)
        if not self.sums:
            classes, width = self._num_classes, features.shape[1]
            shapes = ((classes,), (classes, width), (width, width))
            self.sums = [np.zeros((*self._draws, *shape)) for shape in shapes]
        counts, sums, products = self.sums
        for draw in np.ndindex(self._draws):
            is_drawn = self._stages[draw[0]][samples] == draw[1]
            if is_drawn.any():
                x, labels = features[is_drawn].astype(np.float64), self._labels[samples[is_drawn]]
                np.add.at(counts[draw], labels, 1)
                np.add.at(sums[draw], labels, x)
                products[draw] += x.T @ x

    def solve(self) -> None:
        """Train a classifier for every draw; after this no example can be added.

        Raises:
            ValueError: a feature was not finite.
        """
        if not all(np.isfinite(array).all() for array in self.sums):
            raise ValueError(f"few-shot: a train feature is not finite; {_OVERFLOW}")
        for array in self.sums:
            np.cumsum(array, axis=1, out=array)  # draws of one seed are nested
        for draw in np.ndindex(self._draws):
            counts, sums, products = (array[draw] for array in self.sums)
            classifier = LinearClassifier.of_sums(counts, sums, products, self._l2, self._dtype)
            self._classifiers.append(classifier)
        self.sums = []

    def add_tests(self, features: NDArray[np.floating], labels: NDArray[np.integer]) -> None:
        """Count correct predictions for test images: features (B, D), labels (B,).

        Invalid labels and features are counted, not raised, so that all ranks stay in step.
        """
        right = [np.sum(each.predict(features) == labels) for each in self._classifiers]
        unlabelled = np.sum((labels < 0) | (labels >= self._num_classes))
        infinite = np.sum(~np.isfinite(features).all(axis=1))
        self.counts += [*right, len(labels), unlabelled, infinite]

    def accuracies(self, counts: FloatArray | None = None) -> dict[int, list[float]]:
        """Shots to the accuracy in [0, 1] of each seed.

        Args:
            counts: summed over ranks; unset = this rank's.

        Raises:
            ValueError: there were no test images, or a label or a feature of them was invalid.
        """
        *right, tested, unlabelled, infinite = self.counts if counts is None else counts
        if not tested:
            raise ValueError("few-shot: no test images; evaluate.few_shot_test is empty")
        if unlabelled:
            raise ValueError(
                f"few-shot: {unlabelled:.0f} test images have no label from 0 to "
                f"{self._num_classes - 1}"
            )
        if infinite:
            raise ValueError(
                f"few-shot: features of {infinite:.0f} test images are not finite; {_OVERFLOW}"
            )
        shares = np.reshape(right, self._draws) / tested
        return {shot: shares[:, index].tolist() for index, shot in enumerate(self._shots)}


def few_shot_accuracy(
    train_features: NDArray[np.floating],
    train_labels: NDArray[np.integer],
    test_features: NDArray[np.floating],
    test_labels: NDArray[np.integer],
    *,
    num_classes: int,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 3,
    l2: float = L2,
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
    x_train, y_train = np.asarray(train_features), np.asarray(train_labels)
    x_test, y_test = np.asarray(test_features), np.asarray(test_labels)
    num_train, num_test, width = len(x_train), len(x_test), np.shape(x_train)[-1]
    expected = [(num_train, width), (num_train,), (num_test, width), (num_test,)]
    if [array.shape for array in (x_train, y_train, x_test, y_test)] != expected:
        raise ValueError(
            f"few-shot: train features {x_train.shape} and labels {y_train.shape}, test features "
            f"{x_test.shape} and labels {y_test.shape} must be (N, D), (N,), (M, D) and (M,)"
        )
    measured = FewShot(y_train, num_classes, shots=shots, seeds=seeds, l2=l2)
    measured.add_examples(x_train, np.arange(num_train))
    measured.solve()
    # Scores of all tests at once may not fit into memory.
    for rows in np.split(np.arange(num_test), range(_ROWS_AT_A_TIME, num_test, _ROWS_AT_A_TIME)):
        measured.add_tests(x_test[rows], y_test[rows])
    accuracies = measured.accuracies()
    return {shot: float(np.mean(accuracies[shot])) for shot in shots}


def require_shots(
    examples: NDArray[np.integer], *, shots: Sequence[int], classes: Sequence[str] = ()
) -> None:
    """Check, before hours of training, that every class has enough examples.

    Args:
        examples: (K,), numbers of examples by class.
        classes: names for the message; may be empty.

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


def ranks_in_class(labels: NDArray[np.integer], num_classes: int, seed: int) -> IntArray:
    """Random rank of every example within its class (N,): ranks below s are the s shots.

    Examples without a label (-1) have rank N.
    """
    of_class = np.where(labels < 0, num_classes, labels)
    shuffled = np.random.default_rng([seed, len(labels)]).permutation(len(labels))
    by_class = shuffled[np.argsort(of_class[shuffled], kind="stable")]
    counts = np.bincount(of_class, minlength=num_classes + 1)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    ranks = np.empty(len(labels), dtype=np.int64)
    ranks[by_class] = np.arange(len(labels)) - first
    ranks[labels < 0] = len(labels)
    return ranks
