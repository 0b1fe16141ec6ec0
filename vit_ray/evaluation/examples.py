"""Images that are kept for display: a few of an evaluation, and its worst errors.

They are one picture, a row of squares with captions, and facts about each of them as JSON:
`sample`, its number; `classes`, of its labels; `predicted`, the `probability` of that class, and
`loss`, null without a prediction.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from vit_ray.evaluation.contact_sheet import SIDE, UInt8Array, square, strip

Float64Array = NDArray[np.float64]

KINDS: Final = {"examples": 12, "errors": 6}
"""File names and most images: the first of the set by number, and the wrong predictions with the
highest loss."""
TRAINING: Final = "training"
"""File name for crops as training gets them."""
NUM_TRAINING: Final = 24
MOST_LABELS: Final = 8
"""Labels shown for an image."""
_PIXELS: Final = SIDE * SIDE * 3
_ROW: Final = _PIXELS + 5 + MOST_LABELS
"""Numbers for one image: pixels, 1, sample, predicted, its probability, loss, labels + 1."""


class ExampleImages:
    """The candidates among one rank's images, then those of all ranks."""

    def __init__(self, *, is_sigmoid: bool = False) -> None:
        """
        Args:
            is_sigmoid: probabilities are by sigmoid, not by softmax.
        """
        self._is_sigmoid = is_sigmoid
        self._held: dict[str, list[tuple[float, Float64Array]]] = {kind: [] for kind in KINDS}

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
        predicted = logits.argmax(dim=1)
        is_wrong = (labels != predicted[:, None]).all(dim=1)
        counted = (weights > 0) & (labels >= 0).any(dim=1)
        facts = torch.stack(
            [predicted.double(), losses.double(), is_wrong.double(), counted.double()]
        )
        of_class, loss, wrong, counts = facts.cpu().numpy()

        def row(index: int) -> Float64Array:
            known = [one + 1 for one in labels[index].tolist() if one >= 0][:MOST_LABELS]
            known += [0] * (MOST_LABELS - len(known))
            pixels = square(images[index].cpu().numpy()).reshape(-1)
            scores = logits[index].float()
            shares = scores.sigmoid() if self._is_sigmoid else scores.softmax(0)
            best = [of_class[index], float(shares[int(of_class[index])])]
            numbers = [1, samples[index], *np.nan_to_num([*best, loss[index]]), *known]
            return np.concatenate([pixels, numbers])

        unwanted: Float64Array = np.where(counts > 0, 0.0, np.inf)
        self._keep("examples", samples.astype(np.float64) + unwanted, row)
        unwanted[wrong == 0] = np.inf
        self._keep("errors", unwanted - np.nan_to_num(loss), row)

    def _keep(self, kind: str, keys: Float64Array, row: Callable[[int], Float64Array]) -> None:
        """Those with the lowest keys; infinite keys do not count."""
        held, most = self._held[kind], KINDS[kind]
        for index in np.argsort(keys, kind="stable")[:most]:
            key = float(keys[index])
            if key < (held[-1][0] if len(held) == most else math.inf):
                held.append((key, row(int(index))))
                held.sort(key=lambda pair: pair[0])
                del held[most:]

    def candidates(self, rank: int) -> Float64Array:
        """(n, 4): number of the kind, key, rank, and index among the rank's own."""
        rows = [
            (number, key, rank, place)
            for number, held in enumerate(self._held.values())
            for place, (key, _) in enumerate(held)
        ]
        return np.array(rows, np.float64).reshape(-1, 4)

    def chosen(self, candidates: Float64Array, rank: int) -> Float64Array:
        """Rows of the images that are the best of all ranks' candidates; 0 if another rank has
        them.

        So the sum over ranks has all of them.
        """
        places = dict.fromkeys(KINDS, 0)
        rows = np.zeros((sum(KINDS.values()), _ROW))
        starts = dict(zip(KINDS, np.cumsum([0, *KINDS.values()]).tolist(), strict=False))
        for number, _, owner, place in candidates[np.lexsort(candidates.T[::-1])]:
            kind = [*KINDS][int(number)]
            if places[kind] < KINDS[kind]:
                if owner == rank:
                    rows[starts[kind] + places[kind]] = self._held[kind][int(place)][1]
                places[kind] += 1
        return rows


def example_files(rows: Float64Array, classes: Sequence[str]) -> dict[str, bytes]:
    """Pictures and facts about them, by file name.

    Args:
        rows: the sum over ranks of what `ExampleImages.chosen` returns.
        classes: names of the model's classes.
    """
    files: dict[str, bytes] = {}
    first = 0
    for kind, most in KINDS.items():
        some = [row for row in rows[first : first + most] if row[_PIXELS] > 0]
        first += most
        squares = [row[:_PIXELS].astype(np.uint8).reshape(SIDE, SIDE, 3) for row in some]
        about = []
        for row in some:
            _, sample, predicted, probability, loss, *labels = row[_PIXELS:]
            about.append({
                "sample": int(sample),
                "classes": [classes[int(one) - 1] for one in labels if one],
                "predicted": classes[int(predicted)],
                "probability": float(probability),
                "loss": float(loss),
            })  # fmt: skip
        files |= picture(kind, squares, about)
    return files


def training_files(
    images: UInt8Array, samples: Sequence[int], labels: NDArray[np.int32], classes: Sequence[str]
) -> dict[str, bytes]:
    """Crops of training images (B, H, W, 3), as `example_files`."""
    about = [
        {"sample": int(sample), "classes": [classes[one] for one in mine[:MOST_LABELS] if one >= 0]}
        for sample, mine in zip(samples, labels.tolist(), strict=True)
    ]
    return picture(TRAINING, [square(image) for image in images], about)


def picture(
    name: str, squares: Sequence[UInt8Array], about: Sequence[dict[str, object]]
) -> dict[str, bytes]:
    """The row of squares as JPEG and facts about each as JSON; nothing if there are no images."""
    if not squares:
        return {}
    nothing = {"predicted": None, "probability": None, "loss": None}
    facts: list[dict[str, Any]] = [{**nothing, **one} for one in about]
    captions = []
    for one in facts:
        lines = [f"true: {', '.join(one['classes']) or 'no label'}"]
        if one["predicted"] is not None:
            lines += [f"pred.: {one['predicted']}", f"{one['probability']:.1%}"]
        captions.append(lines)
    row = strip(squares, captions)
    return {f"{name}.jpg": row, f"{name}.json": json.dumps(facts, indent=1).encode()}
