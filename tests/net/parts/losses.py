"""Losses of eight small trainings on two workers, bit by bit; of AdamW's under each ZeRO stage."""

from pathlib import Path
from typing import Any

import numpy as np

import vit_ray
from tests.net.cluster import ray_head
from tests.net.commands import must_run
from tests.net.sets import convert_digits, digest, write_recipe
from tests.net.store import values

STEPS = 6
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {"optim": {"weight_decay": 0.1, "schedule": "cosine"}},
    "sgd": {"optim": {"name": "sgd", "momentum": 0.9, "learning_rate": 0.03}},
    "dropout": {
        "model": {"dropout": 0.1, "stochastic_depth": 0.2},
        "train": {"activation_checkpointing": 1},
    },
    "mixup": {"train": {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}},
    "averaging": {"train": {"averaging": 0.9}},
    "hybrid-bf16": {
        "model": {"name": "R+ViT", "patch_size": None, "stages": [1, 1], "width_factor": 1},
        "train": {"precision": "bf16"},
    },
    "masked": {"train": {"loss": "masked_patch"}},
    "head-bias": {"model": {"head_bias": -4.0}, "train": {"loss": "sigmoid"}},
}
"""Sections of each recipe, over what all have."""
STAGES = {
    "adamw": (0, 1, 2, 3), "sgd": (1,), "dropout": (2,), "mixup": (0,), "averaging": (3,),
    "hybrid-bf16": (2,), "masked": (1,), "head-bias": (3,),
}  # fmt: skip


def record(folder: Path) -> dict[str, Any]:
    """By recipe and ZeRO stage: the loss of each step, and the logits of the end."""
    recipes = [_recipe(folder, kind, stage) for kind in KINDS for stage in STAGES[kind]]
    with ray_head() as own:
        convert_digits(folder, own)
        must_run(folder, [["pretrain", str(recipe)] for recipe in recipes], own)
    return {recipe.stem: _trained(folder, recipe.stem) for recipe in recipes}


def _recipe(folder: Path, kind: str, stage: int) -> Path:
    sections: dict[str, dict[str, Any]] = {
        "model": {"depth": 2, "image_size": 32, "patch_size": 8, "dropout": 0.0},
        "data": {"eval": None},
        "optim": {"steps": STEPS, "learning_rate": 3e-3, "weight_decay": 0.0},
        "train": {"zero_stage": stage, "averaging": 0.0, "log_every_steps": 1},
        "checkpoint": {"every_steps": None},
    }
    changed = {key: {**section, **KINDS[kind].get(key, {})} for key, section in sections.items()}
    return write_recipe(folder, f"{kind}-{stage}", **changed)


def _trained(folder: Path, name: str) -> dict[str, Any]:
    losses = [loss.hex() for loss in values(folder, name, "train/loss")]
    assert len(losses) == STEPS, f"{name}: {losses}"
    found: dict[str, Any] = {"losses": losses}
    if "masked" not in name:  # it has no head
        images = np.random.default_rng(1).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
        for averaged in {False, "averaging" in name}:
            model = vit_ray.load(f"{folder}/runs/{name}", averaged=averaged)
            logits = np.ascontiguousarray(model.logits(images))
            found["logits, averaged" if averaged else "logits"] = digest(logits.tobytes())
    return found
