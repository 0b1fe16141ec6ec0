"""Every ZeRO stage against plain torch, and every checkpoint read by every stage and world."""

import itertools
import math
import sys
from typing import Any

import pytest
import torch

from tests.training.engine_runs import (
    IMAGES,
    Run,
    StraightRuns,
    batch,
    build_engine,
    optim_of,
    plain_torch,
    resumed,
    run_steps,
    small_model,
)
from tests.training.ranks import run_ranks
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config.training_sections import TrainConfig
from vit_ray.storage import locate
from vit_ray.training.engine import Predictor

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 4)
# Of losses: fp32 sums are taken in another order by each stage and world; bf16 rounds weights to 8
# bits. Of averaged logits after 5 steps of Adam, which divides by the root of tiny second moments.
TOLERANCES = {"fp32": (2e-6, 1e-4), "bf16": (2e-3, 3e-2)}
FROZEN = ("embedding", "class_token", "blocks.0")
OPTIMS: dict[str, dict[str, Any]] = {
    "frozen": {"learning_rate": 1e-2, "weight_decay": 0.1, "frozen": FROZEN},
    "lion": {"name": "tests.parts.lion", "weight_decay": 0.1, "betas": (0.9, 0.99)},
    "sgd": {"name": "sgd", "momentum": 0.9, "clip_norm": 1.0},
}
# Signs of tiny momenta may differ, which the sums over ranks round in another order.
OF_SIGNS = (1e-4, math.inf)


def config(precision: str, stage: int, micro: int = 2, kind: str = "", **train: Any) -> Any:
    train = {"zero_stage": stage, "precision": precision, "averaging": 0.9, **train}
    name = f"{kind}{precision}-{stage}" + (f"-by-{micro}" if micro != 2 else "")
    found: dict[str, Any] = {"name": name, "micro": micro, "train": train}
    return {**found, "optim": {"learning_rate": 1e-2, **OPTIMS[kind]}} if kind in OPTIMS else found


def offloaded(precision: str, stage: int) -> Any:
    """The optimizer in host memory."""
    return config(precision, stage, kind="offloaded-", offload=True)


