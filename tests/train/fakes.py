"""A run's actor, engine and parts of a worker without Ray and without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vit_ray.config.schema import recipe_from_dict
from vit_ray.outcomes import EventKind, Failure
from vit_ray.storage import locate
from vit_ray.train.attempt import Attempt, WorkerHooks
from vit_ray.train.checkpoint import Checkpoint, Position, Snapshot
from vit_ray.train.checkpoint_writer import CheckpointWriter
from vit_ray.train.evaluation import Evaluator
from vit_ray.train.job import TrainJob
from vit_ray.train.loop import RankContext
from vit_ray.train.nonfinite import NonfinitePolicy
from vit_ray.train.progress import Progress
from vit_ray.train.run_link import RunActor, RunLink
from vit_ray.train.saving import CheckpointSaver
from vit_ray.train.watchdog import Watchdog

BATCH, MICRO, TOTAL = 8, 4, 6


class FakeActor(RunActor):
    """The actor's part, in this process: what it was sent, and what it answers."""

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, str, int]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.beats: list[tuple[int, int]] = []
        self.files: dict[str, bytes] = {}
        self.failure: Failure | None = None
        self.stop: str | None = None
        self.saves = 0

    def poll(self, rank: int, step: int) -> tuple[str | None, int]:
        self.beats.append((rank, step))
        return self.stop, self.saves

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.logged.append((step, values))

    def event(self, kind: EventKind, text: str, step: int) -> None:
        self.events.append((kind, text, step))

    def content(self, name: str, content: bytes, folder: str) -> None:
        self.files[name] = content

    def fail(self, failure: Failure) -> None:
        self.failure = failure

    def run_id(self) -> str | None:
        return "run-id"


class DirectLink(RunLink):
    """A link that calls the actor instead of sending to it."""

    def _call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._actor, method.__name__)(*args, **kwargs)

    _send = _call

    def beat(self, step: int) -> None:
        self.stop_reason, self._saves_requested = self._actor.poll(self.rank, step)
        if self._saves_seen is None:
            self._saves_seen = self._saves_requested

    def tracking_run_id(self) -> str | None:
        return self._actor.run_id() if self.rank == 0 else None

    def note_hang(self, text: str, step: int) -> None:
        self._actor.event(EventKind.HUNG, f"worker {self.rank}: {text}", step)


class OneRank:
    """Collectives of a group of one."""

    def sum(self, values: Any) -> list[float]:
        return [float(v) for v in values]

    max = sum


@dataclass
class Stepped:
    refused: float = 0.0
    grad_norm: float = 1.0


@dataclass
class FakeEngine:
    """Its one weight is the number of steps applied."""

    refused: tuple[int, ...] = ()
    on_backward: Callable[[int], None] = lambda step: None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    weight: float = 0.0
    average: Any = None
    is_closed: bool = False
    restored: list[int] = field(default_factory=list)
    shapes: dict[str, list[int]] = field(default_factory=lambda: {"w": [1]})
    step_index: int = 0

    @property
    def applied_steps(self) -> int:
        return int(self.weight)

    def backward(self, *batch: Any) -> torch.Tensor:
        self.step_index = batch[-1]
        self.on_backward(self.step_index)
        return torch.tensor(1.0)

    def step(self, learning_rate: float) -> Stepped:
        if self.step_index in self.refused:
            return Stepped(refused=1.0)
        self.weight += 1
        return Stepped()

    def take_forward_s(self) -> float:
        return 0.001

    def snapshot(self, position: Position) -> Snapshot:
        return Snapshot(0, 1, {"weight|w|0": torch.tensor([self.weight])}, position)

    def restore(self, checkpoint: Checkpoint) -> None:
        self.weight = float(checkpoint.weights()["w"])
        self.restored.append(checkpoint.position.step)

    def activation_sizes(self, images: torch.Tensor) -> dict[str, float]:
        return {"embedding": 1.0, "blocks.0": float("inf")}

    def weight_norms(self) -> dict[str, float]:
        return {"head.weight": 2.0, "head.bias": 3.0}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        self.is_closed = True


def make_job(folder: Path, kind: Any = "train", **sections: Any) -> TrainJob:
    """A run of a few steps below `folder`."""
    tree = {
        "name": "run",
        "output": str(folder),
        "optim": {"steps": TOTAL},
        "train": {"global_batch_size": BATCH, "log_every_steps": 100},
        "checkpoint": {"every_minutes": None},
    }
    recipe = recipe_from_dict(tree, "test").with_changes(**sections)
    return TrainJob(
        recipe, kind, 10, 100, TOTAL, "print", recipe.run_folder, "auto", 0, 0.0, None,
        None, lambda bad: None,
    )  # fmt: skip


def batches(first: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """One of 8 images for each step from `first` on."""
    for step in range(first, TOTAL):
        yield {
            "image": np.zeros((BATCH, 2, 2, 3), np.uint8),
            "labels": np.zeros((BATCH, 1), np.int32),
            "sample": np.arange(step * BATCH, (step + 1) * BATCH),
        }


def write_now(write: Callable[[], None]) -> None:
    """Without a thread."""
    write()


@dataclass
class Worker:
    """A worker whose outside is fake and whose parts are real, apart from the engine."""

    job: TrainJob
    engine: FakeEngine = field(default_factory=FakeEngine)
    actor: FakeActor = field(default_factory=FakeActor)
    evaluation_batches: Callable[[str, int], Iterable[Any]] = lambda name, start: []
    notice: Callable[[], Any] = lambda: None
    rank: int = 0

    def __post_init__(self) -> None:
        self.link = DirectLink(self.actor, self.rank)
        folder = locate(self.job.run_folder)
        train = self.job.recipe.train
        self.watchdog = Watchdog(0, train.step_timeout_s, self.link.beat, self.link.note_hang)
        writer = CheckpointWriter(
            folder, self.job.recipe.checkpoint, self.link.note_own, self.job.lock_number
        )
        engine: Any = self.engine
        self.saver = CheckpointSaver(self.job, engine, writer, self.link, self.watchdog, write_now)
        evaluator = Evaluator(self.job, engine, self.evaluation_batches, self.link, self.watchdog)
        nonfinite = NonfinitePolicy(train, self.link, lambda batch: "Samples 1, 2.", lambda: 0)
        self.hooks = WorkerHooks(
            self.link, evaluator, self.saver, nonfinite, self.watchdog, self.notice, 0.0
        )

    def attempt(self, start_step: int | None = None) -> Attempt:
        """Set up at the start of the run, or where `start_step` says."""
        progress = Progress(step=start_step or 0)
        context = RankContext(TOTAL, self.rank, 1, MICRO, OneRank())
        engine: Any = self.engine
        return Attempt(
            self.job, context, self.link, engine, batches(progress.step), self.hooks,
            self.watchdog, progress,
        )  # fmt: skip

    def kinds(self) -> list[str]:
        """Of the events, in their order."""
        return [kind for kind, _, _ in self.actor.events]
