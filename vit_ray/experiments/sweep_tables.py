"""A sweep's trials as its own run keeps them."""

import math
from dataclasses import dataclass

from vit_ray.experiments.search_space import Point
from vit_ray.experiments.trials import Outcome
from vit_ray.launch.paper_comparison import Rows, csv_text


@dataclass(frozen=True)
class Row:
    """A trial or a retraining, and the point that it stands for."""

    point: Point
    outcome: Outcome


def trials_csv(rows: list[Row], chosen: Row) -> str:
    """A line for each trial: its point, its accuracies as shares, its state and its end."""
    keys = list(dict.fromkeys(key for row in rows for key in row.point))
    lines: Rows = []
    for row in rows:
        values, outcome = [row.point.get(key) for key in keys], row.outcome
        texts = [value if isinstance(value, (int, float, str)) else str(value) for value in values]
        lines.append({
            **dict(zip(keys, texts, strict=True)),
            "dev_top1": None if math.isnan(outcome.top1) else outcome.top1,
            "last_dev_top1": outcome.last_top1, "steps": outcome.step or None,
            "state": outcome.state, "chosen": "yes" if row is chosen else "",
            "checkpoint": outcome.checkpoint, "error": outcome.error,
        })  # fmt: skip
    return csv_text(lines)
