"""A sweep in MLflow as the recorders of one write it, without a training: its points are made up.

`python -m tests.browser.synthetic_sweep FOLDER` writes FOLDER/mlflow.db.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vit_ray.commands.tracking_store import report
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.keys import used_sections
from vit_ray.config.loading import write_yaml
from vit_ray.experiments.search_space import RATE, trial_recipe
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.run_record import data_inputs, run_facts, trained_params, training_cost
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker, log_models, recorded_models

ACCURACIES = {0.003: 0.913, 0.01: 0.953, 0.03: 0.967, 0.1: 0.96}
"""Top-1 on the dev split by learning rate."""
STEPS = 100


def write_sweep(folder: Path) -> Recipe:
    """Record a sweep with trials, curves, costs, models and a report; returns its recipe."""
    recipe = load_recipe(
        "digits_sweep",
        [
            "init_from=runs/digits-vit",
            "data.train=data/digits/train",
            "data.eval=data/digits/test",
            f"output={folder}/runs",
            f"tracking.uri=sqlite:///{folder}/mlflow.db",
            "tracking.experiment=synthetic",
        ],
    )
    parent = _tracker(recipe, "sweep")
    assert parent.flush(60)
    for rate, accuracy in ACCURACIES.items():
        _record_trial(trial_recipe(recipe, {RATE: rate}), parent.log.path, accuracy)
    parent.log.text("recipe.yaml", write_yaml(recipe.written()))
    assert parent.finish("FINISHED")
    report(recipe)
    return recipe


def _record_trial(trial: Recipe, parent_log: Path, accuracy: float) -> None:
    tracker = _tracker(
        trial, "sweep_trial", measured_on="dev", awaited_metric="dev/top1", parent_log=parent_log
    )
    for step in range(10, STEPS + 1, 10):
        loss = 2.3 / (1 + step / 20) + (1 - accuracy)
        tracker.log.metrics(step, {"train/loss": loss, "train/images_per_s": 300.0})
    tracker.log.metrics(STEPS, {"eval/top1": accuracy, "eval/loss": 1.5 * (1 - accuracy)})
    tracker.log.metrics(STEPS, training_cost(_resolved(trial), STEPS))
    checkpoint = f"{trial.run_folder}/step-{STEPS:08d}"
    classes = [str(label) for label in range(10)]
    tracker.log.model(
        trial.name,
        STEPS,
        reference={**used_sections(trial.recorded()), "classes": classes},
        card="",
        params={"checkpoint": checkpoint},
        register_as=None,
    )
    assert tracker.finish("FINISHED")
    ((_, model),) = recorded_models(tracker.log.path)
    assert log_models(trial.tracking.uri, [model]) == [""]


def _tracker(recipe: Recipe, kind: str, **opening: Any) -> Tracker:
    return Tracker.begin(
        RunOpening(
            recipe.tracking.model_copy(update={"system_metrics": False}),
            recipe.name,
            Path(recipe.run_folder) / "metrics.jsonl",
            None,
            trained_params(recipe),
            run_facts(recipe, kind, _resolved(recipe), ClusterShape(1, 2, 0, 0.0), "vit-ray sweep"),
            datasets=data_inputs(_resolved(recipe)),
            **opening,
        )
    )


def _resolved(recipe: Recipe) -> Any:
    manifest = SimpleNamespace(
        path="data/digits/train", fingerprint="5" * 64, num_images=1497, num_classes=10, about={}
    )
    spec = SimpleNamespace(manifest=manifest, num_images=1467)
    return SimpleNamespace(
        recipe=recipe,
        manifest=manifest,
        num_images=1467,
        total_steps=STEPS,
        streams={"train": spec},
    )


if __name__ == "__main__":
    write_sweep(Path(sys.argv[1]).resolve())
