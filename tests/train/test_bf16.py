"""Training in bf16: where fp32 master weights start, and how the passes of a step are summed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.engine_runs import PLAIN_LINEAR, loss_of, small_model
from tests.train.ranks import run_ranks
from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.train.engine import DeepSpeedEngine

WORLD, PASSES, MICRO = 2, 64, 2
KINDS = [
    (stage, offload) for stage in range(4) for offload in (False, True) if stage or not offload
]
# Rate 1 and no momentum yet: the first step's change is the gradient itself.
SGD = OptimConfig(name="sgd", learning_rate=1.0, momentum=0.9, clip_norm=0.0)


def model_with_gradients() -> nn.Module:
    """All parameters get a gradient, and none of the head's is a number of bf16."""
    nn.functional.linear = PLAIN_LINEAR
    model = small_model()
    nn.init.normal_(model.head.weight, std=0.5)
    nn.init.constant_(model.head.bias, -10.02)
    return model


def micro_batch(rank: int, index: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    images = torch.randint(0, 256, (MICRO, 8, 8, 3), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 5, (MICRO, 1), generator=generator), torch.arange(MICRO)


def masters(engine: DeepSpeedEngine) -> dict[tuple[str, int], Tensor]:
    return {(f.name, f.start): f.weight.clone() for f in engine.fragments()}


def measure(rank: int, stage: int, offload: bool) -> dict[str, Any]:
    """Masters at the start, after a step at rate 0, and the change of a step at rate 1."""
    train = TrainConfig(precision="bf16", zero_stage=stage, offload=offload)
    engine = DeepSpeedEngine(
        model_with_gradients(),
        train,
        SGD,
        micro_batch_size=MICRO,
        accumulation_steps=PASSES,
        loss_function=loss_of(train),
    )
    found = {"start": masters(engine)}
    for name, rate in (("still", 0.0), ("moved", 1.0)):
        for entry in engine._engine.optimizer.optimizer.state.values():
            entry["momentum_buffer"].zero_()
        for index in range(PASSES):
            engine.backward(*micro_batch(rank, index))
        engine.step(rate)
        found[name] = masters(engine)
    engine.close()
    return found


def all_kinds(rank: int) -> dict[Any, Any]:
    return {kind: measure(rank, *kind) for kind in KINDS}


@pytest.fixture(scope="module")
def runs() -> list[dict[Any, Any]]:
    return run_ranks(WORLD, all_kinds)


@pytest.mark.parametrize("kind", KINDS)
def test_masters_start_from_the_weights_before_they_were_rounded(runs: Any, kind: Any) -> None:
    whole = {name: p.detach().flatten() for name, p in model_with_gradients().named_parameters()}
    count = 0
    for rank in runs:
        for (name, start), weight in rank[kind]["start"].items():
            assert torch.equal(weight, whole[name][start : start + len(weight)]), name
            count += len(weight)
    assert count == sum(len(weight) for weight in whole.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_at_rate_0_changes_no_bit(runs: Any, kind: Any) -> None:
    for rank in runs:
        for key, weight in rank[kind]["start"].items():
            assert torch.equal(rank[kind]["still"][key], weight), key


@pytest.fixture(scope="module")
def mean_gradient() -> dict[str, Tensor]:
    """Of every pass in bf16 by plain torch, summed in float64."""
    model = model_with_gradients().bfloat16()
    total = {name: torch.zeros(p.numel()).double() for name, p in model.named_parameters()}
    for rank in range(WORLD):
        for index in range(PASSES):
            model.zero_grad()
            loss_of(TrainConfig())(model, *micro_batch(rank, index), 0).backward()
            for name, parameter in model.named_parameters():
                total[name] += parameter.grad.double().flatten() / (WORLD * PASSES)
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_summed_in_fp32(runs: Any, mean_gradient: dict[str, Tensor], kind: Any) -> None:
    error = whole = 0.0
    for rank in runs:
        for (name, start), weight in rank[kind]["still"].items():
            gradient = mean_gradient[name][start : start + len(weight)]
            change = (weight - rank[kind]["moved"][name, start]).double()
            error += float((change - gradient).square().sum())
            whole += float(gradient.square().sum())
    # Measured: 0.86 % where sums are rounded to bf16 after every pass. In fp32, what is left is
    # that workers send their sums in bf16, rounded once: 0.06 to 0.21 %.
    assert (error / whole) ** 0.5 < 0.004
