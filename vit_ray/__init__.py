"""Vision Transformers at scale on Ray: stream, train, sweep, study and report.

The Python interface: recipes, models, weights, data sets, and whole trainings.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit_ray.config import Recipe, load_recipe
    from vit_ray.evaluation.few_shot import few_shot_accuracy
    from vit_ray.experiments.sweep import SweepResult, run_sweep
    from vit_ray.launch.dataset import open_dataset, training_batches
    from vit_ray.launch.run import RunResult, evaluate, finetune, train
    from vit_ray.launch.trained_model import TrainedModel, load
    from vit_ray.models import build_model, model_names
    from vit_ray.models.flops import forward_macs, training_exaflops
    from vit_ray.models.weights import load_weights, save_weights
    from vit_ray.own_parts import trust_modules

__all__ = [
    "Recipe",
    "RunResult",
    "SweepResult",
    "TrainedModel",
    "build_model",
    "evaluate",
    "few_shot_accuracy",
    "finetune",
    "forward_macs",
    "load",
    "load_recipe",
    "load_weights",
    "model_names",
    "open_dataset",
    "run_sweep",
    "save_weights",
    "train",
    "training_batches",
    "training_exaflops",
    "trust_modules",
]

# Before MLflow is imported: information about a training must only go to the user's server.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# Before Ray is imported: under `uv run`, Ray would start every worker with another `uv run`, in an
# environment without Ray, again and again. Workers have the driver's environment.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Also before Ray is imported (a notebook may have done so already): Ray warns of many small actors,
# which are no fault, with any `log_to_driver` (#63800).
if os.environ.get("VIT_RAY_LOGS") != "1":
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "worker processes have been started")

__version__ = "0.1.0"

# Imported on first use: torch, Ray and MLflow take seconds.
MODULES = {
    "Recipe": "vit_ray.config",
    "RunResult": "vit_ray.launch.run",
    "SweepResult": "vit_ray.experiments.sweep",
    "TrainedModel": "vit_ray.launch.trained_model",
    "build_model": "vit_ray.models",
    "evaluate": "vit_ray.launch.run",
    "few_shot_accuracy": "vit_ray.evaluation.few_shot",
    "finetune": "vit_ray.launch.run",
    "forward_macs": "vit_ray.models.flops",
    "load": "vit_ray.launch.trained_model",
    "load_recipe": "vit_ray.config",
    "load_weights": "vit_ray.models.weights",
    "model_names": "vit_ray.models",
    "open_dataset": "vit_ray.launch.dataset",
    "run_sweep": "vit_ray.experiments.sweep",
    "save_weights": "vit_ray.models.weights",
    "train": "vit_ray.launch.run",
    "training_batches": "vit_ray.launch.dataset",
    "training_exaflops": "vit_ray.models.flops",
    "trust_modules": "vit_ray.own_parts",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'vit_ray' has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
