"""Losses of six small recipes under each ZeRO stage on two gloo ranks, bit by bit."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from tests.train.engine_runs import PLAIN_LINEAR
from tests.train.golden_runs import fill_zero_kernels, images_of
from tests.train.ranks import run_ranks
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.train.engine.deepspeed_engine import DeepSpeedEngine
from vit_ray.train.objective import build_objective, make_loss
from vit_ray.train.optim.schedule import lr_at

RANKS, STEPS, BATCH, MICRO = 2, 6, 16, 4
VIT = {"depth": 2, "width": 24, "mlp_dim": 40, "num_heads": 2, "patch_size": 8}
# Sections `model`, `optim` and `train` of each recipe, laid over what all have.
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "ViT, AdamW": {"optim": {"weight_decay": 0.1, "warmup_steps": 2, "schedule": "cosine"}},
    "dropout and stochastic depth": {
        "model": {"dropout": 0.1, "stochastic_depth": 0.2, "representation": True},
        "train": {"activation_checkpointing": 1},
    },
    "MixUp and CutMix": {
        "train": {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1},
        "optim": {"layer_decay": 0.75},
    },
    "Adafactor": {"optim": {"name": "adafactor", "first_moment": "bf16"}},
    "averaging, SGD": {
        "optim": {"name": "sgd", "momentum": 0.9, "learning_rate": 0.03},
        "train": {"averaging": 0.9},
    },
    "hybrid, sigmoid, bf16": {
        "model": {"name": "R+ViT", "patch_size": None, "stages": [1, 1], "width_factor": 1},
        "train": {"loss": "sigmoid", "precision": "bf16"},
    },
}


def record() -> dict[str, Any]:
    """By recipe and stage."""
    (found, _) = run_ranks(RANKS, _all_losses)
    return dict(found)


def _all_losses(rank: int) -> dict[str, Any]:
    return {
        name: {f"ZeRO {stage}": _losses(rank, sections, stage) for stage in range(4)}
        for name, sections in RECIPES.items()
    }


def _losses(rank: int, sections: dict[str, dict[str, Any]], stage: int) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "model": {"name": "ViT", "image_size": 32, **VIT},
        "optim": {"name": "adamw", "learning_rate": 3e-3, "steps": STEPS, "clip_norm": 1.0},
        "train": {"global_batch_size": BATCH, "precision": "fp32", "zero_stage": stage},
    }
    merged = {key: {**section, **sections.get(key, {})} for key, section in base.items()}
    recipe = recipe_from_dict({"name": "net", **merged}, "net")
    torch.nn.functional.linear = PLAIN_LINEAR  # ZeRO 3 leaves another one in the process
    torch.manual_seed(0)
    model = build_objective(recipe, 10)
    fill_zero_kernels(model)
    engine = DeepSpeedEngine(
        model,
        recipe.train,
        recipe.optim,
        micro_batch_size=MICRO,
        accumulation_steps=BATCH // (MICRO * RANKS),
        loss_function=make_loss(recipe),
    )
    losses = []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for first in range(rank * MICRO, BATCH, RANKS * MICRO):
            samples = torch.arange(first, first + MICRO) + step * BATCH
            total += engine.backward(*images_of(samples), samples, step).double()
        engine.step(lr_at(step, recipe.optim, STEPS))
        torch.distributed.all_reduce(total)
        losses.append((float(total) * MICRO / BATCH).hex())
    found = {"losses": losses, "logits": _logits(engine)}
    if engine.average is not None:
        with engine.averaged():
            found["averaged logits"] = _logits(engine)
    engine.close()
    return found


def _logits(engine: DeepSpeedEngine) -> str:
    """Of some images, so that the last step counts."""
    pixels = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
    logits = engine.predict(pixels.to(engine.dtype))[1]
    return hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()[:16]
