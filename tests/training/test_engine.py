"""Every ZeRO stage against plain torch, and every checkpoint read by every stage and world."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.training.engine_runs import (
    IMAGES,
    OPTIM,
    Run,
    StraightRuns,
    batch,
    build_engine,
    loss_of,
    resumed,
    run_steps,
    small_model,
    straight_and_saved,
)
from tests.training.ranks import run_ranks
from vit_ray.config.training_sections import TrainConfig
from vit_ray.training.optimizers import build_optimizer

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 4)
# fp32 sums are taken in another order by each stage and world; bf16 rounds weights to 8 bits.
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-3}

# Logits of 5 steps of Adam, which divides by the root of tiny second moments.
AVERAGED_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


def config(precision: str, stage: int, micro: int = 2) -> dict[str, Any]:
    train = {"zero_stage": stage, "precision": precision, "averaging": 0.9}
    name = f"{precision}-{stage}" + (f"-by-{micro}" if micro != 2 else "")
    return {"name": name, "micro": micro, "train": train}


FP32, BF16 = ([config(precision, stage) for stage in STAGES] for precision in ("fp32", "bf16"))
CONFIGS = FP32 + BF16


@pytest.fixture(scope="module")
def straight(folder: str) -> StraightRuns:
    """With the runs of two ranks that several tests compare, in one process group."""
    runs = StraightRuns(folder)
    runs.of(2, [*CONFIGS, *(offloaded(*one) for one in OFFLOADED[:2])])
    return runs


def plain_torch(steps: int) -> Iterator[tuple[torch.nn.Module, float]]:
    """The model after each step, and the loss of the step."""
    model = small_model()
    optimizer = build_optimizer(model, OPTIM)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        images, labels = batch(step)
        loss = loss_of(TrainConfig(precision="fp32"))(model, images, labels, None)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_norm)
        optimizer.step()
        yield model, loss.item()


@pytest.fixture(scope="module")
def plain_torch_losses() -> list[float]:
    return [loss for _, loss in plain_torch(5)]


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("world", "micro"), [(2, 2), (1, 8), (2, 1), (4, 2)])
def test_every_stage_world_and_micro_batch_trains_as_plain_torch(
    straight, plain_torch_losses, world, micro
):
    runs = straight.of(world, (config("fp32", stage, micro) for stage in STAGES))
    for name, run in runs.items():
        assert run.losses == pytest.approx(plain_torch_losses, rel=2e-6), name


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_follows_fp32(straight, stage):
    expected = straight.of(2, FP32)["fp32-0"].losses
    assert straight.of(2, BF16)[f"bf16-{stage}"].losses == pytest.approx(expected, rel=1e-2)


@pytest.fixture(scope="module")
def resumed_runs(straight: StraightRuns, folder: str) -> dict[int, dict[Any, Run]]:
    """Steps 2 to 4 after resuming: every pair of stages into every world.

    The worlds that the checkpoints come from take turns over the pairs, so that every pair of
    worlds occurs with several pairs of stages; bf16 is read from its own stage and one other.
    """

    def pairs(world: int) -> list[dict[str, Any]]:
        chosen = []
        for saved, stage in itertools.product(STAGES, STAGES):
            source = WORLDS[(saved + stage + world) % len(WORLDS)]
            chosen.append({**config("fp32", stage), "from": f"{source}/fp32-{saved}"})
        for stage in STAGES:
            source, other = WORLDS[(stage + world) % len(WORLDS)], (stage + 1) % len(STAGES)
            chosen.append({**config("bf16", stage), "from": f"{source}/bf16-{other}"})
            for precision in ("fp32", "bf16"):
                own = {**config(precision, stage), "from": f"{world}/{precision}-{stage}"}
                chosen.append(own)
        return chosen

    for world in WORLDS:
        straight.of(world, CONFIGS)
    return {world: run_ranks(world, resumed, pairs(world), folder)[0] for world in WORLDS}


def assert_goes_on(run: Run, source: Run, precision: str, what: Any) -> None:
    """As the run that was not interrupted, in losses and in averaged weights."""
    assert run.losses == pytest.approx(source.losses[2:], rel=TOLERANCE[precision]), what
    difference = float((run.averaged - source.averaged).abs().max())
    assert difference < AVERAGED_TOLERANCE[precision] * float(source.averaged.abs().max()), what


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_stage_and_world_resumes_from_any_other(straight, resumed_runs, precision, world):
    for (name, source), run in resumed_runs[world].items():
        if name.startswith(precision):
            saved_world, saved_name = source.split("/")
            expected = straight.of(int(saved_world), CONFIGS)[saved_name]
            assert_goes_on(run, expected, precision, (name, source))


@pytest.mark.slow
def test_the_same_stage_and_world_resumes_bit_for_bit(straight, resumed_runs):
    for world in WORLDS:
        for name, expected in straight.of(world, CONFIGS).items():
            run = resumed_runs[world][name, f"{world}/{name}"]
            assert run.losses == expected.losses[2:], (world, name)
            assert torch.equal(run.averaged, expected.averaged), (world, name)


def test_momentum_goes_on_under_another_stage_on_fewer_workers(folder):
    sgd = {"name": "sgd", "momentum": 0.9, "learning_rate": 1e-2, "clip_norm": 1.0}
    saved = [{**config("fp32", stage), "name": f"sgd-{stage}", "optim": sgd} for stage in (0, 2)]
    runs = run_ranks(2, straight_and_saved, saved, f"{folder}/sgd")[0]
    crossed = [
        {**config("fp32", stage), "optim": sgd, "from": f"sgd/sgd-{source}"}
        for source, stage in ((0, 3), (2, 1))
    ]
    for (_, source), run in run_ranks(1, resumed, crossed, folder)[0].items():
        assert_goes_on(run, runs[source.removeprefix("sgd/")], "fp32", source)


def offloaded(precision: str, stage: int) -> dict[str, Any]:
    """The optimizer in host memory."""
    plain = config(precision, stage)
    return {
        **plain,
        "name": f"offloaded-{plain['name']}",
        "train": {**plain["train"], "offload": True},
    }


# The first two have both precisions, and the stages with and without whole weights.
OFFLOADED = [("bf16", 2), ("fp32", 3), ("fp32", 1)]


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("precision", "stage"), OFFLOADED)
def test_offloading_the_optimizer_changes_no_step(straight, precision, stage):
    both = [config(precision, stage), offloaded(precision, stage)]
    expected, run = straight.of(2, both).values()
    assert run.losses == expected.losses
    assert torch.equal(run.averaged, expected.averaged)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("precision", "stage"), OFFLOADED)
def test_a_run_goes_on_with_its_optimizer_offloaded_and_back(straight, folder, precision, stage):
    own, crossed = offloaded(precision, stage), offloaded(precision, stage % 3 + 1)
    plain = config(precision, (stage + 1) % 4)
    sources = {f"2/{name}": run for name, run in straight.of(2, [own, crossed]).items()}
    sources |= {f"4/{name}": run for name, run in straight.of(4, [plain]).items()}
    configs = [
        {**own, "from": f"2/{own['name']}"},
        {**own, "from": f"4/{plain['name']}"},
        {**config(precision, stage), "from": f"2/{crossed['name']}"},
    ]
    runs = run_ranks(2, resumed, configs, folder)[0]
    assert len(runs) == 3
    for (name, source), run in runs.items():
        assert_goes_on(run, sources[source], precision, (name, source))
        if source == f"2/{name}":
            assert run.losses == sources[source].losses[2:], name
            assert torch.equal(run.averaged, sources[source].averaged), name


def averages_and_guard(rank: int) -> dict[str, Any]:
    """In one process group: averaged weights, layers, and a poisoned step."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        train = TrainConfig(zero_stage=stage, precision="fp32", averaging=0.5)
        engine = build_engine(train, torch.distributed.get_world_size(), 4)
        run_steps(engine, 0, 3, 4)
        found[f"poison-{stage}"] = _poisoned_step(engine)
        found[f"average-{stage}"] = _averaged_logits(engine)
        found[f"sizes-{stage}"] = _activation_sizes(engine)
        engine.close()
    return found