FP32, BF16 = ([config(precision, stage) for stage in STAGES] for precision in ("fp32", "bf16"))
CONFIGS = FP32 + BF16
# The first two have both precisions, and the stages with and without whole weights.
OFFLOADED = [("bf16", 2), ("fp32", 3), ("fp32", 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def straight(folder: str) -> StraightRuns:
    """With the runs of two ranks that several tests compare, in one process group."""
    runs = StraightRuns(folder)
    runs.of(2, [*CONFIGS, *(offloaded(*one) for one in OFFLOADED[:2])])
    return runs


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("world", "micro"), [(2, 2), (1, 8), (2, 1), (4, 2)])
def test_every_stage_world_and_micro_batch_trains_as_plain_torch(straight, world, micro):
    expected = [loss for _, loss in plain_torch(small_model(), 5)]
    runs = straight.of(world, (config("fp32", stage, micro) for stage in STAGES))
    for name, run in runs.items():
        assert run.losses == pytest.approx(expected, rel=2e-6), name


def test_bf16_follows_fp32(straight):
    expected = straight.of(2, FP32)["fp32-0"].losses
    for name, run in straight.of(2, BF16).items():
        assert run.losses == pytest.approx(expected, rel=1e-2), name


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


def assert_goes_on(run: Run, source: Run, tolerances: tuple[float, float], what: Any) -> None:
    """As the run that was not interrupted, in losses and in averaged weights."""
    of_losses, of_averages = tolerances
    assert run.losses == pytest.approx(source.losses[2:], rel=of_losses), what
    difference = float((run.averaged - source.averaged).abs().max())
    assert difference < of_averages * float(source.averaged.abs().max()), what


def assert_is_equal(run: Run, source: Run, what: Any) -> None:
    assert run.losses == source.losses[-len(run.losses) :], what
    assert torch.equal(run.averaged, source.averaged), what


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_stage_and_world_resumes_from_any_other_and_its_own_bit_for_bit(
    straight, resumed_runs, precision, world
):
    for (name, source), run in resumed_runs[world].items():
        if name.startswith(precision):
            saved_world, saved_name = source.split("/")
            expected = straight.of(int(saved_world), CONFIGS)[saved_name]
            assert_goes_on(run, expected, TOLERANCES[precision], (name, source))
            if source == f"{world}/{name}":
                assert_is_equal(run, expected, (world, name))


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("kind", ["frozen", "lion", "sgd"])
def test_frozen_parts_and_other_optimizers_train_alike_and_resume_under_every_stage(
    straight, folder, kind
):
    configs = [config("fp32", stage, kind=kind) for stage in STAGES]
    runs = straight.of(2, configs)
    tolerances = OF_SIGNS if kind == "lion" else TOLERANCES["fp32"]
    expected = runs[configs[0]["name"]].losses
    if kind == "frozen":
        expected = [loss for _, loss in plain_torch(small_model(), 5, FROZEN)]
    for name, run in runs.items():
        assert run.losses == pytest.approx(expected, rel=tolerances[0]), name
    same = [{**one, "from": f"2/{one['name']}"} for one in configs]
    others = [{**one, "from": f"2/{configs[(n + 2) % 4]['name']}"} for n, one in enumerate(configs)]
    found = run_ranks(2, resumed, same + others, folder)[0]
    found |= run_ranks(1, resumed, [{**others[0], "name": "1 rank"}], folder)[0]
    assert len(found) == 9
    for (name, source), run in found.items():
        source_run = runs[source.removeprefix("2/")]
        assert_goes_on(run, source_run, tolerances, (name, source))
        if source == f"2/{name}":
            assert_is_equal(run, source_run, name)


@pytest.mark.parametrize(
    ("stage", "precision", "averaged"), [(1, "fp32", False), (0, "fp32", True), (3, "bf16", True)]
)
def test_a_checkpoint_has_frozen_weights_to_the_last_bit(
    straight, folder, stage, precision, averaged
):
    chosen = config(precision, stage, kind="frozen")
    straight.of(2, [chosen])
    checkpoint = newest_checkpoint(locate(folder).child(f"2/{chosen['name']}"))
    saved, first = checkpoint.weights(averaged=averaged), small_model().state_dict()
    assert saved.keys() == first.keys()
    same = {key for key in first if torch.equal(saved[key], first[key])}
    assert same >= {key for key in first if key.startswith(("embedding", "class_", "blocks.0."))}
    assert not any(key.startswith(("blocks.1.", "head", "positions")) for key in same)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("precision", "stage"), OFFLOADED)
def test_a_run_goes_on_with_its_optimizer_offloaded_and_back_and_no_step_changes(
    straight, folder, precision, stage
):
    own, crossed = offloaded(precision, stage), offloaded(precision, stage % 3 + 1)
    same, plain = config(precision, stage), config(precision, (stage + 1) % 4)
    sources = {f"2/{name}": run for name, run in straight.of(2, [own, same, crossed]).items()}
    sources |= {f"4/{name}": run for name, run in straight.of(4, [plain]).items()}
    assert_is_equal(sources[f"2/{own['name']}"], sources[f"2/{same['name']}"], stage)
    configs = [
        {**own, "from": f"2/{own['name']}"},
        {**own, "from": f"4/{plain['name']}"},
        {**same, "from": f"2/{crossed['name']}"},
    ]
    runs = run_ranks(2, resumed, configs, folder)[0]
    assert len(runs) == 3
    for (name, source), run in runs.items():
        assert_goes_on(run, sources[source], TOLERANCES[precision], (name, source))
        if source == f"2/{name}":
            assert_is_equal(run, sources[source], name)


