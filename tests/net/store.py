"""What an MLflow store holds of runs, without measured times."""

import re
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

TIMED = re.compile(
    r"^(perf|startup|system|cost|run)/|(_s|_ms|_min|_per_s|_ms_max|_ms_median|wait_fraction)$"
)


def runs_of(folder: Path, name: str = "") -> list[Run]:
    """Of `folder/mlflow.db`, or those of a name, oldest first."""
    client = _client(folder)
    experiments = [one.experiment_id for one in client.search_experiments()]
    found = sorted(client.search_runs(experiments), key=lambda run: run.info.start_time)
    return [run for run in found if name in ("", run.info.run_name)]


def curves(folder: Path, run: Run) -> dict[str, list[str]]:
    """`step value` of each point by metric, as often as MLflow has it, in the order of steps."""
    keys = [key for key in sorted(run.data.metrics) if not TIMED.search(key)]
    found = {key: points(folder, run, key) for key in keys}
    return {key: [f"{step} {value.hex()}" for step, value in found[key]] for key in keys}


def values(folder: Path, name: str, key: str) -> list[float]:
    """Of a metric of the only run of this name, in the order of steps."""
    return [value for _, value in points(folder, *runs_of(folder, name), key)]


def points(folder: Path, run: Run, key: str) -> list[tuple[int, float]]:
    """Step and value of each point of a metric, in the order of steps."""
    history = _client(folder).get_metric_history(run.info.run_id, key)
    return sorted((point.step, float(point.value)) for point in history)


def _client(folder: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{folder}/mlflow.db")
