"""Curves of metrics: recorded points, few enough to draw, however long the histories are."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from mlflow.tracking import MlflowClient

T = TypeVar("T")
Curve = list[tuple[float, float]]
"""Steps, ascending and each once, and finite values."""

CONNECTIONS: Final = 4
"""Histories that are read at a time."""


def curves(client: MlflowClient, run_ids: Sequence[str], key: str, most: int) -> dict[str, Curve]:
    """Run id to its curve, for each run that has one: at most this many points, at least two.

    For a longer history these are the first, the last, and others spread evenly between them. Of
    several points of a step the latest counts.
    """

    def read(run_id: str) -> Curve:
        history = client.get_metric_history(run_id, key)
        ordered = sorted((one.step, one.timestamp, one.value) for one in history)
        latest = {float(step): float(value) for step, _, value in ordered}
        return [point for point in spread([*latest.items()], most) if is_finite(point[1])]

    with ThreadPoolExecutor(CONNECTIONS) as readers:
        found = dict(zip(run_ids, readers.map(read, run_ids), strict=True))
    return {run_id: curve for run_id, curve in found.items() if curve}


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most this many of them, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


def is_finite(value: float) -> bool:
    """Whether a recorded value is a number; an SQL store keeps infinity as the largest float."""
    return abs(value) < sys.float_info.max
