"""Bringing into MLflow what a run recorded while MLflow was away."""

from __future__ import annotations

import argparse
from pathlib import Path

from vit_ray.tracking.tracker import replay


def run_replay() -> None:
    """The command: a run's log, and where to bring it."""
    parser = argparse.ArgumentParser(
        description="Bring what a run recorded while MLflow was away into MLflow. "
        "Points that MLflow already has are not sent again."
    )
    parser.add_argument("log", type=Path, help="the run's metrics.jsonl")
    parser.add_argument("uri", help="tracking server, or sqlite:///mlflow.db")
    arguments = parser.parse_args()
    try:
        print(f"{replay(arguments.log, arguments.uri)} points were new")
    except ValueError as error:
        parser.error(str(error))
