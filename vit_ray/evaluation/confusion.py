"""How often each class was taken for each other one: counts that add up over batches and ranks.

Only pairs that occur are kept: for 21,843 classes a table would have 477 million cells.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

CONFUSION_FILE: Final = "confusion.csv"

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
        """The table of pairs as CSV, by file name."""
        # A name that a spreadsheet would run as a formula gets a quote before it.
        formula = ("=", "+", "-", "@", "\t", "\r")
        escaped = [f"'{name}" if name.startswith(formula) else name for name in classes]
        names = np.array(escaped, object)  # references: a column of str is as wide as the longest
        pairs = pd.DataFrame(self.pairs(), columns=["class", "predicted", "images"])
        for column in ("class", "predicted"):
            pairs[column] = names[pairs[column]]  # IndexError for one without a name
        return {CONFUSION_FILE: pairs.to_csv(index=False).encode()}
