"""Compiled models and engines against the same ones uncompiled; on a GPU in `tests/gpu`.

What inductor compiles to machine code, which is on by default on GPUs, runs in processes of their
own: code that writes out of bounds ends the process, or changes what another test reads.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from tests.models.small import FAMILIES, small_model, some_images
from tests.training.engine_runs import IMAGES, build_engine, run_steps
from tests.training.ranks import run_ranks
from vit_ray.config.training_sections import TrainConfig
from vit_ray.models import build_model
from vit_ray.models.build import recompute
from vit_ray.models.counter_random import line_keys, random_words, sample_keys
from vit_ray.models.layers import StochasticDepth, keyed_dropout
from vit_ray.models.masked import draw_corruption
from vit_ray.training.engine import compile_model, compile_s
from vit_ray.training.objective import draw_mixing


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

    failures: list[str] = []
    monkeypatch.setattr("vit_ray.training.engine.COMPILE_FAILURES", failures)
    torch._dynamo.reset()
    model, images = small_model("ViT").eval(), some_images()
    expected = model(images)
    torch._dynamo.register_backend(broken, "broken")
    compile_model(model, "broken", may_fail=True)
    assert torch.equal(model(images), expected)
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


def trained(rank: int) -> Any:
    """Of an eager and a compiled engine: losses of 3 steps; averaged logits and features."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().set_compile_backend("aot_eager")
    found = []
    for compiles in (False, True):
        counters.clear()
        before_s = compile_s()
        train = TrainConfig(
            precision="fp32", zero_stage=1, activation_checkpointing=1, averaging=0.5,
            compile=compiles,
        )  # fmt: skip
        engine = build_engine(train, 1, 2)
        losses = run_steps(engine, 0, 3, 2)
        with engine.averaged():
            found.append((torch.tensor(losses), *engine.predict(IMAGES)))
        engine.close()
        assert (compile_s() > before_s) == (counters["stats"]["unique_graphs"] > 0) == compiles
    return found


@pytest.mark.slow(after=1)
def test_a_compiled_engine_trains_as_an_eager_one():
    ((eager, compiled),) = run_ranks(1, trained)
    for ours, theirs in zip(compiled, eager, strict=True):
        # fp32 rounds elsewhere; Adam divides by the root of tiny moments, which magnifies it.
        largest = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * largest)


NUM_CALLS = 200
# The product of a constant of 10 digits or more and a loop's variable, in either order, such as
# `((-7046029254386353131L)*x1)`: inductor takes it for an index, and reads out of bounds.
FOLDED_PRODUCT = re.compile(r"\d{10,}L*\)*\s*\*\s*\(*[a-z]*x\d|x\d+\)*\s*\*\s*\(*-?\d{10,}")


def draws() -> dict[str, Callable[[Tensor], Any]]:
    """Everything that is drawn from keys, as a function of samples (B,)."""
    mixes = TrainConfig(mixup=0.8, cutmix=1.0)
    depth = StochasticDepth(0.5).train()
    return {
        "dropout": lambda s: keyed_dropout(torch.ones(len(s), 7, 151), sample_keys(s, 3), 0.1),
        "masked patches": lambda s: draw_corruption(s, 37, 0, 3),
        "words": lambda s: random_words(sample_keys(s, 3), 1001),
        "lines": lambda s: line_keys(sample_keys(s, 3), 37),
        "stochastic depth": lambda s: depth(torch.ones(len(s), 33), sample_keys(s, 3)),
        "mixing": lambda s: draw_mixing(s, (9, 11), mixes, 0, 3),
    }


def compiled_draws(rank: int, names: list[str]) -> list[str]:
    """Draws of which a bit is not that of eager code."""
    generator, differing = torch.Generator().manual_seed(0), []
    for name in names:
        torch._dynamo.reset()
        draw = draws()[name]
        compiled = torch.compile(draw, backend="inductor")
        _, code = run_and_get_code(compiled, torch.arange(6))
        assert "cpp_fused" in "".join(code)
        assert not FOLDED_PRODUCT.search("".join(code)), name
        for _ in range(NUM_CALLS):
            samples = torch.randint(2**40, (6,), generator=generator)
            pairs = zip(compiled(samples), draw(samples), strict=True)
            if name == "mixing":  # powers and cosines, which compiled code rounds elsewhere
                is_equal = all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs)
            else:
                is_equal = all(torch.equal(a, b) for a, b in pairs)
            if not is_equal:
                differing.append(name)
    return differing


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("names", [list(draws())[:2], list(draws())[2:]])
def test_compiled_draws_are_bit_for_bit_those_of_eager_code(names):
    assert run_ranks(1, compiled_draws, names) == [[]]


def family_difference(rank: int, family: str) -> float:
    """Compiled as by default on a GPU, against eager: the largest of outputs and gradients."""
    rates = {"dropout": 0.1, "stochastic_depth": 0.1}
    takes = {"ViT": rates, "R+ViT": rates, "Axial-ViT": {"dropout": 0.1}}
    options = takes.get(family, {})
    keys = (sample_keys(torch.arange(4) * 300_000_000, 0, 0),) if options else ()
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = small_model(family, **options).train()
        if compiles:
            compile_model(model, "inductor", may_fail=False)
        recompute(model, int(family == "ViT"))
        logits = model(some_images(4), *keys)
        logits.square().sum().backward()
        assert (counters["stats"]["unique_graphs"] > 0) == compiles
        found.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(tensor.isfinite().all() for tensors in found for tensor in tensors)
    pairs = zip(*found, strict=True)
    return max(float((a - b).norm()) / max(float(b.norm()), 1e-6) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_compiled_as_it_does_by_default_on_a_gpu(family):
    (largest,) = run_ranks(1, family_difference, family)
    assert largest < 1e-3
