"""The loop on a list of batches and two fakes: no Ray, no DeepSpeed, no processes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from vit_ray.config import Recipe
from vit_ray.config.schema import recipe_from_dict
from vit_ray.measure.meters import Compute
from vit_ray.train.loop import Batch, RankContext, run_training
from vit_ray.train.progress import Progress

BATCH, MICRO, TOTAL = 8, 4, 10


@dataclass
class FakeResult:
    applied: bool = True
    grad_norm: float = 1.0


@dataclass
class FakeEngine:
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seen: list[list[int]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    refused: tuple[int, ...] = ()

    def backward(
        self, images: torch.Tensor, labels: torch.Tensor, samples: torch.Tensor
    ) -> torch.Tensor:
        assert images.dtype == torch.uint8
        self.seen.append(samples.tolist())
        self.noise.append(float(torch.rand(())))
        return samples.float().mean()

    def step(self, learning_rate: float) -> FakeResult:
        self.rates.append(learning_rate)
        return FakeResult(applied=len(self.rates) - 1 not in self.refused)


@dataclass
class FakeServices:
    losses: list[float] = field(default_factory=list)
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    refused: list[tuple[int, list[int]]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    save_at: int | None = None
    stop_at: int | None = None
    steps: int = 0

    def sum(self, values: list[float]) -> list[float]:
        return [float(v) for v in values]

    def max(self, values: list[float]) -> list[float]:
        return values

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged.append((step, metrics))

    def evaluate(self, step: int) -> dict[str, float]:
        self.order.append(f"evaluate {step}")
        return {"eval/loss": self.losses.pop(0)} if self.losses else {}

    def save(self, progress: Progress) -> None:
        self.order.append(f"save {progress.step}")
        self.saved.append(progress.step)

    def save_is_wanted(self) -> bool:
        self.steps += 1
        return self.steps == self.save_at

    def stop_reason(self) -> str | None:
        return "told to" if self.stop_at is not None and self.steps >= self.stop_at else None

    def nonfinite(self, progress: Progress, batch: Batch) -> None:
        self.refused.append((progress.step, batch["sample"].tolist()))


def recipe(**sections: dict[str, object]) -> Recipe:
    tree: dict[str, object] = {
        "name": "run",
        "optim": {"steps": TOTAL},
        "train": {"global_batch_size": BATCH, "log_every_steps": 5},
        "checkpoint": {"every_minutes": None},
    }
    return recipe_from_dict(tree, "test").with_changes(**sections)


def batches(first: int = 0) -> Iterator[dict[str, np.ndarray]]:
    for step in range(first, TOTAL):
        yield {
            "image": np.zeros((BATCH, 2, 2, 3), np.uint8),
            "labels": np.zeros((BATCH, 1), np.int32),
            "sample": np.arange(step * BATCH, (step + 1) * BATCH),
        }


def run(
    engine: FakeEngine, services: FakeServices, chosen: Recipe, progress: Progress | None = None
) -> str:
    progress = progress or Progress()
    length = RankContext(TOTAL, rank=0, world_size=1, micro_batch_size=MICRO)
    stream = batches(progress.step)
    return run_training(engine, stream, chosen, length, services, progress, Compute(1_000_000))


def test_each_micro_batch_is_passed_once_and_in_order() -> None:
    engine = FakeEngine()
    assert run(engine, FakeServices(), recipe()) == "finished"
    assert [s for part in engine.seen for s in part] == list(range(TOTAL * BATCH))
    assert all(len(part) == MICRO for part in engine.seen)
    assert len(engine.rates) == TOTAL


def test_the_loss_is_the_mean_over_the_micro_batches() -> None:
    services = FakeServices()
    run(FakeEngine(), services, recipe())
    step, metrics = services.logged[0]
    assert step == 1
    assert metrics["train/loss"] == pytest.approx(np.arange(BATCH).mean())


def test_it_logs_its_first_step_then_by_cadence_and_at_the_end() -> None:
    services = FakeServices()
    run(FakeEngine(), services, recipe(train={"log_every_steps": 4}))
    assert [step for step, _ in services.logged] == [1, 4, 8, 10]
    assert {"train/images_per_s", "data/wait_fraction", "perf/step_ms_max"} <= set(
        services.logged[-1][1]
    )


def test_random_numbers_of_a_step_do_not_depend_on_what_came_before() -> None:
    straight, resumed = FakeEngine(), FakeEngine()
    run(straight, FakeServices(), recipe())
    run(resumed, FakeServices(), recipe(), Progress(step=6))
    per_step = BATCH // MICRO
    assert resumed.noise == straight.noise[6 * per_step :]
    assert len(set(straight.noise)) == len(straight.noise)


def test_it_saves_by_steps_and_once_at_the_end() -> None:
    services = FakeServices()
    run(FakeEngine(), services, recipe(checkpoint={"every_steps": 5}))
    assert services.saved == [5, 10]


def test_it_saves_by_the_clock() -> None:
    services, now = FakeServices(), iter(range(0, 100_000, 7))
    length = RankContext(TOTAL, rank=0, world_size=1, micro_batch_size=MICRO)
    chosen = recipe(checkpoint={"every_minutes": 1.0})
    run_training(
        FakeEngine(), batches(), chosen, length, services, Progress(), Compute(1),
        clock=lambda: float(next(now)),
    )  # fmt: skip
    assert 2 <= len(services.saved) < TOTAL
    assert services.saved[-1] == TOTAL


def test_it_saves_at_once_when_a_rank_has_notice_and_goes_on() -> None:
    services = FakeServices(save_at=3)
    assert run(FakeEngine(), services, recipe()) == "finished"
    assert services.saved == [3, 10]


def test_it_saves_and_ends_when_told_to_stop() -> None:
    services = FakeServices(stop_at=4)
    assert run(FakeEngine(), services, recipe()) == "told to"
    assert services.saved == [4]


def test_notice_is_answered_before_an_evaluation() -> None:
    services = FakeServices(save_at=4)
    run(FakeEngine(), services, recipe(evaluate={"every_steps": 4}))
    wanted = ["save 4", "evaluate 4", "evaluate 8", "evaluate 10", "save 10"]
    assert services.order == wanted


def test_a_stop_does_not_wait_for_an_evaluation() -> None:
    services = FakeServices(stop_at=4)
    run(FakeEngine(), services, recipe(evaluate={"every_steps": 4}))
    assert services.order == ["save 4"]


def test_a_refused_step_is_reported_with_its_samples_and_counted_in_a_row() -> None:
    services, progress = FakeServices(), Progress()
    run(FakeEngine(refused=(2, 3)), services, recipe(), progress)
    assert [step for step, _ in services.refused] == [3, 4]
    assert services.refused[0][1] == list(range(2 * BATCH, 3 * BATCH))
    assert progress.nonfinite_steps == 0


def test_a_loss_that_is_not_finite_is_reported_too() -> None:
    class Poisoned(FakeEngine):
        def backward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return torch.tensor(math.nan)

    services = FakeServices()
    run(Poisoned(), services, recipe())
    assert len(services.refused) == TOTAL


def test_it_stops_early_when_validation_gets_no_better() -> None:
    services = FakeServices(losses=[3.0, 2.0, 2.5, 2.4, 1.0])
    chosen = recipe(evaluate={"every_steps": 2}, train={"early_stopping": 2})
    progress = Progress()
    reason = run(FakeEngine(), services, chosen, progress)
    assert "no better validation loss in 2 evaluations" in reason
    assert progress.step == 8
    assert progress.best_eval_loss == 2.0
    assert services.saved == [8]


def test_a_stream_that_ends_too_soon_is_an_error() -> None:
    length = RankContext(TOTAL + 1, rank=0, world_size=1, micro_batch_size=MICRO)
    with pytest.raises(RuntimeError, match="ended before step 10"):
        run_training(
            FakeEngine(), batches(), recipe(), length, FakeServices(), Progress(), Compute(1)
        )
