"""Models and optimizers of a user's own, under every ZeRO stage and through a checkpoint."""

from typing import Any

import pytest
import torch

from tests.training.engine_runs import (
    GLOBAL_BATCH,
    Run,
    StraightRuns,
    build_engine,
    finished,
    resumed,
    run_steps,
    small_model,
    straight_and_saved,
)
from tests.training.ranks import run_ranks
from vit_ray import trust_modules
from vit_ray.config.training_sections import TrainConfig

OPTIM = {"learning_rate": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}


def config(name: str, stage: int) -> dict[str, Any]:
    train = {"zero_stage": stage, "precision": "fp32", "averaging": 0.9}
    optim = {**OPTIM, "name": name}
    return {"name": f"{name}-{stage}", "micro": GLOBAL_BATCH // 4, "train": train, "optim": optim}


LION = [config("tests.parts.lion", stage) for stage in range(4)]
ADAMW = [config(name, stage) for name in ("tests.parts.adamw", "adamw") for stage in range(4)]


def trusting(rank: int, what: Any, *arguments: Any) -> dict[Any, Run]:
    trust_modules("tests.parts")
    found: dict[Any, Run] = what(rank, *arguments)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("own_optimizers"))


def trained(rank: int, *arguments: Any) -> dict[Any, Run]:
    return trusting(rank, straight_and_saved, *arguments)


@pytest.fixture(scope="module")
def straight(folder: str) -> StraightRuns:
    return StraightRuns(folder, trained)


def of_plain_and_wrapped(rank: int, stage: Any) -> list[Run]:
    """Our ViT alone and in a user's module; recomputed."""
    trust_modules("tests.parts")
    train = TrainConfig(
        zero_stage=stage, precision="bf16", averaging=0.9, activation_checkpointing=1
    )
    found = []
    for name in ("ViT", "tests.parts.Wrapped"):
        engine = build_engine(train, 2, 2, model=small_model(name))
        found.append(finished(engine, run_steps(engine, 0, 3, 2)))
    return found


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("stage", [3, 0])
def test_our_model_in_a_users_module_trains_as_alone_under_every_stage(stage):
    ours, own = run_ranks(2, of_plain_and_wrapped, stage)[0]
    assert own.losses == ours.losses
    assert torch.equal(own.averaged, ours.averaged)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("stage", [2, 3])
def test_adamw_from_a_users_module_trains_as_the_built_in_one(straight, stage):
    pair = [ADAMW[stage], ADAMW[4 + stage]]
    own, ours = straight.of(2, pair).values()
    assert own.losses == pytest.approx(ours.losses, rel=1e-5)
    assert own.losses[0] != pytest.approx(own.losses[-1], rel=1e-3)


@pytest.mark.parametrize("stage", range(1, 4))
def test_it_trains_alike_under_every_stage(straight, stage):
    expected, *others = straight.of(2, LION).values()
    # Signs of tiny momenta may differ, which the sums over ranks round in another order.
    assert others[stage - 1].losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_and_under_another_stage(straight, folder):
    expected = straight.of(2, LION)
    same = [{**c, "from": f"2/{c['name']}"} for c in LION]
    others = [{**c, "from": f"2/{LION[(n + 2) % 4]['name']}"} for n, c in enumerate(LION)]
    for (name, source), run in run_ranks(2, trusting, resumed, same + others, folder)[0].items():
        whole = expected[source.removeprefix("2/")]
        if source == f"2/{name}":
            assert run.losses == whole.losses[2:], name
            assert torch.equal(run.averaged, whole.averaged), name
        assert run.losses == pytest.approx(whole.losses[2:], rel=1e-4), (name, source)
