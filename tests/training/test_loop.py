"""The loop on a list of batches and two fakes, and a step that two real ranks skip together."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.engine_runs import GLOBAL_BATCH, batch, build_engine
from tests.training.ranks import run_ranks
from tests.worker.fakes import (
    BATCH,
    MICRO,
    TOTAL,
    FakeEngine,
    FakeHooks,
    FakeRun,
    batches,
    short_recipe,
    sum_of_one,
)
from vit_ray.checkpoints.checkpoint import Progress, add_digests, samples_digest
from vit_ray.config import Recipe
from vit_ray.config.training_sections import TrainConfig
from vit_ray.measure.meters import Compute
from vit_ray.measure.phases import PhaseClock
from vit_ray.metric_names import RESULT_EVALUATIONS, RESULT_STEP, with_best
from vit_ray.training import loop
from vit_ray.training.collectives import all_sum
from vit_ray.training.loop import RankContext, TrainingLoop
from vit_ray.worker.attempt import Attempt
from vit_ray.worker.run_link import RunLink


def run(
    engine: FakeEngine, hooks: FakeHooks, chosen: Recipe, progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter, stream: Any = None, **context: Any,
) -> Progress:  # fmt: skip
    progress = progress or Progress()
    place = replace(RankContext(TOTAL, 0, 1, MICRO, sum_of_one), **context)
    stream = stream or batches(progress.step)
    TrainingLoop(engine, stream, chosen, place, hooks, progress, Compute(1), clock).run()
    return progress


def test_each_micro_batch_is_passed_once_in_order_with_its_step():
    engine, hooks = FakeEngine(), FakeHooks()
    assert run(engine, hooks, short_recipe(), Progress(step=7)).is_over(TOTAL)
    assert [s for part in engine.seen for s in part] == list(range(7 * BATCH, TOTAL * BATCH))
    assert all(len(part) == MICRO for part in engine.seen)
    assert engine.steps == [7, 7, 8, 8, 9, 9]
    assert len(engine.rates) == len(hooks.noted) == 3
    assert hooks.noted == [8, 9, 10]


@pytest.mark.parametrize("count", [0, MICRO, BATCH - 1, 2 * BATCH])
def test_no_step_is_taken_with_a_share_of_another_size(count):
    engine = FakeEngine()
    stream = ({k: np.resize(v, (count, *v.shape[1:])) for k, v in b.items()} for b in batches())
    with pytest.raises(RuntimeError, match=f"{count} images .* share of {BATCH};"):
        run(engine, FakeHooks(), short_recipe(), stream=stream)
    assert engine.seen == engine.rates == []
    with pytest.raises(RuntimeError, match="step 10: 0 images"):
        run(FakeEngine(), FakeHooks(), short_recipe(), total_steps=TOTAL + 1)


class Evaluated(FakeHooks):
    """Of which a function tells the figures."""

    def __init__(self, figures: Callable[[int], dict[str, float]]) -> None:
        super().__init__()
        self.figures = figures

    def evaluate(self, step: int) -> dict[str, float]:
        self.order.append(f"evaluate {step}")
        return self.figures(step)


def test_a_run_that_is_evaluated_at_further_steps_trains_the_same_and_ends_as_early():
    # Better at the further steps than anywhere else.
    losses = {3: 0.1, 4: 2.0, 7: 0.2, 8: 1.5, 10: 1.8}
    alone, hooks = (Evaluated(lambda step: {"eval/loss": losses[step]}) for _ in range(2))
    chosen = short_recipe(evaluate={"every_steps": 4}, train={"early_stopping": 1})
    whole, followed, end, same = FakeEngine(), FakeEngine(), Progress(), Progress()
    assert run(whole, alone, chosen, end).ended
    assert (end.step, end.best_eval_loss) == (10, 1.5)
    assert run(followed, hooks, chosen, same, evaluate_at=(3, 7)).ended
    assert (followed.seen, followed.steps, followed.rates) == (whole.seen, whole.steps, whole.rates)
    evaluated = [one for one in hooks.order if "evaluate" in one]
    assert evaluated == [f"evaluate {step}" for step in losses]
    assert not {3, 7} & {*hooks.saved}
    same.train_seconds, same.metrics = end.train_seconds, end.metrics
    same.worker_seconds = end.worker_seconds
    assert same == end


@pytest.mark.parametrize(("factor", "best"), [(-0.1, 1.0), (0.1, 2.2)])
def test_where_weights_are_averaged_they_stop_a_run_early(factor, best):
    """They become better while the last ones become worse, or the other way."""
    progress = Progress()
    hooks = Evaluated(
        lambda step: {"eval/loss": 1 - step * factor, "eval/averaged_loss": 2 + step * factor}
    )
    chosen = short_recipe(evaluate={"every_steps": 2}, train={"early_stopping": 2})
    run(FakeEngine(), hooks, chosen, progress)
    assert progress.best_eval_loss == pytest.approx(best)
    assert bool(progress.ended) == (factor > 0)


def test_losses_of_averages_that_are_made_no_longer_decide_nothing():
    progress = Progress(
        best_eval_loss=0.1, best_loss_key="eval/averaged_loss", evals_without_best=1,
        metrics={"eval/averaged_loss": 0.1, "train/loss": 3.0},
    )  # fmt: skip
    chosen = short_recipe(evaluate={"every_steps": 5}, train={"early_stopping": 2})
    run(FakeEngine(), FakeHooks(losses=[1.0, 0.5]), chosen, progress)
    assert (progress.step, progress.ended) == (TOTAL, "")
    assert (progress.best_eval_loss, progress.best_loss_key) == (0.5, "eval/loss")
    assert "eval/averaged_loss" not in progress.metrics
    assert "train/loss" in progress.metrics


def test_figures_are_of_all_ranks_and_the_slow_one_is_named():
    def sum_of_two(values: Any) -> list[float]:
        """The other's loss is larger by 2 and its norm by 6, and its own work takes 9 s."""
        mine = [float(value) for value in values]
        if len(mine) == 4 * 2:  # whole steps, waits, own time, memory
            others = [0.0, 2.0, 0.0, 0.5, 0.0, 9.0, 0.0, 1.0]
        else:
            others = [one + {0: 2.0, 2: 6.0}.get(i, 0.0) for i, one in enumerate(mine)]
        return [sum(pair) for pair in zip(mine, others, strict=True)]

    hooks, mine, ticks = FakeHooks(), BATCH // 2, itertools.count()
    stream = ({name: rows[:mine] for name, rows in batch.items()} for batch in batches())
    run(
        FakeEngine(), hooks, short_recipe(), Progress(), lambda: float(next(ticks)), stream,
        world_size=2, micro_batch_size=mine, all_sum=sum_of_two,
    )  # fmt: skip
    found = hooks.logged[0][1]
    assert found["train/loss"] == np.arange(mine).mean() + 1.0
    assert found["train/grad_norm"] == 1.0 + 3.0
    assert found["perf/slowest_rank"] == 1
    assert found["perf/own_ms_max"] == 9e3
    assert found["perf/own_ms_median"] < 9e3


