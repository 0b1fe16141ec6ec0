"""A run's record and control, engine and parts of a worker without Ray and without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.recipes import recipe_with
from vit_ray.checkpoints.checkpoint import Checkpoint, Position, Progress
from vit_ray.checkpoints.checkpoint_writer import CheckpointWriter, Snapshot, take_snapshot
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config import Recipe
from vit_ray.measure.meters import DeviceTimes
from vit_ray.outcomes import EventKind, RunFailedError, WorkerPlace
from vit_ray.storage import locate
from vit_ray.tracking.recorder import Orders
from vit_ray.training.loop import Batch, EvaluationCutError, RankContext, SkippedStep, StepResult
from vit_ray.worker.attempt import Attempt, reported_failures
from vit_ray.worker.evaluation import Evaluator
from vit_ray.worker.job import TrainJob
from vit_ray.worker.run_link import RunLink
from vit_ray.worker.saving import CheckpointSaver

BATCH, MICRO, TOTAL = 8, 4, 10


class FakeRun:
    """Record and control of a run, in this process: what was sent, and what is answered."""

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, str, int]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.files: dict[str, bytes] = {}
        self.failed: RunFailedError | None = None
        self.stop: str | None = None
        self.resizes = False
        self.at: dict[int, WorkerPlace] = {}

    def heartbeat(self, rank: int, step: int, place: WorkerPlace | None = None) -> Orders:
        return Orders(self.stop, self.resizes)

    def places(self) -> dict[int, WorkerPlace]:
        return self.at

    def hanging(self, rank: int, world_size: int, where: str, wait_s: float) -> str | None:
        return None

    def stop_reason(self) -> str | None:
        return self.stop

    def failure(self) -> RunFailedError | None:
        return self.failed

    def metrics(self, step: int, values: dict[str, float], again: bool = False) -> None:
        self.logged.append((step, values))

    def event(self, kind: EventKind, text: str, step: int, wait_s: float = 0.0) -> None:
        self.events.append((kind, text, step))

    def content(self, name: str, content: bytes, folder: str, wait_s: float) -> None:
        self.files[name] = content

    def fail(self, error: RunFailedError) -> None:
        self.failed = error

    def run_id(self, wait_s: float) -> str | None:
        return "run-id"


def sum_of_one(values: Any) -> list[float]:
    return [float(v) for v in values]


@dataclass
class FakeEngine:
    """Its one weight is the number of steps applied, its loss the mean of the sample numbers."""

    refused: tuple[int, ...] = ()
    on_backward: Callable[[int], None] = lambda step: None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    forward_times: DeviceTimes = field(default_factory=lambda: DeviceTimes(torch.device("cpu")))
    weight: float = 0.0
    average: Any = None
    is_averaged: bool = False
    is_closed: bool = False
    shapes: dict[str, list[int]] = field(default_factory=lambda: {"w": [1]})
    seen: list[list[int]] = field(default_factory=list)  # Samples of each pass, and below its step
    steps: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: dict[int, float] = field(default_factory=dict)
    """Gradient norms by step; the others are 1."""
    norm_limits: list[float] = field(default_factory=list)

    @property
    def applied_steps(self) -> int:
        return int(self.weight)

    def backward(
        self, images: torch.Tensor, labels: torch.Tensor, samples: torch.Tensor, step: int
    ) -> torch.Tensor:
        assert images.dtype == torch.uint8
        self.seen.append(samples.tolist())
        self.steps.append(step)
        self.on_backward(step)
        return samples.float().mean()

    def step(self, learning_rate: float, norm_limit: float) -> StepResult:
        self.rates.append(learning_rate)
        self.norm_limits.append(norm_limit)
        norm = self.norms.get(self.steps[-1], 1.0)
        if norm > norm_limit or self.steps[-1] in self.refused:
            return StepResult(1.0, norm)
        self.weight += 1
        return StepResult(0.0, norm)

    @property
    def state(self) -> FakeEngine:
        return self

    def snapshot(self, position: Position, memory: Any = None) -> Snapshot:
        weight = torch.tensor([self.weight])
        return take_snapshot([("weight", "w", 0, weight)], position, 0, 1, memory)

    def restore(self, checkpoint: Checkpoint) -> str:
        self.weight = float(checkpoint.weights()["w"])
        return ""

    def activation_sizes(self, images: torch.Tensor) -> dict[str, float]:
        return {"embedding": 1.0, "blocks.0": float("inf")}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self.is_averaged = True
        yield
        self.is_averaged = False

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeHooks:
    losses: list[float] = field(default_factory=list)
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    refused: list[tuple[int, list[int]]] = field(default_factory=list)
    skipped: list[tuple[int, list[int], float]] = field(default_factory=list)
    noted: list[int] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    save_at: int | None = None
    stop_at: int | None = None
    steps: int = 0
    cuts: list[bool] = field(default_factory=list)
    """Evaluations that are cut short, and whether to stop."""
    due: list[bool] = field(default_factory=list)  # At each save, whether an evaluation is due
    is_whole: bool = True  # What was saved before

    def note_step(self, step: int, wait_s: float) -> None:
        self.noted.append(step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged.append((step, metrics))

    def evaluate(self, step: int) -> dict[str, float]:
        self.order.append(f"evaluate {step}")
        if self.cuts:
            raise EvaluationCutError(is_stopping=self.cuts.pop(0))
        return {"eval/loss": self.losses.pop(0)} if self.losses else {}

    def save(self, progress: Progress) -> None:
        self.order.append(f"save {progress.step}")
        self.saved.append(progress.step)
        self.due.append(progress.evaluation_due)

    def add_evaluation(self, progress: Progress) -> bool:
        assert not progress.evaluation_due
        self.order.append(f"add {progress.step}")
        return self.is_whole

    def wishes(self, step: int) -> tuple[bool, bool]:
        self.steps += 1
        is_stopping = self.stop_at is not None and self.steps >= self.stop_at
        return self.steps == self.save_at, is_stopping

    def on_bad_step(self, progress: Progress, batch: Batch) -> None:
        self.refused.append((progress.step, batch["sample"].tolist()))

    def on_skipped_steps(
        self, progress: Progress, largest: SkippedStep, steps: Sequence[int]
    ) -> None:
        assert largest.step in steps
        self.order.append(f"name {progress.step}")
        self.skipped.append((progress.step, list(steps), largest.grad_norm))


CLASSES = tuple(f"class {index}" for index in range(10))


def short_recipe(**sections: Any) -> Recipe:
    """Of `TOTAL` steps without a clock."""
    return recipe_with(
        optim={"steps": TOTAL},
        train={"global_batch_size": BATCH, "log_every_steps": 100},
        checkpoint={"every_minutes": None},
    ).with_changes(**sections)


def make_job(folder: Path, kind: Any = "train", **sections: Any) -> TrainJob:
    recipe = short_recipe(**{"output": str(folder), **sections})
    return TrainJob(
        recipe, kind, 10, TOTAL, "print", "auto", 0, 0.0, FakeRun(), None,
        classes=CLASSES, num_evaluated={"eval": BATCH},
    )  # fmt: skip


def batches(first: int = 0) -> Iterator[dict[str, np.ndarray]]:
    for step in range(first, TOTAL):
        yield {
            "image": np.zeros((BATCH, 2, 2, 3), np.uint8),
            "labels": np.zeros((BATCH, 1), np.int32),
            "sample": np.arange(step * BATCH, (step + 1) * BATCH),
        }


class AloneAttempt(Attempt):
    """Of a rank without a process group and a cluster."""

    def save_is_wanted(self, step: int) -> bool:
        return False

    def _described(self, batch: Batch) -> str:
        return "Samples 1, 2."


@dataclass
class Worker:
    """A worker whose outside is fake and whose parts are real, apart from the engine."""

    job: TrainJob
    engine: FakeEngine = field(default_factory=FakeEngine)
    actor: FakeRun = field(default_factory=FakeRun)
    evaluation_batches: Callable[[str], Iterable[Any]] = lambda name: []
    rank: int = 0

    def __post_init__(self) -> None:
        self.link = RunLink(self.actor, self.rank)
        folder = locate(self.job.recipe.run_folder)
        writer = CheckpointWriter(
            folder, self.job.recipe.checkpoint, self.actor.event, self.job.lock_number,
            resumed=newest_checkpoint(folder),
        )  # fmt: skip
        engine: Any = self.engine
        self.saver = CheckpointSaver(self.job, engine, writer, self.link, lambda write: write())
        streams: Any = SimpleNamespace(
            evaluation_batches=lambda name, size: self.evaluation_batches(name)
        )
        evaluator = Evaluator(self.job, engine, streams, self.link)
        context = RankContext(TOTAL, self.rank, 1, MICRO, sum_of_one)
        self.hooks = AloneAttempt(
            self.job, context, self.link, engine, batches(), evaluator, self.saver,
            Progress(),
        )  # fmt: skip

    def attempt(self, start_step: int = 0) -> Attempt:
        """At the start of the run, or where `start_step` says."""
        self.hooks.progress, self.hooks.batches = Progress(step=start_step), batches(start_step)
        return self.hooks

    def run(self, start_step: int = 0) -> None:
        with reported_failures(self.link):
            self.attempt(start_step).run()

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.actor.events]
