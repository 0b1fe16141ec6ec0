"""What an evaluation collects from batches: accuracy, confusions of classes, example images.

An image may have several correct classes (ReaL, and images with many labels): a prediction is
correct if it equals any of them. An image without labels is skipped, as in ReaL; an image of weight
0 (padding of a short last batch) does not count. Everything adds up over batches and ranks.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from vit_ray.evaluation.examples import MAX_LABELS, SIDE, picture, square

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]

# File names and numbers of images: the first samples of the set, and the wrong predictions with the
# highest loss.
KINDS: Final = {"examples": 12, "errors": 6}
# An image that is kept; those with the lowest keys are. Labels are padded with -1.
_IMAGE: Final = np.dtype(
    [
        ("key", np.float64),
        ("sample", np.int64),
        ("predicted", np.int64),
        ("probability", np.float64),
        ("loss", np.float64),
        ("labels", np.int32, MAX_LABELS),
        ("pixels", np.uint8, (SIDE, SIDE, 3)),
    ]
)


@dataclass(frozen=True)
class AccuracySums:
    """Weighted sums over images; `AccuracySums()` is the empty sum.

    Attributes:
        top1: weight of images whose best-scored class is correct.
        top5: weight of images with a correct class among the five best-scored.
        loss: sum of weight x loss.
        images: weight of the images that counted.
    """

    top1: float = 0.0
    top5: float = 0.0
    loss: float = 0.0
    images: float = 0.0

    @classmethod
    def of_batch(
        cls,
        logits: torch.Tensor,
        labels: torch.Tensor,
        losses: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> "AccuracySums":
        """Sums of one batch.

        Args:
            logits: (B, K), any float type.
            labels: int (B,), or (B, L) padded with -1.
            losses: (B,).
            weights: (B,); all 1 by default.
        """
        answers_bl = labels.reshape(len(logits), -1)
        has_label_b = (answers_bl >= 0).any(dim=1).double()
        weights_b = has_label_b if weights is None else has_label_b * weights.double()
        best_bk = logits.float().topk(min(5, logits.shape[1]), dim=1).indices
        # Padding is -1, which equals no class index.
        right_bk = (best_bk[:, :, None] == answers_bl[:, None, :]).any(dim=2)
        # where, not a product: the loss of a skipped image may be nan, and 0 x nan is nan.
        losses_b = torch.where(weights_b > 0, losses.double(), 0.0)
        sums = (
            (right_bk[:, 0] * weights_b).sum(),
            (right_bk.any(dim=1) * weights_b).sum(),
            (losses_b * weights_b).sum(),
            weights_b.sum(),
        )
        return cls(*torch.stack(sums).tolist())

    def __add__(self, other: "AccuracySums") -> "AccuracySums":
        return AccuracySums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def means(self) -> dict[str, float]:
        """`top1`, `top5` (both in [0, 1]) and `loss` per image.

        Raises:
            ValueError: no image counted.
        """
        if self.images == 0:
            raise ValueError(
                "no evaluation image has a label; set data.eval to a set with labelled images"
            )
        return {name: getattr(self, name) / self.images for name in ("top1", "top5", "loss")}


class Confusion:
    """Counts of images by (class, predicted class).

    Only pairs that occur are stored: for 21,843 classes a table would have 477 million cells.
    """

    def __init__(self) -> None:
        self._counts = Counter[tuple[int, int]]()

    def add_batch(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
        """Count the best-scored class of each image.

        An image with several labels counts for the predicted class if that is correct, else for
        the first label.

        Args:
            logits: (B, K).
            labels: int (B, L), padded with -1; an image without labels is skipped.
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
        """Replace this rank's counts by all ranks' counts, in the form of `pairs`."""
        self._counts.clear()
        for truth, predicted, count in pairs.tolist():
            self._counts[truth, predicted] += count

    def pairs(self) -> Int64Array:
        """(n, 3): class, predicted class and number of images, each pair once, sorted."""
        rows = [(*pair, count) for pair, count in sorted(self._counts.items())]
        return np.array(rows, np.int64).reshape(-1, 3)

    def accuracies(self, num_classes: int) -> Float64Array:
        """Top-1 accuracy of each class (K,); nan for a class without images."""
        truth, predicted, counts = self.pairs().T
        images = np.bincount(truth, counts, num_classes)
        right = np.bincount(truth, counts * (truth == predicted), num_classes)
        return np.divide(right, images, out=np.full(num_classes, np.nan), where=images > 0)

    def files(self, classes: Sequence[str]) -> dict[str, bytes]:
        """The table of pairs as CSV, by file name."""
        names = np.array([*classes], object)  # a str array would be as wide as the longest name
        pairs = pd.DataFrame(self.pairs(), columns=["class", "predicted", "images"])
        for column in ("class", "predicted"):
            pairs[column] = names[pairs[column]]  # IndexError for a class without a name
        return {"confusion.csv": pairs.to_csv(index=False).encode()}