def test_the_digest_of_a_run_is_of_all_ranks_samples():
    """Also of those in refused steps. For each rank, the sum over both is twice its own digest."""
    mine, found = BATCH // 2, []
    twice = {"world_size": 2, "all_sum": lambda values: [2 * float(one) for one in values]}
    for rank in (0, 1):
        stream = ({k: v[rank * mine :][:mine] for k, v in batch.items()} for batch in batches())
        progress = Progress()
        engine = FakeEngine(refused=(0, 5, TOTAL - 1))
        run(engine, FakeHooks(), short_recipe(), progress, stream=stream, rank=rank, **twice)
        found.append(progress.samples_digest)
    expected = samples_digest(0, np.arange(TOTAL * BATCH))
    assert add_digests(*found) == add_digests(expected, expected)


def test_it_saves_by_the_clock():
    hooks, now = FakeHooks(), iter(range(0, 100_000, 7))
    chosen = short_recipe(checkpoint={"every_minutes": 1.0})
    run(FakeEngine(), hooks, chosen, clock=lambda: float(next(now)))
    assert 2 <= len(hooks.saved) < TOTAL
    assert hooks.saved[-1] == TOTAL


@pytest.mark.parametrize(("every", "logged"), [(50, [1, 4, 8, 10]), (6, [1, 4, 6, 10])])
def test_a_run_that_is_shorter_than_the_cadence_is_logged_a_few_times(every, logged):
    hooks = FakeHooks()
    run(FakeEngine(), hooks, short_recipe(train={"log_every_steps": every}))
    assert [step for step, metrics in hooks.logged if "train/loss" in metrics] == logged


