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
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vit_ray.config import Recipe
from vit_ray.measure.best_evaluation import BEST, EVALUATIONS, STEP, best_key, without_best
from vit_ray.measure.meters import Compute, StepTimes, peak_memory_gib
from vit_ray.train.cadence import Cadence
from vit_ray.train.progress import Progress
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
    """Checkpoints of a run, one of each step: what has been committed is not written again."""

    def __init__(
        self, hooks: LoopHooks, context: RankContext, step: int, clock: Callable[[], float]
    ) -> None:
        """`step`: of the checkpoint that the run goes on from."""
        self._hooks, self._context, self._clock = hooks, context, clock
        self._step, self._last_s = step, clock()

    def elapsed_s(self) -> float:
        """Since the last one."""
        return self._clock() - self._last_s

    def save(self, progress: Progress) -> None:
        """Start writing one, unless there is one of this step."""
        if progress.step != self._step:
            self._save(progress)

    def save_evaluated(self, progress: Progress) -> None:
        """As `save`; what an evaluation has changed since is recorded beside the one that is there.

        All ranks wait until it is written: if it has failed, it is written again.
        """
        if progress.step == self._step:
            self._hooks.wait_until_saved()
            self._context.collectives.sum([0.0])
            is_noted = self._context.rank == 0 and self._hooks.note_evaluation(progress)
            if self._context.collectives.sum([float(is_noted)])[0] > 0:
                return
        self._save(progress)

    def _save(self, progress: Progress) -> None:
        self._hooks.save(progress)
        self._step, self._last_s = progress.step, self._clock()


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
    times = StepTimes(clock)
    saves = _Saves(hooks, context, progress.step, clock)
    first_step = progress.step
    if not progress.worker_seconds:  # of a checkpoint that has the seconds alone
        progress.worker_seconds = progress.train_seconds * context.world_size
    keeps_best = recipe.keeps_best
    saving = Cadence(recipe.checkpoint.every_steps, recipe.checkpoint.every_minutes)
    permanent = Cadence(recipe.checkpoint.keep_every_steps, at_steps=recipe.checkpoint.keep_steps)
    logging = Cadence(recipe.train.log_every_steps)
    while progress.step < context.last_step:
        start_s = clock()
        batch = _next_batch(batches, progress.step)
        _check_size(batch, context.batch_size_per_rank(recipe.train.global_batch_size))
        wait_s = clock() - start_s
        rate = lr_at(progress.step, recipe.optim, context.total_steps)
        loss = _accumulate(engine, batch, context.micro_batch_size, progress.step)
        result = engine.step(rate)
        # One clock decides for all: ranks would disagree on what minute it is.
        is_time = context.rank == 0 and saving.is_due_after(saves.elapsed_s())
        flags = [is_time, hooks.save_is_wanted(progress.step), hooks.is_stopping()]
        # Here the host waits for the device, once in every step: the refusal of a step and what the
        # ranks agree on are known before the next. What it hands out then finds the device idle.
        # Stage 3 bounds its gathers and sums under way by waits of its own, and an offloaded
        # optimizer waits for its gradients.
        sums = context.collectives.sum([loss, result.refused, result.grad_norm, *flags])
        mean_loss, refused, grad_norm = (value / context.world_size for value in sums[:3])
        agreed = sums[3:]
        is_save_time, is_save_wanted, is_stopping = (count > 0 for count in agreed)
        step_s = clock() - start_s
        progress.step += 1
        progress.train_seconds += step_s
        progress.worker_seconds += step_s * context.world_size
        hooks.note_step(progress.step)
        times.record(step_s, wait_s, engine.take_forward_s())
        if not refused and math.isfinite(mean_loss):
            progress.nonfinite_steps = 0
        else:
            progress.nonfinite_steps += 1
            hooks.handle_nonfinite(progress, batch)
        progress.evaluation_due = is_last = progress.step == context.last_step
        # The first step of an attempt too, so that a wrong start shows at once.
        is_first = progress.step == first_step + 1
        if is_first or logging.is_due_at(progress.step) or is_last:
            metrics = {
                "train/loss": mean_loss,
                "train/lr": rate,
                "train/grad_norm": grad_norm,
                "cost/core_days": progress.worker_seconds / 86_400,
            }
            metrics |= _window_metrics(times, recipe, context, compute)
            progress.metrics |= metrics
            hooks.log(progress.step, metrics)
            times.reset()
        if is_save_wanted or is_stopping:
            # At once: the time of an evaluation may not be left. One due at a stop is skipped, and
            # the last one is tried: there may be nothing to evaluate.
            saves.save(progress)
            if is_stopping and not is_last:
                return Ending.STOPPED
        try:
            is_best = _evaluate_if_due(recipe, progress, hooks, context)
        except EvaluationCutError as cut:
            saves.save(progress)
            if cut.is_stopping:
                return Ending.STOPPED
            continue
        progress.evaluation_due = False
        if is_last or progress.ended or (is_best and keeps_best):
            saves.save_evaluated(progress)
        elif is_save_time or saving.is_due_at(progress.step) or permanent.is_due_at(progress.step):
            saves.save(progress)
        if progress.ended:
            return Ending.EARLY
    while progress.evaluation_due:
        try:
            _evaluate_if_due(recipe, progress, hooks, context)
        except EvaluationCutError as cut:
            if cut.is_stopping:
                return Ending.STOPPED
        else:
            progress.evaluation_due = False
            saves.save_evaluated(progress)
    return Ending.EARLY if progress.ended else Ending.FINISHED


