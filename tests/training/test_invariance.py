"""Steps with dropout on several worker counts and micro-batches: the same losses."""

from typing import Any

import pytest
import torch

from tests.recipes import recipe_with
from tests.training.engine_runs import GLOBAL_BATCH, PLAIN_LINEAR, batch
from tests.training.ranks import run_ranks
from vit_ray.models import build_model
from vit_ray.training.engine import DeepSpeedEngine
from vit_ray.training.objective import make_loss

STEPS = 3
ENCODER = {"depth": 2, "width": 32, "mlp_dim": 64, "num_heads": 2, "patch_size": 4}
DEPTH = {"dropout": 0.0, "stochastic_depth": 0.5}
# Name -> micro-batch, sections `model` and `train`, by world size.
PLAIN: dict[str, Any] = {"zero_stage": 1}
MIXED = {**PLAIN, "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}
CASES: dict[int, dict[str, tuple[int, dict[str, Any], dict[str, Any]]]] = {
    1: {
        "1 x 8": (8, {}, PLAIN),
        "1 x 4, recomputed": (4, {}, {**PLAIN, "activation_checkpointing": 1}),
        "1 x 8, no dropout": (8, {"dropout": 0.0}, PLAIN),
        "depth, 1 x 8": (8, DEPTH, PLAIN),
        "mixed, 1 x 8": (8, {"dropout": 0.0}, MIXED),
        "mixed, 1 x 2": (2, {"dropout": 0.0}, MIXED),
    },
    2: {
        "2 x 2": (2, {}, PLAIN),
        "2 x 4": (4, {}, {"zero_stage": 3}),
        "depth, 2 x 2": (2, DEPTH, PLAIN),
        "mixed, 2 x 4": (4, {"dropout": 0.0}, {**MIXED, "zero_stage": 3}),
    },
}


def losses(
    rank: int, micro: int, model_section: dict[str, Any], train: dict[str, Any]
) -> list[float]:
    """Of each step, the last one after two updates of weights."""
    chosen = recipe_with(
        seed=1,
        model={"name": "ViT", "image_size": 8, **ENCODER, "dropout": 0.3, **model_section},
        optim={"steps": STEPS, "learning_rate": 1e-2},
        train={"global_batch_size": GLOBAL_BATCH, "precision": "fp32", **train},
    )
    torch.nn.functional.linear = PLAIN_LINEAR
    world_size = torch.distributed.get_world_size()
    share = GLOBAL_BATCH // world_size
    torch.manual_seed(0)
    model = build_model("ViT", 5, 8, **chosen.model.options())
    torch.nn.init.normal_(model.head.weight, std=0.2)
    engine = DeepSpeedEngine(
        model,
        chosen.train,
        chosen.optim,
        micro_batch_size=micro,
        accumulation_steps=share // micro,
        loss_function=make_loss(chosen),
    )
    torch.manual_seed(rank)  # nothing may draw from it
    found = []
    for at in range(STEPS):
        images, labels = batch(at)
        samples = torch.arange(at * GLOBAL_BATCH, (at + 1) * GLOBAL_BATCH)
        # Blocks of a micro-batch are dealt to workers in turn, as the stream does.
        mine = [
            part.view(-1, world_size, micro, *part.shape[1:])[:, rank]
            for part in (images, labels, samples)
        ]
        mean = sum(engine.backward(*parts, at) for parts in zip(*mine, strict=True)) * micro / share
        torch.distributed.all_reduce(mean)
        found.append(float(mean) / world_size)
        engine.step(1e-2)
    engine.close()
    return found


def all_losses(rank: int) -> dict[str, list[float]]:
    cases = CASES[torch.distributed.get_world_size()]
    return {name: losses(rank, *case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def curves() -> dict[str, list[float]]:
    return {**run_ranks(1, all_losses)[0], **run_ranks(2, all_losses)[0]}


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("1 x 4, recomputed", "1 x 8"), ("2 x 2", "1 x 8"), ("2 x 4", "1 x 8"),
        ("depth, 2 x 2", "depth, 1 x 8"),
        ("mixed, 1 x 2", "mixed, 1 x 8"), ("mixed, 2 x 4", "mixed, 1 x 8"),
    ],
)  # fmt: skip
def test_what_is_drawn_does_not_depend_on_workers_and_micro_batches(curves, name, of):
    # Sums in another order, magnified by two steps of Adam.
    assert curves[name] == pytest.approx(curves[of], rel=2e-5)
    assert curves[name] != pytest.approx(curves["1 x 8, no dropout"], rel=1e-3)