def test_the_wait_for_data_is_one_figure_in_metrics_and_in_the_phases_of_a_run():
    now_s = [0.0]
    phases = PhaseClock(lambda: now_s[0])

    class Hooks(FakeHooks):
        def note_step(self, step: int, wait_s: float) -> None:
            phases.note_step(wait_s)

    def pass_s(seconds: float) -> None:
        now_s[0] += seconds

    hooks, engine = Hooks(), FakeEngine(on_backward=lambda _: pass_s(1.0))
    stream = (pass_s(0.5) or one for one in batches())
    chosen = short_recipe(train={"log_every_steps": 1})
    run(engine, hooks, chosen, clock=lambda: now_s[0], stream=stream)
    found = [metrics for _, metrics in hooks.logged if "data/wait_fraction" in metrics]
    waited_s = [one["data/wait_fraction"] * one["perf/step_ms_median"] / 1e3 for one in found]
    assert waited_s == pytest.approx([0.5] * TOTAL)
    # The first step's wait is a part of the start.
    assert phases.spent()[0]["data_wait"] == pytest.approx(sum(waited_s[1:]))


def test_core_days_are_of_all_seconds_on_all_workers_whatever_the_last_speed():
    hooks, progress, ticks = FakeHooks(), Progress(), itertools.count()
    for world_size, until in ((4, 5), (2, TOTAL)):
        share = BATCH // world_size
        run(
            FakeEngine(), hooks, short_recipe(), progress, lambda: float(next(ticks)),
            ({k: v[:share] for k, v in one.items()} for one in batches()),
            world_size=world_size, total_steps=until, micro_batch_size=share,
        )  # fmt: skip
    first = progress.train_seconds / 2  # five steps each, by a clock of steps that last alike
    assert first > 0
    days = (4 * first + 2 * first) / 86_400
    assert progress.metrics["cost/core_days"] == pytest.approx(days)
    assert hooks.logged[-1][1]["cost/core_days"] == pytest.approx(days)


def test_it_stops_early_when_validation_gets_no_better():
    hooks = FakeHooks(losses=[3.0, 2.0, 2.5, 2.4, 1.0])
    chosen = short_recipe(evaluate={"every_steps": 2}, train={"early_stopping": 2})
    progress = Progress()
    run(FakeEngine(), hooks, chosen, progress)
    assert progress.ended == "no better validation loss in 2 evaluations"
    assert progress.step == 8
    assert progress.best_eval_loss == 2.0
    assert hooks.saved == [2, 4, 8]  # each best, and the end


KEPT = [{"train": {"early_stopping": 3}}, {"checkpoint": {"keep_best": True}}]