def _next_batch(batches: Iterator[Batch], step: int) -> Batch:
    batch = next(batches, None)
    if batch is None:
        raise RuntimeError(
            f"the stream ended before step {step}; it was planned to last to the end of the run"
        )
    return batch


def _check_size(batch: Batch, expected: int) -> None:
    """A batch of another size would shift every later sample of the order."""
    if len(batch["sample"]) != expected:
        raise RuntimeError(
            f"a batch of {len(batch['sample'])} images came from the stream for a rank's share of "
            f"{expected}; this is a defect of the stream, and no step was taken with it"
        )


def _accumulate(engine: Engine, batch: Batch, micro_batch_size: int, step: int) -> Tensor:
    """Mean loss of this rank's share, after a backward pass of every micro-batch.

    It stays on the device: the step is handed out before the host waits for any of it.
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


def _evaluate_if_due(
    recipe: Recipe, progress: Progress, hooks: LoopHooks, context: RankContext
) -> bool:
    """Evaluate by cadence and at the end; whether the validation loss is the best so far.

    What is measured only because a part of the run ends counts for nothing: the whole run would not
    have looked there.
    """
    is_due = Cadence(recipe.evaluate.every_steps).is_due_at(progress.step)
    if not is_due and progress.step < context.last_step:
        return False
    metrics: dict[str, Any] = hooks.evaluate(progress.step)
    if not metrics:
        return False
    # A run that goes on may have averaged weights, or held out images, no longer.
    others = {
        key: value
        for key, value in progress.metrics.items()
        if BEST in key or not ("/averaged_" in key or key.startswith("dev/"))
    }
    progress.metrics = others | metrics
    hooks.log(progress.step, metrics)
    loss = metrics.get(progress.loss_key)
    if loss is None or not (is_due or progress.step == context.total_steps):
        return False
    if progress.best_loss_key != progress.loss_key:  # losses of other weights are not compared
        progress.best_loss_key = progress.loss_key
        progress.best_eval_loss, progress.evals_without_best = None, 0
        progress.num_evals = 0
    progress.eval_step = progress.step
    progress.num_evals += 1
    best = progress.best_eval_loss
    is_best = math.isfinite(loss) and (best is None or not math.isfinite(best) or loss < best)
    if recipe.keeps_best and (is_best or STEP in progress.metrics):
        chosen: dict[str, float] = {EVALUATIONS: progress.num_evals}
        if is_best:
            progress.metrics = without_best(progress.metrics)
            chosen |= {best_key(key): value for key, value in metrics.items()}
            chosen[STEP] = progress.step
        progress.metrics |= chosen
        hooks.log(progress.step, chosen)
    elif not recipe.keeps_best:
        progress.metrics = without_best(progress.metrics)
    if is_best:
        progress.best_eval_loss, progress.evals_without_best = loss, 0
        return True
    progress.evals_without_best += 1
    patience = recipe.train.early_stopping
    if patience is not None and progress.evals_without_best >= patience:
        count = progress.evals_without_best
        progress.ended = f"no better validation loss in {count} evaluations"
    return False