def _poisoned_step(engine: Any) -> tuple[bool, bool]:
    """(applied, weights moved) of a step whose loss is nan on rank 0 alone."""
    before = [f.weight.clone() for f in engine.state.owned]
    images, labels = batch(9)
    plain = engine._loss_function
    if engine.rank == 0:
        engine._loss_function = lambda *a: plain(*a) * float("nan")
    engine.backward(images[:4], labels[:4], labels[:4, 0])
    applied = not engine.step(1e-2).refused
    engine._loss_function = plain
    moved = any(
        not torch.equal(a, f.weight) for a, f in zip(before, engine.state.owned, strict=True)
    )
    return applied, moved


def _averaged_logits(engine: Any) -> list[torch.Tensor]:
    before = engine.predict(IMAGES)[1]
    with engine.averaged():
        inside = engine.predict(IMAGES)[1]
    return [before, inside, engine.predict(IMAGES)[1]]


def _activation_sizes(engine: Any) -> tuple[dict[str, float], dict[str, float], float]:
    """Sizes of two images' activations, the same with one pixel lost, and the logits' size."""
    lost = IMAGES.clone()
    lost[1, 0, 0, 0] = torch.nan
    logits = engine.predict(IMAGES)[1]
    size = float(logits.square().mean(1).sqrt().max())
    return engine.activation_sizes(IMAGES), engine.activation_sizes(lost), size


@pytest.fixture(scope="module")
def behaviour() -> dict[str, Any]:
    return run_ranks(2, averages_and_guard)[0]


def reference_average() -> torch.nn.Module:
    """Plain torch: the same three steps, whose factors of 0.5 are still less by the warm-up."""
    average = small_model()
    for (model, _), factor in zip(plain_torch(3), (2 / 11, 3 / 12, 4 / 13), strict=True):
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.mul_(factor).add_(p, alpha=1 - factor)
    return average


@pytest.mark.parametrize("stage", STAGES)
def test_averages_are_polyaks_and_a_loss_that_is_not_finite_is_applied_on_no_rank(behaviour, stage):
    assert behaviour[f"poison-{stage}"] == (False, False)
    before, inside, after = behaviour[f"average-{stage}"]
    expected = reference_average().eval()(IMAGES).detach()
    torch.testing.assert_close(inside, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(before, after)
    assert not torch.allclose(before, inside)
    sizes, lost, logits = behaviour[f"sizes-{stage}"]
    names = list(sizes)
    assert names.index("blocks.0") < names.index("blocks.1") < names.index("head")
    assert sizes["head"] == pytest.approx(logits, rel=1e-6)
    assert all(0 < size < 100 for size in sizes.values())
    assert all(size == float("inf") for size in lost.values())