@pytest.mark.parametrize("kept", KEPT)
def test_the_best_evaluation_is_the_result_and_the_last_is_told_beside_it(kept):
    progress, known = Progress(), []

    class Looking(FakeHooks):
        def log(self, step: int, metrics: dict[str, float]) -> None:
            super().log(step, metrics)
            if "eval/best_loss" in metrics:
                known.append((metrics["eval/best_loss"], progress.best_eval_loss))

    hooks = Looking(losses=[3.0, 2.0, 2.5])
    run(FakeEngine(), hooks, short_recipe(evaluate={"every_steps": 4}, **kept), progress)
    assert known == [(3.0, 3.0), (2.0, 2.0)]
    assert progress.metrics[RESULT_STEP] == 8
    assert progress.metrics[RESULT_EVALUATIONS] == 3
    found = with_best(progress.metrics)
    assert (found["eval/loss"], found["eval/last_loss"]) == (2.0, 2.5)
    assert found["train/loss"] == progress.metrics["train/loss"]
    logged = {key: value for _, metrics in hooks.logged for key, value in metrics.items()}
    assert logged["eval/best_loss"] == 2.0
    assert logged["eval/loss"] == 2.5  # the curve is as it was measured


def test_a_run_that_goes_on_without_its_best_forgets_that():
    progress = Progress(
        metrics={"eval/best_loss": 0.1, RESULT_STEP: 1.0, RESULT_EVALUATIONS: 2.0, "a/b": 1.0}
    )
    chosen = short_recipe(evaluate={"every_steps": TOTAL})
    run(FakeEngine(), FakeHooks(losses=[3.0]), chosen, progress)
    assert not {"eval/best_loss", RESULT_STEP, RESULT_EVALUATIONS} & progress.metrics.keys()
    assert progress.metrics["a/b"] == 1.0


def test_the_best_is_chosen_on_held_out_images_where_there_are_any_beside_a_test_set():
    progress = Progress()
    hooks = Evaluated(lambda step: {"dev/loss": abs(step - 8) + 1.0, "eval/loss": 9.0 - step})
    chosen = short_recipe(evaluate={"every_steps": 4}, checkpoint={"keep_best": True})
    run(FakeEngine(), hooks, chosen, progress)
    assert (progress.metrics[RESULT_STEP], progress.best_loss_key) == (8, "dev/loss")
    assert with_best(progress.metrics)["eval/loss"] == 1.0


def test_steps_of_large_norms_are_skipped_counted_and_named_at_the_next_log(monkeypatch):
    monkeypatch.setattr(loop, "NORMS_IN_MEDIAN", 8)  # of which a quarter must be known
    chosen = short_recipe(train={"skip_above": 4.0, "log_every_steps": 3})
    norms = {0: 90.0, 4: 4.5, 5: 3.5, 7: 50.0, 8: 60.0}

    def run_from(progress: Progress, hooks: FakeHooks) -> FakeEngine:
        engine = FakeEngine(norms=norms)
        run(engine, hooks, chosen, progress)
        return engine

    hooks, stopped, half = FakeHooks(), FakeHooks(stop_at=5), Progress()
    engine = run_from(Progress(), hooks)
    assert engine.weight == TOTAL - 3
    assert hooks.skipped == [(6, [4], 4.5), (9, [7, 8], 60.0)]
    assert hooks.refused == []
    counts = [metrics.get("train/skipped_steps") for _, metrics in hooks.logged]
    assert counts == [0.0, 0.0, 1.0, 3.0, 3.0]
    before = [[norms.get(k, 1.0) for k in range(max(0, n - 8), n)] for n in range(TOTAL)]
    limits = [math.inf if len(known) < 2 else 4.0 * np.median(known) for known in before]
    assert engine.norm_limits == pytest.approx(limits)
    first = run_from(half, stopped)
    assert half.step == 5
    assert stopped.skipped == [(5, [4], 4.5)]  # between two logs
    assert first.norm_limits + run_from(half, FakeHooks()).norm_limits == engine.norm_limits


