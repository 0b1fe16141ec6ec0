"""Sending to MLflow what a run recorded while MLflow was away."""

import re
import sys
from pathlib import Path

from vit_ray.tracking.tracker import replay


def run_replay(log: Path, uri: str) -> int:
    """Send a run's log to a tracking server; returns 1 if not everything was sent.

    Raises:
        ValueError: there is no such log, or the address cannot be replayed to.
    """
    is_none = "://" not in uri and uri not in ("databricks", "uc")
    if is_none or re.fullmatch(r"sqlite:/*(:memory:)?", uri):  # memory ends with the replay
        raise ValueError(
            f"URI {uri!r} is not an address; give sqlite:///mlflow.db or http://HOST:PORT"
        )
    if log.is_dir():
        raise ValueError(f"log {str(log)!r} is a folder; give a metrics.jsonl file in it")
    done = replay(log, uri)
    print(f"{done.num_points} points were new")
    for refused in done.refused:
        print(f"not sent: {refused}", file=sys.stderr)
    return 1 if done.refused else 0
