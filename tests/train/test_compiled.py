"""A compiled engine against the same one uncompiled."""

from typing import Any

import pytest
import torch

from tests.train.engine_runs import IMAGES, build_engine, run_steps
from tests.train.ranks import run_ranks
from vit_ray.config.training_sections import TrainConfig

# Backend, ZeRO stage (the recipe refuses 3), precision, activation checkpointing. Only inductor
# makes machine code, which takes long; the other captures the same graphs, and runs them as torch.
KINDS = [
    ("aot_eager", 0, "fp32", 0),
    ("aot_eager", 1, "fp32", 1),
    ("aot_eager", 2, "bf16", 1),
    ("inductor", 2, "fp32", 1),
]


def trained(backend: str, **train: Any) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses of 3 steps of 4 passes; averaged logits and features; graphs that were captured."""
    from deepspeed.accelerator import get_accelerator
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    get_accelerator().set_compile_backend(backend)
    world_size = torch.distributed.get_world_size()
    engine = build_engine(TrainConfig(averaging=0.5, **train), world_size, 2)
    losses = run_steps(engine, 0, 3, 2)
    with engine.averaged():
        outputs = list(engine.predict(IMAGES.to(engine.dtype)))
    engine.close()
    return losses, outputs, counters["stats"]["unique_graphs"]


def compiled_and_eager(rank: int) -> dict[Any, Any]:
    """By kind: (compiled, eager)."""
    found = {}
    for backend, stage, precision, every in KINDS:
        train = {"zero_stage": stage, "precision": precision, "activation_checkpointing": every}
        found[backend, stage, precision, every] = [
            trained(backend, **train, compile=compiled) for compiled in (True, False)
        ]
    return found


def assert_same_training(compiled: Any, eager: Any, tolerance: float) -> None:
    """Losses within `tolerance`; outputs within it of the largest."""
    assert compiled[0] == pytest.approx(eager[0], rel=tolerance)
    for ours, theirs in zip(compiled[1], eager[1], strict=True):
        largest = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * largest)
    assert eager[2] == 0
    assert compiled[2] > 0


@pytest.fixture(scope="module")
def runs() -> dict[Any, Any]:
    return run_ranks(1, compiled_and_eager)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_engine_trains_as_an_eager_one(runs: dict[Any, Any], kind: Any) -> None:
    compiled, eager = runs[kind]
    # Captured operations are taken apart: fp32 rounds elsewhere, bf16 to 8 bits in more places.
    # Adam divides by the root of tiny second moments, which magnifies it.
    assert_same_training(compiled, eager, 1e-4 if "fp32" in kind else 3e-2)
