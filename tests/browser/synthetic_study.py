"""A study with gaps, as its cells would record it, and its page: what browsers are tested on."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from vit_ray.report.page import write_report
from vit_ray.tracking.mlflow_client import open_client

MODELS = {  # forward GMACs
    "ViT-Ti/16": 1.25, "ViT-S/16": 4.6, "ViT-B/16": 17.6, "R50x1": 4.1, "R101x1": 7.8,
    "R50x1+ViT-B/32": 8.5, "R50x1+ViT-B/16": 21.5,
}  # fmt: skip
STARTED_MS = 1_763_000_000_000
STEPS = range(0, 2000, 20)


def write_study(folder: Path) -> Path:
    """The store of a study and the page of it; returns the page."""
    uri = f"sqlite:///{folder}/mlflow.db"
    client = open_client(uri)
    place = f"file://{folder}/artifacts"
    experiment = client.create_experiment("synthetic", artifact_location=place)
    study = _run(client, experiment, "synthetic-study", {"vit_ray.kind": "study"}, {}, [])
    for model, gmacs in MODELS.items():
        for fraction in (0.1, 0.3, 1.0):
            _cell(client, experiment, study, model, gmacs, fraction)
    failed = {"vit_ray.kind": "study_cell", "mlflow.parentRunId": study}
    _run(client, experiment, "synthetic-study-R200x3", failed, {}, [], status="FAILED")
    for rate in (0.001, 0.003, 0.01, 0.03):
        tags = {"vit_ray.kind": "sweep_trial", "vit_ray.sweep_stage": "sweep_trial"}
        tags["mlflow.parentRunId"] = study
        accuracy = 0.9 - 0.1 * abs(math.log10(rate / 0.01))
        params = {"optim.learning_rate": str(rate), "seed": "0", "model.name": "ViT-B/16"}
        metrics = [Metric("dev/top1", accuracy, STARTED_MS, 100)]
        _run(client, experiment, f"synthetic-sweep-lr{rate}", tags, params, metrics)
    return write_report(uri, study, folder / "report.html").page


def _cell(
    client: MlflowClient, experiment: str, study: str, model: str, gmacs: float, fraction: float
) -> None:
    images = 1e6 * fraction
    compute = 6e-9 * gmacs * images * 7
    quality = math.log10(1 + compute * 1e3) / 4
    values = {
        "study/exaflops": compute,
        "study/forward_gmacs": gmacs,
        "study/train_images": images,
        "study/images_seen": 7 * images,
        "few_shot/5_shot_top1": 0.3 + 0.5 * quality,
        "eval/top1": 0.4 + 0.5 * quality,
        "train/images_per_s": 4000 / gmacs,
        "perf/mfu": 0.3 + 0.05 * quality,
        "cost/core_days": compute / 40,
        "transfer/cifar10_top1": 0.6 + 0.35 * quality,
        "transfer/pets_top1": 0.5 + 0.3 * quality,
    }
    points = [Metric(key, value, STARTED_MS, STEPS[-1]) for key, value in values.items()]
    points += [
        Metric("train/loss", 2.3 / (1 + step * quality / 100), STARTED_MS, step) for step in STEPS
    ]
    tags = {
        "vit_ray.kind": "study_cell",
        "vit_ray.study_label": model,
        "vit_ray.git_commit": "0123abc",
        "vit_ray.events.worker_failed": "1",
        "mlflow.parentRunId": study,
        "data.train": "data/faces/train",
    }
    params = {"model.name": model, "data.fraction": str(fraction), "optim.epochs": "7.0"}
    params |= {"optim.learning_rate": "0.001", "optim.name": "adamw", "seed": "0"}
    run = _run(client, experiment, f"synthetic-{model}-data{fraction}", tags, params, points)
    event = '[{"kind": "worker failed", "text": "node lost", "step": 40, "time_s": 1763000100.0}]'
    client.log_text(run, event, "history/1.json")


def _run(
    client: MlflowClient,
    experiment: str,
    name: str,
    tags: dict[str, str],
    params: dict[str, str],
    metrics: list[Metric],
    status: str = "FINISHED",
) -> str:
    run_id = str(client.create_run(experiment, STARTED_MS, run_name=name).info.run_id)
    client.log_batch(
        run_id,
        metrics,
        [Param(*pair) for pair in params.items()],
        [RunTag(*pair) for pair in tags.items()],
    )
    client.set_terminated(run_id, status)
    return run_id


if __name__ == "__main__":
    print(write_study(Path(sys.argv[1]).resolve()))