class ExampleImages:
    """For each of `KINDS`, this rank's images with the lowest sort keys.

    Args:
        is_sigmoid: probabilities are by sigmoid, not by softmax.
    """

    def __init__(self, *, is_sigmoid: bool = False) -> None:
        self._is_sigmoid = is_sigmoid
        self._images: dict[str, NDArray[Any]] = dict.fromkeys(KINDS, np.empty(0, _IMAGE))

    def add_batch(
        self,
        images: torch.Tensor,
        samples: Int64Array,
        logits: torch.Tensor,
        labels: torch.Tensor,
        losses: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Keep a batch's images whose keys are low enough.

        Args:
            images: uint8 (B, H, W, 3).
            samples: (B,).
            logits: (B, K).
            labels: int (B, L), padded with -1; an image without labels is skipped.
            losses: (B,).
            weights: (B,), 0 for padding.
        """
        scores = logits.double().sigmoid() if self._is_sigmoid else logits.double().softmax(dim=1)
        predicted = logits.argmax(dim=1)
        probability = scores.gather(1, predicted[:, None])[:, 0]
        is_wrong = (labels != predicted[:, None]).all(dim=1)
        counted = (weights > 0) & (labels >= 0).any(dim=1)
        columns = torch.stack([predicted, probability, losses, is_wrong, counted], dim=1)
        facts = np.nan_to_num(np.column_stack([samples, columns.cpu().numpy()]))
        _, _, _, loss, wrong, counts = facts.T
        answers = np.full((len(facts), MAX_LABELS), -1, np.int32)
        answers[:, : labels.shape[1]] = labels[:, :MAX_LABELS].cpu().numpy()
        keys_by_kind = {
            "examples": np.where(counts > 0, samples, np.inf),
            "errors": np.where((counts > 0) & (wrong > 0), -loss, np.inf),
        }
        for kind, keys in keys_by_kind.items():
            lowest, limit = self._images[kind], KINDS[kind]
            highest_key = lowest["key"][-1] if len(lowest) == limit else np.inf
            new = [
                (keys[i], *facts[i, :4], answers[i], square(images[i].cpu().numpy()))
                for i in np.argsort(keys, kind="stable")[:limit]
                if keys[i] < highest_key
            ]
            self._images[kind] = _lowest(np.append(lowest, np.array(new, _IMAGE)), limit)

    def files(
        self, classes: Sequence[str], gather: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> dict[str, bytes]:
        """Pictures of all ranks' images with the lowest keys, and facts about them, by file name.

        Args:
            classes: names of the model's classes.
            gather: returns the rows of all ranks, on every rank.
        """
        files: dict[str, bytes] = {}
        for kind, limit in KINDS.items():
            lowest = self._images[kind]
            keys = np.sort(gather(lowest["key"]))[:limit]
            lowest = lowest[lowest["key"] <= keys.max(initial=-np.inf)]
            as_bytes = lowest.view(np.uint8).reshape(len(lowest), _IMAGE.itemsize)
            best = _lowest(gather(as_bytes).view(_IMAGE)[:, 0], limit)
            facts = [
                {
                    "sample": int(image["sample"]),
                    "classes": [classes[label] for label in image["labels"] if label >= 0],
                    "predicted": classes[image["predicted"]],
                    "probability": float(image["probability"]),
                    "loss": float(image["loss"]),
                }
                for image in best
            ]
            files |= picture(kind, list(best["pixels"]), facts)
        return files


def _lowest(images: NDArray[Any], limit: int) -> NDArray[Any]:
    return images[np.argsort(images["key"], kind="stable")][:limit]
