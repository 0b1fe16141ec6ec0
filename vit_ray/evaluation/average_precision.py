"""Mean average precision of a set whose images have several labels."""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

MAX_BYTES: Final = 1 << 30
"""Most bytes of scores; every rank gets those of all images."""


class ClassScores:
    """Scores of this rank's images for each class, and their labels."""

    def __init__(self) -> None:
        self._scores: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.int32]] = []
        self.num_bytes = 0
        """Bytes of all scores so far; above `MAX_BYTES` none are kept."""

    def add_batch(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
        """Add a batch; an image without any label belongs to none of the classes.

        Args:
            logits: (B, K), any float type.
            labels: int (B, L), padded with -1.
            weights: (B,), 0 for padding.
        """
        self.num_bytes += 4 * logits.numel()
        if self.num_bytes > MAX_BYTES:
            self._scores, self._labels = [], []
            return
        counted = weights > 0
        self._scores.append(logits[counted].float().cpu().numpy())
        self._labels.append(labels[counted].int().cpu().numpy())

    def mean_average_precision(
        self, gather: Callable[[NDArray[np.generic]], NDArray[np.generic]]
    ) -> float | None:
        """Mean over the classes that have an image; None if no class has one.

        Args:
            gather: returns the rows of all ranks, on every rank.
        """
        scores = np.nan_to_num(gather(np.concatenate(self._scores)))
        labels = gather(np.concatenate(self._labels))
        is_of_class = np.zeros((len(scores), scores.shape[1] + 1), bool)
        is_of_class[np.arange(len(scores))[:, None], labels] = True  # padding: the last column
        present = np.flatnonzero(is_of_class[:, :-1].any(axis=0))
        if not len(present):
            return None
        from sklearn.metrics import average_precision_score  # takes a second

        return float(average_precision_score(is_of_class[:, present], scores[:, present]))
