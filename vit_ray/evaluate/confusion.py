"""How often each class was taken for each: counts that add up over batches and ranks.

Only pairs that occur are kept: of 21,843 classes a table would have 477 million cells.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

PER_CLASS_FILE, CONFUSION_FILE = "per_class.csv", "confusion.csv"

Int64Array = NDArray[np.int64]


class Confusion:
    """Counts of (class, predicted class) pairs."""

    def __init__(self) -> None:
        self._parts: list[Int64Array] = []

    def add_batch(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
        """Count the best-scored class of each image.

        An image with several right answers counts for the predicted one, if that is among them, and
        else for the first.

        Args:
            logits: (B, K).
            labels: int (B, L), padded with -1; an image without any is skipped.
            weights: (B,), 0 for padding.
        """
        predicted = logits.argmax(dim=1)
        is_right = (labels == predicted[:, None]).any(dim=1)
        # The first that is not padding.
        first = labels.gather(1, (labels >= 0).int().argmax(dim=1, keepdim=True))[:, 0]
        truth = torch.where(is_right, predicted, first)
        counted = (weights > 0) & (truth >= 0)
        pairs = torch.stack([truth[counted], predicted[counted]], dim=1).cpu().numpy()
        self._parts.append(np.insert(pairs.astype(np.int64), 2, 1, axis=1))

    def merge(self, pairs: Int64Array) -> None:
        """Take the counts of all ranks, in the form of `pairs`, in the place of one rank's."""
        self._parts = [pairs]

    def pairs(self) -> Int64Array:
        """(n, 3): class, predicted class and number of images, each pair once, sorted."""
        parts = [np.empty((0, 3), np.int64), *self._parts]
        every = np.concatenate(parts)
        found, places = np.unique(every[:, :2], axis=0, return_inverse=True)
        counts = np.bincount(places.ravel(), weights=every[:, 2], minlength=len(found))
        merged = np.column_stack([found, counts.astype(np.int64)])
        self._parts = [merged]
        return merged

    def accuracies(self, num_classes: int) -> NDArray[np.float64]:
        """Top-1 accuracy of each class; nan for one without images."""
        truth, predicted, counts = self.pairs().T
        images = np.bincount(truth, counts, num_classes)
        right = np.bincount(truth, counts * (truth == predicted), num_classes)
        return np.divide(right, images, out=np.full(num_classes, np.nan), where=images > 0)

    def files(self, classes: Sequence[str]) -> dict[str, bytes]:
        """The table of classes and the table of pairs, as CSV by file name."""
        return {
            PER_CLASS_FILE: _csv(
                ("class", "name", "images", "right", "top1", "most_taken_for", "times"),
                self._class_rows(classes),
            ),
            CONFUSION_FILE: _csv(
                ("class", "predicted", "images"),
                [(classes[i], classes[j], n) for i, j, n in self.pairs().tolist()],
            ),
        }

    def _class_rows(self, classes: Sequence[str]) -> Iterator[tuple[object, ...]]:
        pairs = self.pairs()
        bounds = np.searchsorted(pairs[:, 0], np.arange(len(classes) + 1))
        for index, name in enumerate(classes):
            _, predicted, counts = pairs[bounds[index] : bounds[index + 1]].T
            is_right = predicted == index
            images, right = int(counts.sum()), int(counts[is_right].sum())
            share = f"{right / images:.6f}" if images else ""
            taken: tuple[object, ...] = ("", "")
            if not is_right.all():
                most = np.flatnonzero(~is_right)[np.argmax(counts[~is_right])]
                taken = (classes[predicted[most]], int(counts[most]))
            yield (index, name, images, right, share, *taken)


def _csv(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows([[_cell(value) for value in row] for row in rows])
    return text.getvalue().encode()


def _cell(value: object) -> object:
    """A class name that a spreadsheet would run as a formula gets a quote before it."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value
