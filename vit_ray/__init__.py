"""Vision Transformers at scale on Ray: stream, train, sweep, study and report."""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit_ray.api import (
        Recipe,
        build_model,
        evaluate,
        few_shot_accuracy,
        finetune,
        forward_macs,
        load,
        load_recipe,
        load_weights,
        model_names,
        open_dataset,
        save_weights,
        train,
        training_batches,
        training_exaflops,
        trust_modules,
    )

__all__ = [
    "Recipe",
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
_MODULES = {
    "Recipe": "config",
    "build_model": "models",
    "evaluate": "launch.run",
    "few_shot_accuracy": "evaluation.few_shot",
    "finetune": "launch.run",
    "forward_macs": "models.flops",
    "load": "launch.trained_model",
    "load_recipe": "config",
    "load_weights": "models.weights",
    "model_names": "models",
    "open_dataset": "launch.dataset",
    "save_weights": "models.weights",
    "train": "launch.run",
    "training_batches": "launch.dataset",
    "training_exaflops": "models.flops",
    "trust_modules": "own_parts",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vit_ray' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vit_ray.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
