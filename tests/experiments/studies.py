"""Small studies, and what stands for their trainings and their record."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments.study_cells import Cell
from vit_ray.launch.run import RunResult

SIZES = {"depth": 1, "width": 16, "mlp_dim": 32, "num_heads": 2, "patch_size": 4}


def study_row(label: str, rate: float | None = None, **changes: Any) -> dict[str, Any]:
    """A row of `study.models`: a tiny ViT."""
    size = {"name": "ViT", "image_size": 8, **SIZES, **changes}
    return {"label": label, "model": size, "learning_rate": rate}


def study_tree(
    folder: Any, models: Any, train: str = "data/train", test: str = "data/test", **study: Any
) -> dict[str, Any]:
    """A recipe of a study of these rows, as in YAML."""
    return {
        "name": "grid",
        "output": f"{folder}/runs",
        "data": {
            "train": train, "eval": test,
            "augment": {"kind": "resize", "flip": False}, "eval_augment": {"kind": "resize"},
        },
        "optim": {"learning_rate": 1e-3},
        "train": {"global_batch_size": 64, "micro_batch_size": 64, "precision": "fp32"}
        | {"log_every_steps": 1},
        "evaluate": {"few_shot_train": train, "few_shot_test": test, "shots": [1, 5]},
        "checkpoint": {"every_steps": 10},
        "workers": {"use_gpu": False, "max_failures": 0},
        "tracking": {
            "uri": f"sqlite:///{folder}/mlflow.db", "system_metrics": False, "log_model": False,
        },
        "study": {"models": models, "data_fractions": [1.0], "epochs": [1.0], **study},
    }  # fmt: skip


def study_recipe(*arguments: Any, **study: Any) -> Recipe:
    return recipe_from_dict(study_tree(*arguments, **study), "test")


def with_steps(cells: Iterable[Cell]) -> list[Cell]:
    """As a study makes them once their data are known: cells of `study.steps`."""
    return [replace(cell, steps=cell.recipe.optim.steps) for cell in cells]


def trained(is_complete: bool = True, **metrics: float) -> RunResult:
    return RunResult(None, "cell", int(is_complete), 1, metrics, "folder", is_complete)
