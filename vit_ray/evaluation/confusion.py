"""How often each class was taken for each other one: counts that add up over batches and ranks.

Only pairs that occur are kept: for 21,843 classes a table would have 477 million cells.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

PER_CLASS_FILE, CONFUSION_FILE = "per_class.csv", "confusion.csv"

Int64Array = NDArray[np.int64]


class Confusion:
    """Counts of (class, predicted class) pairs."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[int, int]]()

    def add_batch(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
        """Count the best-scored class of each image.

        An image with several correct answers counts for the predicted one, if it is one of them,
        and else for the first.

        Args:
            logits: (B, K).
            labels: int (B, L), padded with -1; an image without any is skipped.
            weights: (B,), 0 for padding.
        """
        predicted = logits.argmax(dim=1)
        is_right = (labels == predicted[:, None]).any(dim=1)
        # The first label that is not padding.
        first = labels.gather(1, (labels >= 0).int().argmax(dim=1, keepdim=True))[:, 0]
        truth = torch.where(is_right, predicted, first)
        counted = (weights > 0) & (truth >= 0)
        self._counts.update(zip(truth[counted].tolist(), predicted[counted].tolist(), strict=True))

    def merge(self, pairs: Int64Array) -> None:
        """Replace one rank's counts by those of all ranks, in the form of `pairs`."""
        self._counts.clear()
        for truth, predicted, count in pairs.tolist():
            self._counts[truth, predicted] += count

    def pairs(self) -> Int64Array:
        """(n, 3): class, predicted class and number of images, each pair once, sorted."""
        rows = [(*pair, count) for pair, count in sorted(self._counts.items())]
        return np.array(rows, np.int64).reshape(-1, 3)

    def accuracies(self, num_classes: int) -> NDArray[np.float64]:
        """Top-1 accuracy of each class; nan for one without images."""
        truth, predicted, counts = self.pairs().T
        images = np.bincount(truth, counts, num_classes)
        right = np.bincount(truth, counts * (truth == predicted), num_classes)
        return np.divide(right, images, out=np.full(num_classes, np.nan), where=images > 0)

    def files(self, classes: Sequence[str]) -> dict[str, bytes]:
        """The table of classes and the table of pairs, as CSV by file name."""
        # A name that a spreadsheet would run as a formula gets a quote before it.
        formula = ("=", "+", "-", "@", "\t", "\r")
        names = [f"'{name}" if name.startswith(formula) else name for name in classes]
        pairs = self.pairs().tolist()
        images, right = np.zeros((2, len(names)), np.int64)
        errors: dict[int, tuple[str, int]] = {}
        for truth, predicted, count in pairs:
            images[truth] += count
            if truth == predicted:
                right[truth] = count
            elif count > errors.get(truth, ("", 0))[1]:
                errors[truth] = names[predicted], count
        per_class = (
            (
                index, name, images[index], right[index],
                f"{right[index] / images[index]:.6f}" if images[index] else "",
                *errors.get(index, ("", "")),
            )
            for index, name in enumerate(names)
        )  # fmt: skip
        heads = ("class", "name", "images", "right", "top1", "most_taken_for", "times")
        by_name = ((names[truth], names[predicted], count) for truth, predicted, count in pairs)
        return {
            PER_CLASS_FILE: _csv([heads, *per_class]),
            CONFUSION_FILE: _csv([("class", "predicted", "images"), *by_name]),
        }


def _csv(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
