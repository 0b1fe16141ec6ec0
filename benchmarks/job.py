"""`jobs/convert.py` and `jobs/pretrain.py` as users run them, and the figures in MLflow."""

import subprocess
import sys
from pathlib import Path

from mlflow import MlflowClient

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "cifar10"
Curves = dict[str, dict[int, float]]
"""Values by metric and step, in the order of steps."""


def command(job: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "jobs" / f"{job}.py"), *arguments]


def convert(source: Path, destination: str) -> None:
    """Class folders to a data set."""
    places = [f"convert.source={source}", f"convert.destination={destination}"]
    subprocess.run(command("convert", RECIPE, *places), check=True, stdout=sys.stderr)


def pretrain(recipe: str, folder: str) -> Curves:
    """All metrics of a training.

    Raises:
        CalledProcessError: it failed.
    """
    store = f"sqlite:///{folder}/mlflow.db"
    places = [f"output={folder}/runs", f"tracking.uri={store}"]
    subprocess.run(command("pretrain", recipe, *places), check=True, stdout=sys.stderr)
    return curves(store)


def curves(uri: str) -> Curves:
    """Of the only run of a store."""
    client = MlflowClient(uri)
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    found = {}
    for key in run.data.metrics:
        points = client.get_metric_history(run.info.run_id, key)
        found[key] = dict(sorted((point.step, point.value) for point in points))
    return found