@pytest.mark.parametrize(
    ("hooks", "sections"),
    [
        ({"stop_at": 6}, {}),
        ({"save_at": 6}, {}),
        ({"cuts": [True]}, {"evaluate": {"every_steps": 6}}),
        (
            {"losses": [1.0, 2.0]},
            {"evaluate": {"every_steps": 3}, "train": {"early_stopping": 1, "skip_above": 4.0}},
        ),
    ],
    ids=["stopped", "saved", "cut", "early"],
)
def test_a_skipped_step_is_named_before_a_checkpoint_counts_it(hooks, sections, monkeypatch):
    monkeypatch.setattr(loop, "NORMS_IN_MEDIAN", 8)
    found, engine = FakeHooks(**hooks), FakeEngine(norms={4: 9.0})
    run(engine, found, short_recipe(**{"train": {"skip_above": 4.0}, **sections}))
    assert 6 in found.saved
    assert found.skipped == [(6, [4], 9.0)]
    assert found.order.index("name 6") < found.order.index("save 6")
    assert 6 not in [step for step, metrics in found.logged if "train/loss" in metrics]


EVERY_4 = {"evaluate": {"every_steps": 4}}
BEST = {"checkpoint": {"keep_best": True}}
LAST = [f"save {TOTAL}", f"evaluate {TOTAL}", f"add {TOTAL}"]


