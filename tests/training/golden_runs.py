"""Short trainings whose loss curves are kept as a file, `golden_losses.json`.

Renew it where an algorithm is meant to change, and say so in the commit:
    python -m tests.training.golden_runs
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

from tests.training.ranks import run_ranks
from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.models import build_model
from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.training.engine.deepspeed_engine import DeepSpeedEngine
from vit_ray.training.objective import classification_loss, normalize
from vit_ray.training.schedule import lr_at

FILE = Path(__file__).with_name("golden_losses.json")
STEPS, BATCH, MICRO, WORKERS = 16, 32, 8, 2
HEAD_STD = 0.1
ENCODER = {"depth": 2, "width": 32, "mlp_dim": 64, "num_heads": 2}
ADAM = {
    "name": "adamw",
    "learning_rate": 1e-3,
    "weight_decay": 0.3,
    "clip_norm": 1.0,
    "schedule": "linear",
    "end_learning_rate": 1e-5,
    "warmup_steps": 4,
}
SGD = {
    "name": "sgd",
    "learning_rate": 1e-4,
    "momentum": 0.9,
    "clip_norm": 0.0,
    "schedule": "steps",
    "warmup_steps": 2,
}

# Name -> family, its options, sections `train` and `optim`: what the paper trains, made small.
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ViT, Adam, sigmoid loss": (
        "ViT",
        {**ENCODER, "patch_size": 8, "representation": True, "head_bias": -2.0},
        {"loss": "sigmoid", "averaging": 0.9},
        ADAM,
    ),
    "BiT ResNet, SGD with momentum": ("ResNet", {"stages": (1, 1), "width_factor": 1}, {}, SGD),
    "hybrid, Adam, softmax with smoothing": (
        "R+ViT",
        {**ENCODER, "stages": (1, 1), "width_factor": 1},
        {"label_smoothing": 0.1},
        {**ADAM, "schedule": "cosine", "learning_rate": 3e-4},
    ),
    "masked patches, Adam": (
        "ViT",
        {**ENCODER, "patch_size": 4},
        {"loss": "masked_patch", "masked_target": "mean_color"},
        ADAM,
    ),
}


def loss_curves(
    rank: int,
    changes: dict[str, dict[str, Any]] | None = None,
    names: Iterable[str] = tuple(RUNS),
    micro: int = MICRO,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Loss of each step, by the name of the run; `changes` are laid over `optim`, by that name.

    Args:
        micro: images per rank and pass; the batch is the same on any number of ranks.
    """
    changes = changes or {}
    return {name: _loss_curve(name, changes.get(name, {}), micro, steps) for name in names}


def _loss_curve(name: str, changes: dict[str, Any], micro: int, steps: int) -> list[float]:
    family, options, train_section, optim_section = RUNS[name]
    train = TrainConfig(precision="fp32", zero_stage=2, **train_section)
    optim = OptimConfig(**{**optim_section, **changes}, steps=steps)
    torch.manual_seed(0)
    model: torch.nn.Module = build_model(family, 10, 32, **options)
    if train.loss == "masked_patch":
        model = MaskedPatchObjective(model, train.masked_target, seed=0)
    fill_zero_kernels(model)
    engine = DeepSpeedEngine(
        model,
        train,
        optim,
        micro_batch_size=micro,
        accumulation_steps=BATCH // (micro * torch.distributed.get_world_size()),
        loss_function=_loss_function(train),
    )
    losses = [_step(engine, step, lr_at(step, optim, steps), micro) for step in range(steps)]
    engine.close()
    return losses


def fill_zero_kernels(model: torch.nn.Module) -> None:
    """Start heads at random: under a head of zeros all other gradients are zeros or nearly so,
    and Adam divides them by themselves, which makes steps of rounding errors.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=HEAD_STD)


def _loss_function(train: TrainConfig) -> Any:
    def loss(module: Any, images: Any, labels: Any, samples: torch.Tensor, _: int) -> Any:
        pixels = normalize(images, torch.float32)
        if train.loss == "masked_patch":
            return module(pixels, samples, 0)
        return classification_loss(module(pixels), labels, train).mean()

    return loss


def _step(engine: DeepSpeedEngine, step: int, learning_rate: float, micro: int) -> float:
    torch.manual_seed(1000 * step + engine.rank)
    losses = []
    for first in range(engine.rank * micro, BATCH, engine.world_size * micro):
        samples = torch.arange(step * BATCH + first, step * BATCH + first + micro)
        losses.append(engine.backward(*images_of(samples), samples))
    engine.step(learning_rate)
    mean = torch.stack(losses).double().mean()
    torch.distributed.all_reduce(mean)
    return float(mean) / engine.world_size


def images_of(samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Real digits (UCI): uint8 (B, 32, 32, 3), 4 x 4 pixels for each of 8 x 8; labels (B, 1).

    With grain: on a flat region a standardised kernel sums to rounding errors around zero, and
    their signs decide what a ReLU lets through and which place a max pool takes.
    """
    digits = _digits()
    rows = samples % len(digits.target)
    grey = (torch.from_numpy(digits.images)[rows] * 12).to(torch.uint8)
    large = grey.repeat_interleave(4, 1).repeat_interleave(4, 2)[..., None]
    grain = [_grain(int(sample)) for sample in samples]
    return large + torch.stack(grain), torch.from_numpy(digits.target)[rows][:, None]


_digits = functools.cache(load_digits)


def _grain(sample: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sample)
    return torch.randint(0, 64, (32, 32, 3), generator=generator, dtype=torch.uint8)


if __name__ == "__main__":
    FILE.write_text(json.dumps(run_ranks(WORKERS, loss_curves)[0], indent=1) + "\n")
