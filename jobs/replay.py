"""Send metrics that MLflow missed: `python jobs/replay.py runs/NAME/metrics.jsonl URI`."""

import argparse
from pathlib import Path

from vit_ray.launch.tracking import replay

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Bring what a run recorded while MLflow was away into MLflow. "
        "Points that MLflow already has are not sent again."
    )
    parser.add_argument("spool", type=Path, help="the run's metrics.jsonl")
    parser.add_argument("uri", help="tracking server, or sqlite:///mlflow.db")
    arguments = parser.parse_args()
    try:
        print(f"{replay(arguments.spool, arguments.uri)} points were new")
    except ValueError as error:
        parser.error(str(error))
