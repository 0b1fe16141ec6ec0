"""Steps against exact gradients and each other: masters of bf16, sums of passes, dropout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recipes import recipe_with
from tests.training.engine_runs import (
    GLOBAL_BATCH,
    PLAIN_LINEAR,
    batch,
    build_engine,
    loss_of,
    small_model,
)
from tests.training.ranks import run_ranks
from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.models import build_model
from vit_ray.training.engine import DeepSpeedEngine
from vit_ray.training.objective import make_loss

WORLD, PASSES, MICRO = 2, 64, 2
CONSTANT = -10.02
KINDS = [(0, False), (1, False), (2, True), (3, False)]
# Rate 1 and no momentum yet: the first step's change is the gradient itself.
SGD = OptimConfig(name="sgd", learning_rate=1.0, momentum=0.9, clip_norm=0.0)


def model_with_gradients() -> nn.Module:
    """All parameters get a gradient, and none of the head's is a number of bf16."""
    nn.functional.linear = PLAIN_LINEAR
    model = small_model()
    nn.init.normal_(model.head.weight, std=0.5)
    nn.init.constant_(model.head.bias, 0.02)
    model.head.constant_bias = CONSTANT
    return model


def micro_batch(rank: int, index: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    images = torch.randint(0, 256, (MICRO, 8, 8, 3), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 5, (MICRO, 1), generator=generator), torch.arange(MICRO)


def masters(engine: DeepSpeedEngine) -> dict[tuple[str, int], Tensor]:
    return {(f.name, f.start): f.weight.clone() for f in engine.state.owned}


def test_the_constant_bias_is_added_in_fp32():
    """In steps of 0.001 at -10, where bf16 has numbers 0.0625 apart."""
    head = model_with_gradients().head.bfloat16()
    features = torch.linspace(-1, 1, 30).bfloat16()[None]
    product = PLAIN_LINEAR(features, head.weight).float()
    found = []
    for bias in (0.0, 0.001, 0.002):
        nn.init.constant_(head.bias, bias)
        found.append(head(features))
        assert torch.equal(found[-1], product + head.bias.float() + torch.tensor(CONSTANT))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def measure(rank: int, stage: int, offload: bool, precision: Any, passes: int) -> dict[str, Any]:
    """Masters at the start, after a step at rate 0 and after one at rate 1; the latter's norm."""
    train = TrainConfig(precision=precision, zero_stage=stage, offload=offload)
    engine = DeepSpeedEngine(
        model_with_gradients(), train, SGD, micro_batch_size=MICRO, accumulation_steps=passes,
        loss_function=loss_of(train),
    )  # fmt: skip
    found: dict[str, Any] = {"start": masters(engine)}
    for name, rate in (("still", 0.0), ("moved", 1.0)):
        for entry in engine._engine.optimizer.optimizer.state.values():
            entry["momentum_buffer"].zero_()
        for index in range(passes):
            engine.backward(*micro_batch(rank, index))
        found["norm"] = float(engine.step(rate).grad_norm)
        found[name] = masters(engine)
    engine.close()
    return found


def mean_gradient(train: TrainConfig, dtype: torch.dtype, passes: int) -> dict[str, Tensor]:
    """Of every pass of all ranks by plain torch, summed in float64."""
    model = model_with_gradients().to(dtype)
    total = {name: torch.zeros(p.numel()).double() for name, p in model.named_parameters()}
    for rank in range(WORLD):
        for index in range(passes):
            model.zero_grad()
            loss_of(train)(model, *micro_batch(rank, index), 0).backward()
            for name, parameter in model.named_parameters():
                total[name] += parameter.grad.double().flatten() / (WORLD * passes)
    return total


def error_of_steps(runs: Any, exact: dict[str, Tensor]) -> float:
    """Of the step at rate 1, relative to the gradient."""
    error = whole = 0.0
    for rank in runs:
        for (name, start), weight in rank["still"].items():
            gradient = exact[name][start : start + len(weight)]
            change = (weight - rank["moved"][name, start]).double()
            error += float((change - gradient).square().sum())
            whole += float(gradient.square().sum())
    return (error / whole) ** 0.5


@pytest.fixture(scope="module")
def gradient_of_bf16() -> dict[str, Tensor]:
    return mean_gradient(TrainConfig(), torch.bfloat16, PASSES)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("kind", KINDS)
def test_masters_start_from_exact_weights_and_passes_are_summed_in_fp32(gradient_of_bf16, kind):
    runs = run_ranks(WORLD, measure, *kind, "bf16", PASSES)
    whole = {name: p.detach().flatten() for name, p in model_with_gradients().named_parameters()}
    count = 0
    for rank in runs:
        for (name, start), weight in rank["start"].items():
            assert torch.equal(weight, whole[name][start : start + len(weight)]), name
            assert torch.equal(weight, rank["still"][name, start]), name  # a step at rate 0
            count += len(weight)
    assert count == sum(len(weight) for weight in whole.values())
    # Measured: 0.86 % where sums are rounded to bf16 after every pass. In fp32, what is left is
    # that workers send their sums in bf16, rounded once: 0.06 to 0.21 %.
    assert error_of_steps(runs, gradient_of_bf16) < 0.004


FEW = 3  # passes


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("kind", [KINDS[0], *KINDS[:0:-1]])
def test_a_step_in_fp32_is_the_mean_gradient_of_all_passes_and_ranks(kind):
    gradient = mean_gradient(TrainConfig(precision="fp32"), torch.float32, FEW)
    runs = run_ranks(WORLD, measure, *kind, "fp32", FEW)
    # Adam and clipping undo a factor of the gradient, so that only such a step shows one.
    assert error_of_steps(runs, gradient) < 1e-6
    norm = float(torch.cat(list(gradient.values())).norm())
    assert [rank["norm"] for rank in runs] == pytest.approx([norm] * WORLD, rel=1e-6)


STEPS = 3
ENCODER = {"depth": 2, "width": 32, "mlp_dim": 64, "num_heads": 2, "patch_size": 4}
DEPTH = {"dropout": 0.0, "stochastic_depth": 0.5}
# Name -> micro-batch, sections `model` and `train`, by world size.
PLAIN: dict[str, Any] = {"zero_stage": 1}
MIXED = {**PLAIN, "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}
OFF = {"dropout": 0.0}
CASES: dict[int, dict[str, tuple[int, dict[str, Any], dict[str, Any]]]] = {
    1: {
        "1 x 8": (8, {}, PLAIN),
        "1 x 4, recomputed": (4, {}, {**PLAIN, "activation_checkpointing": 1}),
        "1 x 8, no dropout": (8, OFF, PLAIN),
        "depth, 1 x 8": (8, DEPTH, PLAIN),
        "mixed, 1 x 8": (8, OFF, MIXED),
        "mixed, 1 x 2": (2, OFF, MIXED),
    },
    2: {
        "2 x 2": (2, {}, PLAIN),
        "2 x 4": (4, {}, {"zero_stage": 3}),
        "depth, 2 x 2": (2, DEPTH, PLAIN),
        "mixed, 2 x 4": (4, OFF, {**MIXED, "zero_stage": 3}),
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
    world_size = torch.distributed.get_world_size()
    share = GLOBAL_BATCH // world_size
    torch.manual_seed(0)
    model = build_model("ViT", 5, 8, **chosen.model.options())
    torch.nn.init.normal_(model.head.weight, std=0.2)
    engine = build_engine(chosen.train, world_size, micro, chosen.optim, model)
    engine._loss_function = make_loss(chosen)
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
