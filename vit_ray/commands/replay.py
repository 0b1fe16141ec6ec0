"""Bringing into MLflow what a run recorded while MLflow was away."""

from __future__ import annotations

import sys
from pathlib import Path

from vit_ray.tracking.tracker import replay


def run_replay(log: Path, uri: str) -> int:
    """Bring a run's log to a tracking server; 2 where there is no such log, 1 if not all went."""
    try:
        done = replay(log, uri)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(f"{done.num_points} points were new")
    for refused in done.refused:
        print(f"not sent: {refused}", file=sys.stderr)
    return 1 if done.refused else 0
