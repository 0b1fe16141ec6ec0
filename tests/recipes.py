"""Recipes for tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict

if TYPE_CHECKING:
    from tests.conftest import Digits

STEPS = 24
# Overrides for a model that is planned in a twelfth of the time of a ViT-B/16.
SMALL = (
    "model.name=ViT", "model.depth=1", "model.width=768", "model.mlp_dim=3072",
    "model.num_heads=12", "model.patch_size=16",
)  # fmt: skip


def recipe_with(name: str = "run", **sections: Any) -> Recipe:
    return recipe_from_dict({"name": name, **sections}, "test")


def small_recipe(name: str, digits: Digits, folder: Path, **sections: Any) -> Recipe:
    """Two workers, ZeRO 2, a tiny ViT, 24 steps with a checkpoint after each 8."""
    return recipe_with(
        name,
        output=str(folder / "runs"),
        model={
            "name": "ViT", "image_size": 16, "depth": 1, "width": 32, "mlp_dim": 64,
            "num_heads": 2, "patch_size": 4, "representation": True, "dropout": 0.05,
        },
        data={
            "train": digits.train, "eval": digits.test, "cpus_per_task": 0.5,
            "shuffle_window": 0,  # in this order so few steps learn something
            "augment": {"flip": False, "min_area": 0.5},
            "eval_augment": {"kind": "resize"},
        },
        optim={"steps": STEPS, "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2},
        train={
            "global_batch_size": 64, "micro_batch_size": 16, "zero_stage": 2,
            "precision": "fp32", "averaging": 0.9, "log_every_steps": 4,
        },
        checkpoint={"every_steps": 8, "keep_last": 10},
        evaluate={"batch_size": 50},
        workers={"num_workers": 2, "cpus_per_worker": 0.5},
        tracking={
            "uri": f"sqlite:///{folder / 'mlflow.db'}", "experiment": "tests",
            "system_metrics": False, "log_model": False,  # by a process of its own: seconds
        },
    ).with_changes(**sections)  # fmt: skip
