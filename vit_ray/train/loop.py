"""The training loop: an optimizer step per batch, with logs, evaluations and checkpoints at set
intervals.

It knows no Ray and no DeepSpeed: engine, batches and everything that leaves the process are
arguments, so it runs in a unit test on a list and two fakes, and under plain torch as the
baseline that the overhead of everything else is measured against.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vit_ray.checkpoints.training_progress import Progress
from vit_ray.config import Recipe
from vit_ray.config.cadence import Cadence
from vit_ray.measure.best_evaluation import BEST
from vit_ray.measure.meters import Compute, StepTimes, peak_memory_gib
from vit_ray.train.early_stopping import judge_evaluation
from vit_ray.train.schedule import lr_at

Batch = Mapping[str, Any]
"""`image` uint8 (b, H, W, 3), `labels` int32 (b, L), `sample` int64 (b,); b = this rank's share."""


class StepResultLike(Protocol):
    """What `Engine.step` returns: numbers, or scalars on the device, the same on all ranks."""

    @property
    def refused(self) -> float | Tensor:
        """1 if the gradient was not finite and the weights stayed as they were, else 0."""

    @property
    def grad_norm(self) -> float | Tensor:
        """Before clipping."""


class Engine(Protocol):
    """What the loop needs of an engine."""

    device: torch.device

    def backward(self, images: Tensor, labels: Tensor, samples: Tensor, step: int) -> Tensor: ...
    def step(self, learning_rate: float) -> StepResultLike: ...
    def take_forward_s(self) -> float:
        """Of the forward passes since the last call; asked when the host has waited for them."""


class Collectives(Protocol):
    """Reductions that all ranks call together."""

    def sum(self, values: Sequence[float | Tensor]) -> list[float]:
        """Element-wise sum over ranks; numbers, or scalars on the device."""


class Ending(Enum):
    """Why `run_training` returns."""

    FINISHED = auto()
    EARLY = auto()
    """The validation loss gets no better; `Progress.ended` has the text."""
    STOPPED = auto()
    """Some rank was asked to stop."""


class EvaluationCutError(Exception):
    """An evaluation was stopped between two batches, on all ranks, so that the run can be saved."""

    def __init__(self, *, is_stopping: bool) -> None:
        """`is_stopping`: a rank was asked to stop; else one wants a checkpoint at once."""
        super().__init__("the evaluation was cut short")
        self.is_stopping = is_stopping


class LoopHooks(Protocol):
    """What the loop calls at set moments; on all ranks, apart from `note_evaluation`: on rank 0."""

    def note_step(self, step: int) -> None:
        """`step` steps are completed."""

    @property
    def log(self) -> Callable[[int, dict[str, float]], None]:
        """Takes metrics of a step; must not block."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the model; the same figures on every rank.

        Raises:
            EvaluationCutError: a stop or a save is wanted.
        """

    def save(self, progress: Progress) -> None:
        """Start writing a checkpoint."""

    def wait_until_saved(self) -> None:
        """Until this rank's part of the last checkpoint is written, or has failed."""

    def note_evaluation(self, progress: Progress) -> bool:
        """Record what an evaluation has changed since the checkpoint of the same step.

        Returns:
            False if that checkpoint is not whole, and nothing was recorded.
        """

    def handle_nonfinite(self, progress: Progress, batch: Batch) -> None:
        """The step of this batch was refused: report it; raise, roll back or return, by recipe."""

    def save_is_wanted(self, step: int) -> bool:
        """Whether this rank wants a checkpoint at once (notice that its node will leave)."""

    def is_stopping(self) -> bool:
        """Whether this rank was asked to stop."""


@dataclass(frozen=True)
class RankContext:
    """This rank's place in the worker group, and its part of a step."""

    total_steps: int
    rank: int
    world_size: int
    micro_batch_size: int
    collectives: Collectives
    until_step: int | None = None
    """Where this part of the run ends, evaluated and saved; None for the end of the run."""

    @property
    def last_step(self) -> int:
        """After which `run_training` is done."""
        return self.until_step or self.total_steps

    def batch_size_per_rank(self, global_batch_size: int) -> int:
        """Images of a global batch on each rank."""
        return global_batch_size // self.world_size


class _Saves:
    """Checkpoints of a run, one for each step: a step that is committed is not written again."""

    def __init__(
        self, hooks: LoopHooks, context: RankContext, step: int, clock: Callable[[], float]
    ) -> None:
        """`step`: of the checkpoint that the run continues from."""
        self._hooks, self._context, self._clock = hooks, context, clock
        self._step, self._last_s = step, clock()

    def elapsed_s(self) -> float:
        """Since the last one."""
        return self._clock() - self._last_s

    def save(self, progress: Progress, *, is_evaluated: bool = False) -> None:
        """Start writing one, unless there is one of this step.

        Args:
            is_evaluated: record what an evaluation has changed since with the checkpoint of this
                step. All ranks wait until that is written; if it has failed, write it again.
        """
        if progress.step == self._step:
            if not is_evaluated:
                return
            self._hooks.wait_until_saved()
            self._context.collectives.sum([0.0])
            is_noted = self._context.rank == 0 and self._hooks.note_evaluation(progress)
            if self._context.collectives.sum([float(is_noted)])[0] > 0:
                return
        self._hooks.save(progress)
        self._step, self._last_s = progress.step, self._clock()


