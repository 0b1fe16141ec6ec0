"""Images that are kept for display: a few of an evaluation, and its worst errors.

They are one picture, a row of squares with captions, and facts about each of them as JSON:
`sample`, its number; `classes`, of its labels; `predicted`, the `probability` of that class, and
`loss`, null without a prediction.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

KINDS: Final = {"examples": 12, "errors": 6}
"""File names and most images: the first of the set by number, and the wrong predictions with the
highest loss."""
TRAINING: Final = "training"
"""File name for crops as training gets them."""
NUM_TRAINING: Final = 24
MAX_LABELS: Final = 8
"""Labels shown for an image."""
_ROW: Final = 5 + MAX_LABELS + SIDE * SIDE * 3
"""Numbers for one image: its key, sample, predicted class, probability, loss, labels, pixels."""


class ExampleImages:
    """The best candidates among one rank's images: for each kind those with the lowest keys."""

    def __init__(self, *, is_sigmoid: bool = False) -> None:
        """`is_sigmoid`: probabilities are by sigmoid, not by softmax."""
        self._is_sigmoid = is_sigmoid
        self._rows: dict[str, Float64Array] = dict.fromkeys(KINDS, np.empty((0, _ROW)))

    def add_batch(
        self,
        images: torch.Tensor,
        samples: NDArray[np.int64],
        logits: torch.Tensor,
        labels: torch.Tensor,
        losses: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Look through a batch.

        Args:
            images: uint8 (B, H, W, 3).
            samples: (B,).
            logits: (B, K).
            labels: int (B, L), padded with -1; an image without any is skipped.
            losses: (B,).
            weights: (B,), 0 for padding.
        """
        scores = logits.double().sigmoid() if self._is_sigmoid else logits.double().softmax(dim=1)
        predicted = logits.argmax(dim=1)
        shares = scores.gather(1, predicted[:, None])[:, 0]
        is_wrong = (labels != predicted[:, None]).all(dim=1)
        counted = (weights > 0) & (labels >= 0).any(dim=1)
        facts = torch.stack([predicted, shares, losses, is_wrong, counted], dim=1).cpu().numpy()
        facts = np.nan_to_num(np.column_stack([samples, facts]))
        _, _, _, loss, wrong, counts = facts.T

        def rows(kind: str, keys: Float64Array) -> Float64Array:
            held, limit = self._rows[kind], KINDS[kind]
            highest = held[-1, 0] if len(held) == limit else np.inf
            found = [held]
            for i in np.argsort(keys, kind="stable")[:limit]:
                if keys[i] < highest:
                    known = [label for label in labels[i].tolist() if label >= 0][:MAX_LABELS]
                    padded = known + [-1] * (MAX_LABELS - len(known))
                    pixels = square(images[i].cpu().numpy()).ravel()
                    found.append(np.concatenate([[keys[i]], facts[i, :4], padded, pixels])[None])
            return _lowest(np.concatenate(found), limit)

        keys = {
            "examples": np.where(counts > 0, samples, np.inf),
            "errors": np.where((counts > 0) & (wrong > 0), -loss, np.inf),
        }
        self._rows = {kind: rows(kind, keys[kind]) for kind in KINDS}

    def files(
        self, classes: Sequence[str], gather: Callable[[Float64Array], Float64Array]
    ) -> dict[str, bytes]:
        """Pictures of the best of all ranks' images and facts about them, by file name.

        Args:
            classes: names of the model's classes.
            gather: returns the rows of all ranks, on every rank.
        """
        files: dict[str, bytes] = {}
        for kind, limit in KINDS.items():
            mine = self._rows[kind]
            keys = np.sort(gather(mine[:, 0]))[:limit]
            best = _lowest(gather(mine[mine[:, 0] <= keys.max(initial=-np.inf)]), limit)
            about = [
                {
                    "sample": int(sample),
                    "classes": [classes[int(label)] for label in labels if label >= 0],
                    "predicted": classes[int(predicted)],
                    "probability": probability,
                    "loss": loss,
                }
                for _, sample, predicted, probability, loss, *labels in (
                    best[:, : 5 + MAX_LABELS].tolist()
                )
            ]
            pixels = best[:, 5 + MAX_LABELS :].astype(np.uint8).reshape(-1, SIDE, SIDE, 3)
            files |= picture(kind, list(pixels), about)
        return files


def _lowest(rows: Float64Array, limit: int) -> Float64Array:
    """Rows with the lowest keys, which are in the first column, in their order."""
    return rows[np.argsort(rows[:, 0], kind="stable")][:limit]


def training_files(
    images: UInt8Array, samples: Sequence[int], labels: NDArray[np.int32], classes: Sequence[str]
) -> dict[str, bytes]:
    """Crops of training images (B, H, W, 3), as `ExampleImages.files`."""
    about = [
        {"sample": int(sample), "classes": [classes[one] for one in mine[:MAX_LABELS] if one >= 0]}
        for sample, mine in zip(samples, labels.tolist(), strict=True)
    ]
    return picture(TRAINING, list(images), about)


def picture(
    name: str, images: Sequence[UInt8Array], about: Sequence[dict[str, object]]
) -> dict[str, bytes]:
    """The row of squares as JPEG and facts about each as JSON; nothing if there are no images."""
    if not images:
        return {}
    nothing = {"predicted": None, "probability": None, "loss": None}
    facts: list[dict[str, Any]] = [{**nothing, **one} for one in about]
    captions = []
    for one in facts:
        lines = [f"true: {', '.join(one['classes']) or 'no label'}"]
        if one["predicted"] is not None:
            lines += [f"pred.: {one['predicted']}", f"{one['probability']:.1%}"]
        captions.append(lines)
    row = strip(images, captions)
    return {f"{name}.jpg": row, f"{name}.json": json.dumps(facts, indent=1).encode()}
