"""Losses of a few steps of every family under a ZeRO stage, as a rank of a test computes them."""

import deepspeed
import torch
from torch.nn import functional as F

from tests.models.small import FAMILIES, small_model, some_images
from vit_ray.models.build import recompute
from vit_ray.models.masked import MaskedPatchObjective

CASES = [
    *((family, {}) for family in FAMILIES),
    ("ViT", {"positions": "relative", "pool": "gap", "representation": True}),
    ("ViT", {"positions": "learned_2d", "positions_at": "every_layer_shared", "dropout": 0.1}),
]


def losses(family: str, options: dict[str, object], stage: int, every: int) -> list[float]:
    """Of three steps of Adam on one batch; nothing of the model stays gathered between uses."""
    model = small_model(family, **options)
    recompute(model, every)
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
    }
    trained = MaskedPatchObjective(model) if family == "R+ViT" else model
    parameters = [p for p in trained.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=trained, model_parameters=parameters, config=config)
    torch.manual_seed(3)
    seen = []
    for _ in range(3):
        if trained is model:
            loss = F.cross_entropy(engine(some_images()), torch.tensor([0, 1]))
        else:
            loss = engine(some_images(), torch.arange(2))
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    return seen


def losses_by_stage(rank: int) -> list[dict[int, list[float]]]:
    """Without ZeRO and with its last stage, for every case with and without recomputation."""
    return [
        {stage: losses(family, options, stage, every) for stage in (0, 3)}
        for family, options in CASES
        for every in (0, 1)
    ]
