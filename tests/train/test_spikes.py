"""What counts as a spike, that a resumed run notes the same, and that a skipped step is none."""

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from tests.train.engine_runs import GLOBAL_BATCH, batch, build_engine
from tests.train.ranks import run_ranks
from tests.worker.fakes import BATCH, TOTAL, FakeEngine, FakeHooks, short_recipe, sum_of_one
from vit_ray.checkpoints.checkpoint import Position, Progress
from vit_ray.config.training_sections import TrainConfig
from vit_ray.measure.meters import Compute
from vit_ray.train.loop import Ending, RankContext, run_training
from vit_ray.train.spikes import (
    LEAST_STEPS,
    MOST_NEAR,
    THRESHOLD,
    WINDOW,
    Spike,
    Usual,
    note_step,
)

STEPS = 400


def curve(seed: int, num_steps: int = STEPS) -> np.ndarray:
    """A loss and a gradient norm for each step: the one falls, the other rises, both noisy."""
    random = np.random.default_rng(seed)
    steps = np.arange(num_steps)
    loss = (0.3 + 6.0 / (1.0 + steps / 40)) * random.lognormal(0.0, 0.1, num_steps)
    norm = (0.5 + 5.0 * steps / (steps + 60)) * random.lognormal(0.0, 0.35, num_steps)
    return np.stack([loss, norm], axis=1)


def taken(progress: Progress, loss: float, grad_norm: float) -> Spike | None:
    """One more step."""
    usual = Usual.of(progress)
    progress.step += 1
    return note_step(progress, usual, loss, grad_norm)


def noted(values: np.ndarray, progress: Progress | None = None) -> list[int]:
    progress = progress or Progress()
    return [step for step, row in enumerate(values.tolist()) if taken(progress, *row)]


def test_falling_losses_and_rising_gradients_are_no_spikes() -> None:
    assert [noted(curve(seed)) for seed in range(20)] == [[]] * 20


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("at", [LEAST_STEPS, 200, STEPS - 1])
def test_one_value_far_above_those_before_is_a_spike(column: int, at: int) -> None:
    values = curve(0)
    values[at, column] *= 20.0
    assert noted(values) == [at]


def test_nothing_is_judged_before_there_is_something_to_compare_with() -> None:
    values = curve(0)
    values[LEAST_STEPS - 1, 0] *= 100.0
    assert noted(values) == []


def test_z_is_that_of_scipy() -> None:
    values, progress = curve(3), Progress()
    values[-1] *= 30.0
    for row in values[:-1].tolist():
        taken(progress, *row)
    spike = taken(progress, *values[-1].tolist())
    assert spike is not None
    for judged, column in ((spike.loss, 0), (spike.grad_norm, 1)):
        window = np.log(values[-1 - WINDOW : -1, column])
        mad = scipy.stats.median_abs_deviation(window, scale="normal")
        assert judged.z is not None
        assert judged.z == pytest.approx((math.log(judged.value) - np.median(window)) / mad, 1e-3)
        assert judged.usual == pytest.approx(math.exp(np.median(window)))
        assert judged.z > THRESHOLD


def test_a_steady_curve_may_move_by_a_third() -> None:
    steady = np.ones((100, 2))
    assert noted(np.concatenate([steady, 1.34 * steady[:1]])) == []
    assert noted(np.concatenate([steady, 1.36 * steady[:1]])) == [100]


def test_a_loss_that_is_not_positive_is_not_judged() -> None:
    values = curve(0)
    values[::3, 0] = -1.0
    values[300, 0] = 0.0
    assert noted(values) == []
    values[300, 1] *= 20.0
    progress = Progress()
    spike = [taken(progress, *row) for row in values[:301].tolist()][-1]
    assert str(spike).startswith("loss 0, gradient norm ")


