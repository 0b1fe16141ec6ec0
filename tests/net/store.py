"""What an MLflow store holds, without what differs from one day or machine to the next."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from vit_ray.config.recorded_recipe import tags_of

# Measured times and all that follows from them: listed by name.
TIMED = re.compile(
    r"^(perf|startup|system|cost)/|(_s|_ms|_per_s|_ms_max|_ms_median|wait_fraction|goodput)$"
)
# Of the machine, the day or the versions: listed by name.
TAGS = {
    "mlflow.source.git.commit", "mlflow.user", "vit_ray.driver", "vit_ray.git_commit",
    "vit_ray.ray_version", "vit_ray.spool",
}  # fmt: skip


def plain(text: str, places: dict[str, str]) -> str:
    """A text without paths, ids, addresses, processes and times."""
    for place, name in places.items():
        text = text.replace(place, name)
    for pattern, name in {
        r"\b[0-9a-f]{24,}\b": "ID",
        r"\b\d{8}T\d{6}(\.\d+-[0-9a-f]{16})?\b": "DAY",
        r"\b\d+\.\d+\.\d+\.\d+(:\d+)?\b": "ADDRESS",
        r"(?i)\b(pid)[= ]\d+": r"\1 #",
        r"\d+\.\d+( m?s\b| GiB| MiB)": r"#\1",
        r"\b\d+ (seconds|s)\b": r"# \1",
    }.items():
        text = re.sub(pattern, name, text)
    return text


def dump(uri: str, places: dict[str, str]) -> dict[str, Any]:
    """Every run by experiment and name; `places`: text in values -> what is recorded for it."""
    client = MlflowClient(uri)
    experiments = client.search_experiments()
    runs = [run for one in experiments for run in client.search_runs([one.experiment_id])]
    names = {one.experiment_id: one.name for one in experiments}
    places = {**places, **{run.info.run_id: f"run {run.info.run_name}" for run in runs}}
    found: dict[str, Any] = {}
    for run in sorted(runs, key=lambda one: one.info.start_time):
        name = f"{names[run.info.experiment_id]}/{run.info.run_name}"
        while name in found:
            name += " again"
        found[name] = _run(client, run, places)
    return found


def _run(client: MlflowClient, run: Run, places: dict[str, str]) -> dict[str, Any]:
    files = _files(client, run.info.run_id)
    return {
        "status": run.info.status,
        "parameters": {key: plain(value, places) for key, value in run.data.params.items()},
        "tags": {
            key: "-" if TAGS & {key, key.removeprefix("mlflow.")} else plain(value, places)
            for key, value in tags_of(run.data.tags).items()
        },
        "metrics": {key: _points(client, run.info.run_id, key) for key in run.data.metrics},
        "inputs": {
            one.dataset.name + " " + one.tags[0].value: [one.dataset.digest, one.dataset.profile]
            for one in run.inputs.dataset_inputs
        },
        "models": len(run.outputs.model_outputs) if run.outputs else 0,
        "files": sorted({plain(path, places) for path in files}),
        "events": [
            [
                event["kind"],
                event["step"],
                # Which worker notices first that another one died is chance.
                "-" if event["kind"] == "worker failed" else plain(event["text"], places),
            ]
            for path in sorted(files)
            if path.startswith("history/")
            for event in json.loads(_content(client, run.info.run_id, path))
        ],
    }


def _points(client: MlflowClient, run_id: str, key: str) -> Any:
    if TIMED.search(key):
        return "-"
    points = client.get_metric_history(run_id, key)
    return sorted([point.step, float(point.value).hex()] for point in points)


def _files(client: MlflowClient, run_id: str, folder: str | None = None) -> list[str]:
    found = []
    for one in client.list_artifacts(run_id, folder):
        found += _files(client, run_id, one.path) if one.is_dir else [one.path]
    return found


def _content(client: MlflowClient, run_id: str, path: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return Path(client.download_artifacts(run_id, path, folder)).read_text()
