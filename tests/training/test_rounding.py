"""Runs that differ by rounding alone: a model in bf16 that is compiled, a batch in other pieces."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.small import small_model, some_images
from tests.training import grouped_runs
from tests.training.ranks import run_ranks

# The graphs and formulas of torch.compile's default, inductor, run as torch without machine code.
BACKEND = "aot_eager_decomp_partition"


class Gradients(NamedTuple):
    """Of one pass of the same bf16 weights and images, all as float64."""

    exact: dict[str, Tensor]
    eager: dict[str, Tensor]
    compiled: dict[str, Tensor]


def rounded_model() -> nn.Module:
    return small_model("ViT", depth=1).bfloat16()


def pass_of(model: nn.Module, dtype: torch.dtype, forward: Any = None) -> dict[str, Tensor]:
    images = some_images(8).bfloat16().to(dtype)
    logits = (model if forward is None else forward)(images)
    F.cross_entropy(logits.double(), torch.arange(8) % 5).backward()
    return {name: p.grad.double().flatten() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def gradients() -> Gradients:
    torch._dynamo.reset()
    model = rounded_model()
    return Gradients(
        pass_of(rounded_model().double(), torch.float64),
        pass_of(rounded_model(), torch.bfloat16),
        pass_of(model, torch.bfloat16, torch.compile(model, backend=BACKEND)),
    )


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def whole(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(gradients.values()))


def test_compiled_gradients_in_bf16_are_as_near_fp64_as_eager_ones(gradients: Gradients) -> None:
    exact, eager, compiled = gradients
    assert distance(whole(compiled), whole(eager)) > 1e-4  # they are rounded elsewhere
    assert distance(whole(compiled), whole(exact)) < 1.05 * distance(whole(eager), whole(exact))
    for name, theirs in exact.items():
        # 2^-9 an operation, over some ten of them one after the other.
        assert distance(eager[name], theirs) < 0.03, name
        assert distance(compiled[name], theirs) < 1.2 * distance(eager[name], theirs), name


SMOOTH = "ViT, Adam, sigmoid loss"
WITH_RELU = "hybrid, Adam, softmax with smoothing"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), [(SMOOTH, 1e-6), (WITH_RELU, 1e-5)])
def test_process_groups_begin_with_the_same_losses(
    name: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The growth over 160 steps: `python -m tests.training.grouped_runs`; docs/training.md.
    cuts: list[tuple[int, int]] = []

    def noted(workers: int, run: Any, changes: Any, names: Any, micro: int, steps: int) -> Any:
        cuts.append((workers, micro))
        return run_ranks(workers, run, changes, names, micro, steps)

    monkeypatch.setattr(grouped_runs, "run_ranks", noted)
    found = grouped_runs.apart([name], 8)[name]
    assert max(growth[-1] for growth in found.values()) < tolerance, found
    # Workers and images of a pass: each group is one of its own, even where rounding agrees.
    assert dict(zip(["1 x 1", *found], cuts, strict=True)) == {
        "1 x 1": (1, 32),
        "1 x 2": (1, 16),
        "2 x 1": (2, 16),
        "2 x 2": (2, 8),
    }
