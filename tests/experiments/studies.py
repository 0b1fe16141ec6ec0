"""Small studies, and what stands for their trainings and their record."""

from types import SimpleNamespace
from typing import Any

from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict

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
            "train": train,
            "eval": test,
            "augment": {"kind": "resize", "flip": False},
            "eval_augment": {"kind": "resize"},
        },
        "optim": {"learning_rate": 1e-3},
        "train": {"global_batch_size": 64, "micro_batch_size": 64, "precision": "fp32"}
        | {"log_every_steps": 1},
        "evaluate": {"few_shot_train": train, "few_shot_test": test, "shots": [1, 5]},
        "checkpoint": {"every_steps": 10},
        "workers": {"use_gpu": False, "max_failures": 0},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db", "system_metrics": False},
        "study": {"models": models, "data_fractions": [1.0], "epochs": [1.0], **study},
    }


def study_recipe(*arguments: Any, **study: Any) -> Recipe:
    """Of `study_tree`."""
    return recipe_from_dict(study_tree(*arguments, **study), "test")


class Calls:
    """Stands for record and control of a run: every method notes its call."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self.made.append((method, *args))

    def kinds(self) -> list[str]:
        """Of the events, in turn."""
        return [args[0] for method, *args in self.made if method == "event"]


class Parent:
    """An open study without Ray or MLflow."""

    run_id = None

    def __init__(self) -> None:
        self.calls = Calls()
        self.run: Any = self
        self.record: Any = self.calls
        self.control: Any = self.calls
        self.calls.stop_reason = lambda: self.stop
        self.for_children: Any = self
        self.stop: str | None = None
        self.first: str | None = None
        """Cell for which workers were started beforehand."""

    def start_workers(self, first: Any) -> None:
        self.first = first and first.name


def trained(is_complete: bool = True, **metrics: float) -> Any:
    """What a training gives."""
    return SimpleNamespace(
        is_complete=is_complete, metrics=metrics, run_id=None, already_complete=False
    )


def resolved(steps: int = 10) -> Any:
    """What a cell's recipe makes of its data."""
    return SimpleNamespace(
        total_steps=steps, manifest=SimpleNamespace(num_classes=10), num_images=640
    )