def test_the_limit_of_a_curve_as_wild_as_fp32_allows_is_a_number() -> None:
    usual = Usual.of(Progress(log_grad_norms=[-87.0, 87.0] * (WINDOW // 2)))
    assert usual.grad_norm_limit == pytest.approx(math.exp(88.0), 1e-6)  # and not exp(774)


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("factor", [3.0, 8.0, 20.0])
def test_a_level_that_lasts_is_three_spikes_and_then_the_usual(column: int, factor: float) -> None:
    for seed in range(20):
        values, progress = curve(seed), Progress()
        values[200:, column] *= factor
        values[300, column] *= 200.0  # which is far above the new level, too
        found = noted(values, progress)
        assert len(found) <= MOST_NEAR + 1, (seed, found)
        assert found[-1] == 300
        assert progress.spikes == len(found)


def test_spikes_far_from_each_other_are_all_noted() -> None:
    values, at = curve(0), list(range(100, STEPS, 20))
    values[at] *= 20.0
    assert noted(values) == at


def test_a_run_resumed_from_a_checkpoint_notes_the_same() -> None:
    values = curve(1)
    values[250] *= 25.0
    values[251] *= 25.0
    for at in (20, 249, 251):
        progress = Progress()
        first = noted(values[:at], progress)
        position = Position(progress, 0, 0, 8, {}, {}, "")
        saved = json.loads(json.dumps(position.to_json()))
        resumed = Position.from_json(saved).progress
        assert resumed == progress
        rest = [at + step for step in noted(values[at:], resumed)]
        assert first + rest == [250, 251]
        assert (resumed.spikes, resumed.recent_spikes) == (2, [251, 252])


def test_a_checkpoint_stays_small() -> None:
    progress = Progress()
    noted(curve(0), progress)
    assert len(json.dumps(asdict(progress))) < 6_000


def run(engine: FakeEngine, progress: Progress, **train: Any) -> FakeHooks:
    """A run in whose window every step so far had a loss and a gradient norm of about 1."""
    hooks = FakeHooks()
    recipe = short_recipe(train={"log_every_steps": 100, **train})
    context = RankContext(TOTAL, 0, 1, BATCH, sum_of_one)
    stream = (
        {
            "image": np.zeros((BATCH, 2, 2, 3), np.uint8),
            "labels": np.zeros((BATCH, 1), np.int32),
            "sample": np.ones(BATCH, np.int64),
        }
        for _ in range(TOTAL)
    )
    ending = run_training(engine, stream, recipe, context, hooks, progress, Compute(1))
    assert ending is Ending.FINISHED
    return hooks


def warm() -> Progress:
    return Progress(log_losses=[0.0] * LEAST_STEPS, log_grad_norms=[0.0] * LEAST_STEPS)


@pytest.mark.parametrize(("policy", "applied"), [(None, 10), ("rollback", 10), ("skip", 9)])
def test_skip_judges_a_step_before_it_is_applied(policy: str | None, applied: int) -> None:
    engine, progress = FakeEngine(norms={4: 50.0}), warm()
    hooks = run(engine, progress, on_spike=policy)
    ((step, spike),) = hooks.spikes
    assert (step, spike.grad_norm.value, spike.is_refused) == (5, 50.0, policy == "skip")
    assert engine.weight == applied
    assert hooks.refused == []  # which is for what is not finite
    assert (progress.spikes, progress.nonfinite_steps) == (1, 0)


def test_without_skip_the_engine_gets_no_limit() -> None:
    engine = FakeEngine()
    run(engine, warm())
    assert engine.limits == [None] * TOTAL


def test_at_most_three_steps_in_a_row_are_skipped() -> None:
    engine, progress = FakeEngine(norms=dict.fromkeys(range(2, TOTAL), 50.0)), warm()
    hooks = run(engine, progress, on_spike="skip")
    assert [spike.is_refused for _, spike in hooks.spikes] == [True] * 3
    assert engine.weight == TOTAL - MOST_NEAR


def test_a_step_that_is_not_finite_is_not_taken_for_a_spike() -> None:
    engine, progress = FakeEngine(norms={4: math.inf}, refused=(4,)), warm()
    hooks = run(engine, progress, on_spike="skip")
    assert (hooks.spikes, [step for step, _ in hooks.refused]) == ([], [5])
    assert len(progress.log_grad_norms) == LEAST_STEPS + TOTAL - 1


def test_a_spike_is_logged_at_its_step() -> None:
    hooks = run(FakeEngine(norms={4: 50.0}), warm())
    assert [step for step, _ in hooks.logged] == [1, 5, 10]
    assert [metrics["train/spikes"] for _, metrics in hooks.logged] == [0.0, 1.0, 1.0]
    assert hooks.logged[1][1]["train/grad_norm"] == 50.0


RANKS, MICRO, BIG = 2, 2, 2


def trained(rank: int, stage: int, numbers: list[int], limits: bool) -> dict[str, torch.Tensor]:
    """Weights after a step of each batch; with `limits`, that of `BIG` is below its norm."""
    engine = build_engine(
        TrainConfig(zero_stage=stage, precision="fp32", averaging=0.5), RANKS, MICRO
    )
    mine = slice(rank * GLOBAL_BATCH // RANKS, (rank + 1) * GLOBAL_BATCH // RANKS)
    refused = []
    for number in numbers:
        images, labels = (part[mine] for part in batch(number))
        samples = torch.arange(GLOBAL_BATCH)[mine]
        for part in zip(*(t.split(MICRO) for t in (images, labels, samples)), strict=True):
            engine.backward(*part, number)
        limit = (1e-4 if number == BIG else 1e4) if limits else None
        refused.append(float(engine.step(1e-2, limit).refused))
    assert refused == [float(limits and number == BIG) for number in numbers]
    weights = {name: p.detach().clone() for p, name in engine._names.items()}
    assert engine.average is not None
    for name, parts in engine.average.by_name().items():
        weights |= {f"average of {name} from {start}": values for start, values in parts}
    return weights


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_skipped_step_leaves_weights_as_if_its_batch_had_not_been_there(stage: int) -> None:
    skipped = run_ranks(RANKS, trained, stage, [0, 1, BIG, 3], True)
    without = run_ranks(RANKS, trained, stage, [0, 1, 3], False)
    for found, wanted in zip(skipped, without, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
