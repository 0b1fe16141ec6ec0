"""Mean average precision of a set whose images have several labels, exact over batches and ranks.

Average precision of a class is the sum, over the scores of its images from the best on, of the
precision among all images that score as much or more, times what these scores add to the recall. So
ranks exchange only the scores of images with a label, and counts of images that score as high.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

MOST_BYTES: Final = 4 << 30
"""Bytes of scores that a rank holds."""


class ClassScores:
    """Scores of this rank's images for each class, and their labels."""

    def __init__(self) -> None:
        self._scores: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.int32]] = []
        self._bytes = 0

    def add_batch(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
        """Add a batch; an image without any label belongs to none of the classes.

        Args:
            logits: (B, K), any float type.
            labels: int (B, L), padded with -1.
            weights: (B,), 0 for padding.
        """
        self._bytes += 4 * logits.numel()
        if not self.is_whole:
            self._scores, self._labels = [], []
            return
        counted = weights > 0
        self._scores.append(logits[counted].float().cpu().numpy())
        self._labels.append(labels[counted].int().cpu().numpy())

    @property
    def is_whole(self) -> bool:
        """Whether all scores are kept: above `MOST_BYTES` none are."""
        return self._bytes <= MOST_BYTES

    def positives(self) -> Float64Array:
        """(n, 2): class and score of each label of this rank's images."""
        found = [np.empty((0, 2))]
        for scores, labels in zip(self._scores, self._labels, strict=True):
            each = np.sort(labels, axis=1)
            each[:, 1:][each[:, 1:] == each[:, :-1]] = -1  # a label that an image has twice
            image, place = np.nonzero(each >= 0)
            classes = each[image, place]
            found.append(np.column_stack([classes, scores[image, classes]]))
        return np.concatenate(found)

    def at_least(self, positives: Float64Array) -> Float64Array:
        """(n,): how many of this rank's images score at least as high in each row's class.

        Args:
            positives: those of all ranks.
        """
        counts = np.zeros(len(positives))
        if self._scores:
            scores = np.concatenate(self._scores)
            classes = positives[:, 0].astype(np.int64)
            for index in np.unique(classes):
                rows, column = classes == index, np.sort(scores[:, index])
                lower = np.searchsorted(column, positives[rows, 1].astype(np.float32))
                counts[rows] = len(column) - lower
        return counts


def mean_average_precision(positives: Float64Array, at_least: Float64Array) -> float | None:
    """Mean over the classes with an image; None if no class has one.

    Args:
        positives: (n, 2): class and score of each label of all ranks' images.
        at_least: (n,): how many images of all ranks score as high or higher in the row's class.
    """
    found = []
    for index in np.unique(positives[:, 0]):
        rows = positives[:, 0] == index
        scores, counts = positives[rows, 1], at_least[rows]
        right = len(scores) - np.searchsorted(np.sort(scores), scores)
        # Each of the labels with one score adds 1 / n to the recall, at the precision there.
        found.append(float(np.mean(right / counts)))
    return float(np.mean(found)) if found else None
