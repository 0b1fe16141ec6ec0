"""The file in which a long run keeps its loss curve: few points, for pages to draw.

MLflow's server reads every point of a history to sample some: 1 s for 100,000 points. The file is a
JSON array of pairs of step and loss, exact recorded values, in order. Its tag has the last step: a
run that has recorded later steps since then keeps no valid curve until its next end.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from vit_ray.metric_names import TRAIN_LOSS

T = TypeVar("T")

KEY: Final = TRAIN_LOSS
"""No other curve of a page is that long: the others have one point an evaluation."""
FILE: Final = "train_loss.json"
TAG: Final = "vit_ray.train_loss_ends"
"""Tag with the last step of the file, set after the file is stored."""
MAX_POINTS: Final = 300
"""Most points of a curve on a page, and in the file."""
LONG: Final = 3_000
"""Points of the longest history without a file. A server sends a file in half the time in which it
samples so many (35 and 70 ms a run, 2 loaded cores, 2026-11-27)."""


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most this many of them, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


def text_of(losses: Mapping[int, float]) -> str:
    """The file of a history, given as finite losses by step."""
    return json.dumps(spread(sorted(losses.items()), MAX_POINTS), separators=(",", ":"))


def curve_in(content: bytes) -> list[tuple[float, float]]:
    """Steps, ascending, and losses in a file; empty if it is not one."""
    try:
        points = [(float(step), float(loss)) for step, loss in json.loads(content)]
    except (ValueError, TypeError, OverflowError, RecursionError):
        return []
    is_valid = points == sorted(points) and all(math.isfinite(x) for pair in points for x in pair)
    return points if is_valid else []