class _Step(NamedTuple):
    """One optimizer step; the same on all ranks."""

    loss: float
    grad_norm: float
    learning_rate: float
    is_save_time: bool
    is_save_wanted: bool
    is_stopping: bool


def run_training(
    engine: Engine,
    batches: Iterator[Batch],
    recipe: Recipe,
    context: RankContext,
    hooks: LoopHooks,
    progress: Progress,
    compute: Compute,
    clock: Callable[[], float] = time.perf_counter,
) -> Ending:
    """Train from `progress.step` to `context.last_step`.

    Every rank runs this with its share of the same global batches. `progress` is moved in place.
    """
    run = _Training(engine, batches, recipe, context, hooks, progress, compute, clock)
    saves, saving = run.saves, run.saving
    permanent = Cadence(recipe.checkpoint.keep_every_steps, at_steps=recipe.checkpoint.keep_steps)
    while progress.step < context.last_step:
        step = run.step()
        progress.evaluation_due = is_last = progress.step == context.last_step
        run.log_if_due(step)
        if step.is_save_wanted or step.is_stopping:
            # Before an evaluation, for which there may be no time left. At a stop an evaluation is
            # skipped, except the last one: there may be nothing to evaluate.
            saves.save(progress)
            if step.is_stopping and not is_last:
                return Ending.STOPPED
        try:
            is_best = run.evaluate_if_due()
        except EvaluationCutError as cut:
            saves.save(progress)
            if cut.is_stopping:
                return Ending.STOPPED
            continue
        progress.evaluation_due = False
        is_due = saving.is_due_at(progress.step) or permanent.is_due_at(progress.step)
        if is_last or progress.ended or (is_best and recipe.keeps_best):
            saves.save(progress, is_evaluated=True)
        elif step.is_save_time or is_due:
            saves.save(progress)
        if progress.ended:
            return Ending.EARLY
    while progress.evaluation_due:
        try:
            run.evaluate_if_due()
        except EvaluationCutError as cut:
            if cut.is_stopping:
                return Ending.STOPPED
        else:
            progress.evaluation_due = False
            saves.save(progress, is_evaluated=True)
    return Ending.EARLY if progress.ended else Ending.FINISHED