def predictions(rank: int, train: dict[str, Any]) -> tuple[Any, Any]:
    config = TrainConfig(**train)
    engine = build_engine(config, 1, 2)
    images = IMAGES.to(engine.dtype)
    alone = Predictor(small_model(), config, torch.device("cpu"))
    found = engine.predict(images), alone.predict(images)
    engine.close()
    return found


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("precision", "stage"), [("bf16", 1), ("fp32", 0), ("bf16", 3)])
def test_an_evaluation_by_weights_alone_has_the_engines_features_and_logits(precision, stage):
    train = {"precision": precision, "zero_stage": stage}
    (of_engine, alone), *_ = run_ranks(1, predictions, train)
    for expected, found in zip(of_engine, alone, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(expected, found)


def compiler_after_steps(rank: int) -> bool:
    for stage, kind, precision in itertools.product((0, 1, 2), ("", "sgd"), ("fp32", "bf16")):
        chosen = config(precision, stage, kind=kind)
        engine = build_engine(TrainConfig(**chosen["train"]), 1, 2, optim_of(chosen))
        run_steps(engine, 0, 2, 2)
        engine.close()
    return "torch._dynamo" in sys.modules


def test_steps_that_are_not_compiled_do_not_load_the_compiler():
    """It takes seconds. torch's optimizers import it at their first step, and DeepSpeed imports an
    optimizer that loads the compiler of kernels."""
    assert run_ranks(1, compiler_after_steps) == [False]


def averages_and_guard(rank: int) -> list[dict[str, Any]]:
    """By stage: averaged weights, sizes of layers' outputs, and a step poisoned on rank 0 alone."""
    found = []
    for stage in STAGES:
        train = TrainConfig(zero_stage=stage, precision="fp32", averaging=0.5)
        engine = build_engine(train, torch.distributed.get_world_size(), 4)
        run_steps(engine, 0, 3, 4)
        weights = [f.weight.clone() for f in engine.state.owned]
        plain: Any = engine._loss_function
        if engine.rank == 0:
            engine._loss_function = lambda *a: plain(*a) * float("nan")  # noqa: B023
        images, labels = batch(9)
        engine.backward(images[:4], labels[:4], labels[:4, 0])
        refused = engine.step(1e-2).refused
        pairs = zip(weights, engine.state.owned, strict=True)
        stayed = all(torch.equal(weight, f.weight) for weight, f in pairs)
        before = engine.predict(IMAGES)[1]
        with engine.averaged():
            inside = engine.predict(IMAGES)[1]
        lost = IMAGES.clone()
        lost[1, 0, 0, 0] = torch.nan
        found.append(
            {
                "poison": (bool(refused), stayed),
                "logits": [before, inside, engine.predict(IMAGES)[1]],
                "sizes": (engine.activation_sizes(IMAGES), engine.activation_sizes(lost)),
            }
        )
        engine.close()
    return found


@pytest.fixture(scope="module")
def behaviour() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_ranks(2, averages_and_guard)[0]
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_averages_are_polyaks_and_a_loss_that_is_not_finite_is_applied_on_no_rank(behaviour, stage):
    assert behaviour[stage]["poison"] == (True, True)
    before, inside, after = behaviour[stage]["logits"]
    average = small_model()
    # Factors of 0.5 are still less by the warm-up.
    for (model, _), factor in zip(
        plain_torch(small_model(), 3), (2 / 11, 3 / 12, 4 / 13), strict=True
    ):
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.mul_(factor).add_(p, alpha=1 - factor)
    expected = average.eval()(IMAGES).detach()
    torch.testing.assert_close(inside, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(before, after)
    assert not torch.allclose(before, inside)
    sizes, lost = behaviour[stage]["sizes"]
    names = list(sizes)
    assert names.index("blocks.0") < names.index("blocks.1") < names.index("head")
    largest = float(before.square().mean(1).sqrt().max())
    assert sizes["head"] == pytest.approx(largest, rel=1e-6)
    assert all(0 < size < 100 for size in sizes.values())
    assert all(size == float("inf") for size in lost.values())
