"""What an MLflow store holds of runs, without measured times."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

TIMED = re.compile(
    r"^(perf|startup|system|cost|run)/|(_s|_ms|_min|_per_s|_ms_max|_ms_median|wait_fraction)$"
)


def runs_of(folder: Path) -> list[Run]:
    """Of `folder/mlflow.db`, oldest first."""
    client = _client(folder)
    experiments = [one.experiment_id for one in client.search_experiments()]
    return sorted(client.search_runs(experiments), key=lambda run: run.info.start_time)


def curves(folder: Path, run: Run) -> dict[str, list[str]]:
    """`step value` of each point by metric, as often as MLflow has it, in the order of steps."""
    client = _client(folder)
    found = {}
    for key in sorted(run.data.metrics):
        if not TIMED.search(key):
            points = client.get_metric_history(run.info.run_id, key)
            exact = sorted((point.step, float(point.value).hex()) for point in points)
            found[key] = [f"{step} {value}" for step, value in exact]
    return found


def named(folder: Path, name: str) -> Any:
    """The curves of the only run of this name."""
    (run,) = [run for run in runs_of(folder) if run.info.run_name == name]
    return curves(folder, run)


def values(folder: Path, name: str, key: str) -> list[float]:
    """Of a metric of the only run of this name, in the order of steps."""
    (run,) = [run for run in runs_of(folder) if run.info.run_name == name]
    points = _client(folder).get_metric_history(run.info.run_id, key)
    return [point.value for point in sorted(points, key=lambda point: point.step)]


def _client(folder: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{folder}/mlflow.db")
