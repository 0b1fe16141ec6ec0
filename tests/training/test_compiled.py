"""A compiled engine against the same one uncompiled."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.models.small import small_model, some_images
from tests.training.engine_runs import IMAGES, build_engine, run_steps
from tests.training.ranks import run_ranks
from vit_ray.config.training_sections import TrainConfig
from vit_ray.models import build_model
from vit_ray.models.build import recompute
from vit_ray.models.counter_random import sample_keys
from vit_ray.training.engine import compile_failures, compile_model, compile_s

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

    torch._dynamo.reset()
    counters.clear()
    get_accelerator().set_compile_backend(backend)
    world_size = torch.distributed.get_world_size()
    before_s = compile_s()
    engine = build_engine(TrainConfig(averaging=0.5, **train), world_size, 2)
    losses = run_steps(engine, 0, 3, 2)
    with engine.averaged():
        outputs = list(engine.predict(IMAGES.to(engine.dtype)))
    assert (compile_s() > before_s) is train["compile"]
    engine.close()
    return losses, outputs, counters["stats"]["unique_graphs"]


def compiled_and_eager(rank: int) -> dict[Any, Any]:
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


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("family", ["ViT", "Axial-ViT", "R+ViT"])
def test_a_deeper_model_takes_no_more_compiling(family):
    """All blocks run the code of one; the last one's, which computes less, is another."""
    found = []
    for depth in (3, 6):
        torch._dynamo.reset()
        counters.clear()
        model = small_model(family, depth=depth)
        compile_model(model, "aot_eager", may_fail=False)
        model(some_images()).sum().backward()
        found.append((counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]))
    assert found[0] == found[1]
    assert 1 <= found[0][0] <= 3


def test_what_cannot_be_compiled_stays_eager_where_nobody_asked_for_it(monkeypatch):
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr("vit_ray.training.engine._FAILURES", [])
    torch._dynamo.reset()
    model, images = small_model("ViT").eval(), some_images()
    expected = model(images)
    torch._dynamo.register_backend(broken, "broken")
    compile_model(model, "broken", may_fail=True)
    assert torch.equal(model(images), expected)
    failures = compile_failures()
    assert len(failures) >= 1
    assert all("no C compiler" in failure for failure in failures)
    torch._dynamo.reset()
    compile_model(model, "broken", may_fail=False)
    with pytest.raises(RuntimeError, match="no C compiler"):
        model(images)


@pytest.mark.parametrize(
    ("value", "stage", "has_gpu", "compiles"),
    [
        ("auto", 2, True, True),
        ("auto", 3, True, False),
        ("auto", 0, False, False),
        (True, 0, False, True),
        (False, 0, True, False),
    ],
)
def test_models_are_compiled_on_gpus_unless_said_otherwise(value, stage, has_gpu, compiles):
    assert TrainConfig(compile=value, zero_stage=stage).compiles(has_gpu) is compiles


@pytest.fixture(scope="module")
def runs() -> dict[Any, Any]:
    return run_ranks(1, compiled_and_eager)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_engine_trains_as_an_eager_one(runs, kind):
    compiled, eager = runs[kind]
    # Captured operations are taken apart: fp32 rounds elsewhere, bf16 to 8 bits in more places.
    # Adam divides by the root of tiny second moments, which magnifies it.
    assert_same_training(compiled, eager, 1e-4 if "fp32" in kind else 3e-2)


@pytest.mark.parametrize(
    ("patch", "width", "mlp", "heads"), [(16, 768, 3072, 12), (14, 1280, 5120, 16)], ids=["B", "H"]
)
def test_blocks_as_wide_as_published_are_captured_without_a_break(patch, width, mlp, heads):
    torch._dynamo.reset()
    counters.clear()
    shape = {"depth": 2, "width": width, "mlp_dim": mlp, "num_heads": heads, "patch_size": patch}
    model = build_model("ViT", 10, dropout=0.1, stochastic_depth=0.1, **shape).bfloat16()
    compile_model(model, "aot_eager", may_fail=False)
    recompute(model, 1)
    images = torch.rand(1, 3, 224, 224, dtype=torch.bfloat16)
    model(images, sample_keys(torch.arange(1), 0, 0)).sum().backward()
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