class _Training:
    """What `run_training` repeats: steps, logs and evaluations."""

    def __init__(
        self,
        engine: Engine,
        batches: Iterator[Batch],
        recipe: Recipe,
        context: RankContext,
        hooks: LoopHooks,
        progress: Progress,
        compute: Compute,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._batches, self._recipe, self._context = engine, batches, recipe, context
        self._hooks, self._progress, self._compute, self._clock = hooks, progress, compute, clock
        self.saves = _Saves(hooks, context, progress.step, clock)
        self.saving = Cadence(recipe.checkpoint.every_steps, recipe.checkpoint.every_minutes)
        self._times = StepTimes(clock)
        self._first_step = progress.step + 1

    def step(self) -> _Step:
        """Train on the next batch."""
        engine, context, progress = self._engine, self._context, self._progress
        start_s = self._clock()
        batch = next(self._batches, None)
        if batch is None:
            raise RuntimeError(
                f"the stream ended before step {progress.step}; it was planned to last to the end "
                "of the run"
            )
        share = context.batch_size_per_rank(self._recipe.train.global_batch_size)
        if len(batch["sample"]) != share:  # would shift every later sample of the order
            raise RuntimeError(
                f"a batch of {len(batch['sample'])} images came from the stream for a rank's share "
                f"of {share}; this is a defect of the stream, and no step was taken with it"
            )
        wait_s = self._clock() - start_s
        rate = lr_at(progress.step, self._recipe.optim, context.total_steps)
        loss = _accumulate(engine, batch, context.micro_batch_size, progress.step)
        result = engine.step(rate)
        # Rank 0's clock decides for all: ranks would disagree on what minute it is.
        is_time = context.rank == 0 and self.saving.is_due_after(self.saves.elapsed_s())
        flags = [is_time, self._hooks.save_is_wanted(progress.step), self._hooks.is_stopping()]
        # The one host-device sync of a step: whether it was refused, and what the ranks agree on,
        # are known before the next one. The GPU idles for the first kernel launches of that step.
        # Stage 3 bounds its gathers and sums in flight by syncs of its own, and an offloaded
        # optimizer waits for its gradients.
        sums = context.collectives.sum([loss, result.refused, result.grad_norm, *flags])
        mean_loss, refused, grad_norm = (value / context.world_size for value in sums[:3])
        step_s = self._clock() - start_s
        if not progress.worker_seconds:  # a checkpoint that has only the seconds
            progress.worker_seconds = progress.train_seconds * context.world_size
        progress.step += 1
        progress.train_seconds += step_s
        progress.worker_seconds += step_s * context.world_size
        self._hooks.note_step(progress.step)
        self._times.record(step_s, wait_s, engine.take_forward_s())
        if not refused and math.isfinite(mean_loss):
            progress.nonfinite_steps = 0
        else:
            progress.nonfinite_steps += 1
            self._hooks.handle_nonfinite(progress, batch)
        return _Step(mean_loss, grad_norm, rate, *(count > 0 for count in sums[3:]))

    def log_if_due(self, step: _Step) -> None:
        """Log by cadence, the last step, and the first of an attempt: a wrong start shows soon."""
        progress, context = self._progress, self._context
        is_due = Cadence(self._recipe.train.log_every_steps).is_due_at(progress.step)
        if not is_due and progress.step not in (self._first_step, context.last_step):
            return
        metrics = {
            "train/loss": step.loss,
            "train/lr": step.learning_rate,
            "train/grad_norm": step.grad_norm,
            "cost/core_days": progress.worker_seconds / 86_400,
            **_window_metrics(self._times, self._recipe, context, self._compute),
        }
        progress.metrics |= metrics
        self._hooks.log(progress.step, metrics)
        self._times.reset()

    def evaluate_if_due(self) -> bool:
        """Evaluate by cadence and at the end; whether the validation loss is the best so far."""
        progress, context = self._progress, self._context
        is_due = Cadence(self._recipe.evaluate.every_steps).is_due_at(progress.step)
        if not is_due and progress.step < context.last_step:
            return False
        metrics = self._hooks.evaluate(progress.step)
        if not metrics:
            return False
        # Averaged weights and held-out images may have been turned off on resume.
        others = {
            key: value
            for key, value in progress.metrics.items()
            if BEST in key or not ("/averaged_" in key or key.startswith("dev/"))
        }
        progress.metrics = others | metrics
        self._hooks.log(progress.step, metrics)
        # An evaluation only because a part of the run ends does not count: a whole run has none.
        counts = is_due or progress.step == context.total_steps
        if not counts or progress.loss_key not in metrics:
            return False
        is_best, of_best = judge_evaluation(progress, metrics, self._recipe)
        if of_best:
            self._hooks.log(progress.step, of_best)
        return is_best


def _accumulate(engine: Engine, batch: Batch, micro_batch_size: int, step: int) -> Tensor:
    """Mean loss of this rank's share, after a backward pass of every micro-batch.

    It stays on the device, so the step is launched without a host-device sync.
    """
    tensors = [as_tensor(batch[k]) for k in ("image", "labels", "sample")]
    images, labels, samples = (t.to(engine.device, non_blocking=True) for t in tensors)
    total = torch.zeros((), device=engine.device)
    count = len(images) // micro_batch_size
    for piece in range(count):
        part = slice(piece * micro_batch_size, (piece + 1) * micro_batch_size)
        total += engine.backward(images[part], labels[part].long(), samples[part], step).float()
    return total / count


def as_tensor(column: np.ndarray | Tensor) -> Tensor:
    """A column of a batch; images may be a tensor already, on the device."""
    if isinstance(column, Tensor):
        return column
    return torch.from_numpy(np.ascontiguousarray(column))


def _window_metrics(
    times: StepTimes, recipe: Recipe, context: RankContext, compute: Compute
) -> dict[str, float]:
    mine = [times.total_s / len(times.steps), times.wait_fraction, times.own_median_s]
    mine.append(peak_memory_gib())
    everyone = [0.0] * (len(mine) * context.world_size)
    everyone[context.rank :: context.world_size] = mine
    everyone = context.collectives.sum(everyone)
    seconds, waits, own_s, memory_gib = (
        everyone[first : first + context.world_size]
        for first in range(0, len(everyone), context.world_size)
    )
    # Whole steps take equally long on all ranks, who wait for the slowest in each.
    mean_s, wait = statistics.fmean(seconds), statistics.fmean(waits)
    images_per_s = recipe.train.global_batch_size / mean_s
    return {
        "train/images_per_s": images_per_s,
        "data/wait_fraction": wait,
        "perf/step_ms_median": times.median_s * 1e3,
        "perf/own_ms_median": statistics.median(own_s) * 1e3,
        "perf/own_ms_max": max(own_s) * 1e3,
        "perf/slowest_rank": float(own_s.index(max(own_s))),
        "perf/memory_gib": max(memory_gib),
        **compute.rates(images_per_s / context.world_size),
    }
