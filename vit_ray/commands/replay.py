"""Sending to MLflow what a run recorded while MLflow was away."""

from __future__ import annotations

import sys
from pathlib import Path

from vit_ray.tracking.metrics_log import check_replay


def run_replay(log: Path, uri: str) -> int:
    """Send a run's log to a tracking server; returns 1 if not everything was sent.

    Raises:
        ValueError: there is no such log, or the address is wrong.
    """
    check_replay(log, uri)
    from vit_ray.tracking.tracker import replay  # imports MLflow, which takes seconds

    done = replay(log, uri)
    print(f"{done.num_points} points were new")
    for refused in done.refused:
        print(f"not sent: {refused}", file=sys.stderr)
    return 1 if done.refused else 0
