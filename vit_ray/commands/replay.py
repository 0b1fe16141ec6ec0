"""Bringing into MLflow what a run recorded while MLflow was away."""

from __future__ import annotations

import sys
from pathlib import Path

from vit_ray.tracking.tracker import replay


def run_replay(log: Path, uri: str) -> int:
    """Bring a run's log to a tracking server; 2 where there is no such log."""
    try:
        print(f"{replay(log, uri)} points were new")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