@pytest.mark.parametrize(
    ("hooks", "sections", "progress", "order"),
    [
        ({}, {"checkpoint": {"every_steps": 5}}, {}, ["save 5", f"save {TOTAL}"]),
        ({"save_at": 3}, {}, {}, ["save 3", f"save {TOTAL}"]),
        # Notice comes before an evaluation, or in the middle of it.
        ({"save_at": 4}, EVERY_4, {}, ["save 4", "evaluate 4", "evaluate 8"]),
        ({"cuts": [False]}, EVERY_4, {}, ["evaluate 4", "save 4", "evaluate 8"]),
        ({"save_at": 4, "cuts": [False]}, EVERY_4, {}, ["save 4", "evaluate 4", "evaluate 8"]),
        # At the last step the checkpoint comes first, and notice does not end the evaluation.
        ({"losses": [0.5], "cuts": [False, False]}, {}, {}, [LAST[0], *[LAST[1]] * 3, LAST[2]]),
        ({"losses": [0.5], "save_at": TOTAL}, {}, {}, LAST),
        # Lengthened after a stop in what was its last evaluation.
        ({"losses": [0.5]}, {}, {"step": TOTAL // 2, "evaluation_due": True}, LAST),
        # The best that was saved before its evaluation is not written again.
        (
            {"losses": [0.5, 0.6, 0.7], "save_at": 4},
            EVERY_4 | BEST,
            {},
            ["save 4", "evaluate 4", "add 4", "evaluate 8", *LAST],
        ),
        # A save of the last step that is not whole is made again after the evaluation.
        (
            {"losses": [0.5], "is_whole": False},
            {},
            {"step": TOTAL, "evaluation_due": True},
            [*LAST[1:], LAST[0]],
        ),
    ],
)
def test_checkpoints_by_cadence_and_at_notice_come_before_evaluations(
    hooks, sections, progress, order
):
    found, at = FakeHooks(**hooks), Progress(**progress)
    run(FakeEngine(), found, short_recipe(**sections), at)
    assert found.order[: len(order)] == order
    assert at.is_over(TOTAL)
    if order == LAST:
        assert found.due == [True]  # it is there if the evaluation dies


@pytest.mark.parametrize(
    ("hooks", "sections", "order"),
    [
        ({"stop_at": 4}, {}, ["save 4"]),
        ({"stop_at": 4}, EVERY_4, ["save 4"]),  # it does not wait for an evaluation
        ({"cuts": [True]}, EVERY_4, ["evaluate 4", "save 4"]),
    ],
)
def test_a_run_that_is_stopped_saves_its_step_and_is_not_over(hooks, sections, order):
    found, progress = FakeHooks(**hooks), Progress()
    run(FakeEngine(), found, short_recipe(**sections), progress)
    assert found.order == order
    assert not progress.is_over(TOTAL)


RANKS, BAD, PASS = 2, 2, 2
SHARE = GLOBAL_BATCH // RANKS
CPU = torch.device("cpu")


def batches_of(rank: int, numbers: list[int]) -> Iterator[dict[str, Any]]:
    mine = slice(rank * SHARE, (rank + 1) * SHARE)
    for number in numbers:
        images, labels = (part[mine].numpy() for part in batch(number))
        samples = torch.arange(GLOBAL_BATCH)[mine].numpy() + number * GLOBAL_BATCH
        yield {"image": images, "labels": labels, "sample": samples}


def train_on(
    rank: int, train: TrainConfig, numbers: list[int], factor: float
) -> tuple[dict[str, torch.Tensor], list[tuple[str, str, int]], Progress]:
    """Weights and averages, history and position after a step of each batch; rank 1's loss in step
    `BAD` is multiplied."""
    loop.NORMS_IN_MEDIAN = 8  # type: ignore[misc]
    engine = build_engine(train, RANKS, PASS)
    plain, actor = engine._loss_function, FakeRun()

    def loss(module: Any, images: Any, labels: Any, samples: Any, step: int) -> torch.Tensor:
        value: torch.Tensor = plain(module, images, labels, samples, step)
        return value * factor if (rank, step) == (1, BAD) else value

    class Hooks(FakeHooks):
        link = RunLink(actor, rank)  # type: ignore[arg-type]
        context = RankContext(len(numbers), rank, RANKS, PASS, partial(all_sum, device=CPU))
        job: Any = SimpleNamespace(recipe=SimpleNamespace(train=train))
        on_bad_step: Any = Attempt.on_bad_step
        on_skipped_steps: Any = Attempt.on_skipped_steps
        _described: Any = Attempt._described

    hooks: Any = Hooks()
    hooks.engine = engine
    engine._loss_function = loss  # type: ignore[assignment]
    chosen = short_recipe(
        optim={"steps": len(numbers), "schedule": "constant", "warmup_steps": 0},
        train={"global_batch_size": GLOBAL_BATCH, "skip_above": train.skip_above},
    )
    progress, stream = Progress(), batches_of(rank, numbers)
    TrainingLoop(engine, stream, chosen, hooks.context, hooks, progress, Compute(1)).run()
    assert progress.is_over(len(numbers))
    weights = {name: p.detach().clone() for p, name in engine._names.items()}
    for _, name, start, values in engine.average.entries():
        weights[f"average of {name} from {start}"] = values
    return weights, actor.events, progress


@pytest.mark.parametrize(("kind", "stage"), [("not finite", 0), ("step skipped", 2)])
def test_a_bad_step_is_skipped_by_all_ranks_as_if_its_batch_had_not_been_there(kind, stage):
    bad_factor, skip_above = (float("nan"), None) if kind == "not finite" else (1e3, 20.0)
    train = TrainConfig(
        zero_stage=stage, precision="fp32", averaging=0.5, nonfinite="skip", skip_above=skip_above
    )
    skipped = run_ranks(RANKS, train_on, train, [0, 1, BAD, 3, 4], bad_factor)
    without = run_ranks(RANKS, train_on, train, [0, 1, 3, 4], 1.0)
    for (weights, _, progress), (wanted, _, _) in zip(skipped, without, strict=True):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
        assert (progress.step, progress.nonfinite_steps) == (5, 0)
        assert progress.skipped_steps == (kind == "step skipped")
    ((found, text, step),) = skipped[0][1]
    # A step that is skipped by its norm is named at the next log, here after step 4.
    assert (found, step) == (kind, BAD + 1 if kind == "not finite" else 4)
    assert f"of step {BAD} is" in text
    samples = ", ".join(str(n) for n in range(BAD * GLOBAL_BATCH, (BAD + 1) * GLOBAL_BATCH))
    assert f"Samples {samples}. Activations are finite when" in text  # of both ranks
