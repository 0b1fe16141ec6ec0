"""The training loop: an optimizer step per batch, with logs, evaluations and checkpoints at set
intervals.

It uses neither Ray nor DeepSpeed: engine, batches and everything that leaves the process are
arguments, so it runs in a unit test on a list and two fakes, and under plain torch as the baseline
for measuring the overhead of everything else.
"""

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

from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.checkpoints.sample_digest import add_digests, of_floats, samples_digest, to_floats
from vit_ray.config import Recipe
from vit_ray.config.cadence import Cadence
from vit_ray.measure.meters import Compute, StepTimes, peak_memory_gib
from vit_ray.metric_names import (
    AVERAGED,
    BEST,
    COST_CORE_DAYS,
    DATA_WAIT_FRACTION,
    DEV_GROUP,
    PERF_MEMORY_GIB,
    PERF_OWN_MS_MAX,
    PERF_OWN_MS_MEDIAN,
    PERF_SLOWEST_RANK,
    PERF_STEP_MS_MEDIAN,
    TRAIN_GRAD_NORM,
    TRAIN_IMAGES_PER_S,
    TRAIN_LOSS,
    TRAIN_LR,
)
from vit_ray.training.early_stopping import judge_evaluation
from vit_ray.training.optim.schedule import lr_at

Batch = Mapping[str, Any]
"""`image` uint8 (b, H, W, 3), `labels` int32 (b, L), `sample` int64 (b,); b = this rank's share."""


class StepResult(NamedTuple):
    """The result of one optimizer step: numbers, or scalars on the device; equal on all ranks."""

    refused: float | Tensor
    """1 if the weights are unchanged, else 0: the loss or the gradient was not finite."""
    grad_norm: float | Tensor
    """Global norm before clipping."""


class Engine(Protocol):
    """What the loop needs of an engine."""

    device: torch.device

    def backward(self, images: Tensor, labels: Tensor, samples: Tensor, step: int) -> Tensor: ...
    def step(self, learning_rate: float) -> StepResult:
        """Apply the gradient, unless it is not finite."""

    def take_forward_s(self) -> float:
        """Time of the forward passes since the last call, which the host has waited for."""


class Ending(Enum):
    """Why `run_training` returns."""

    FINISHED = auto()
    EARLY = auto()
    """The validation loss no longer improves; `Progress.ended` has the text."""
    STOPPED = auto()
    """Some rank was asked to stop."""


class EvaluationCutError(Exception):
    """An evaluation was stopped between two batches, on all ranks, so that the run can be saved."""

    def __init__(self, *, is_stopping: bool) -> None:
        """`is_stopping`: a rank was asked to stop; otherwise one wants a checkpoint at once."""
        super().__init__("the evaluation was interrupted")
        self.is_stopping = is_stopping


class LoopWorker(Protocol):
    """The worker around the loop, which calls it on all ranks together."""

    def note_step(self, step: int) -> None:
        """`step` steps are completed."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take metrics of a step; must not block."""

    def wishes(self, step: int) -> tuple[bool, bool]:
        """Whether this rank wants a checkpoint at once, and whether it was asked to stop."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the model after a step; the same metrics on every rank.

        Raises:
            EvaluationCutError: a rank has such a wish.
        """

    def save(self, progress: Progress) -> None:
        """Start writing a checkpoint."""

    def add_evaluation(self, progress: Progress) -> bool:
        """Add what an evaluation has changed to the checkpoint of its step, once that is written.

        False if that checkpoint is incomplete, and nothing was added.
        """

    def on_bad_step(self, progress: Progress, batch: Batch) -> None:
        """The step of this batch was refused: report it; raise or return, as the recipe says."""


@dataclass(frozen=True)
class RankContext:
    """This rank's position in the worker group, and its part of a step."""

    total_steps: int
    rank: int
    world_size: int
    micro_batch_size: int
    all_sum: Callable[[Sequence[float | Tensor]], list[float]]
    """Element-wise sum over ranks, called by all together; numbers, or scalars on the device."""
    evaluate_at: tuple[int, ...] = ()
    """Steps at which it is evaluated in addition to those of the recipe."""


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
    worker: LoopWorker,
    progress: Progress,
    compute: Compute,
    clock: Callable[[], float] = time.perf_counter,
) -> Ending:
    """Train from `progress.step` to `context.total_steps`.

    Every rank runs this with its share of the same global batches. `progress` is updated in place.
    """
    run = _Training(engine, batches, recipe, context, worker, progress, compute, clock)
    permanent = Cadence(recipe.checkpoint.keep_every_steps, at_steps=recipe.checkpoint.keep_steps)
    is_save_time = False
    while progress.step < context.total_steps or progress.evaluation_due:
        if progress.step < context.total_steps:
            step = run.step()
            is_save_time = step.is_save_time
            progress.evaluation_due = progress.step == context.total_steps
            run.log_if_due(step)
            if progress.evaluation_due or step.is_save_wanted or step.is_stopping:
                # Before an evaluation, in which the run may die, or for which there may be no time
                # left. At a stop an evaluation is skipped, except the last one: there may be
                # nothing to evaluate.
                run.save()
                if step.is_stopping and not progress.evaluation_due:
                    return Ending.STOPPED
        try:
            is_best = run.evaluate_if_due()
        except EvaluationCutError as cut:
            run.save()
            if cut.is_stopping:
                return Ending.STOPPED
            continue
        is_last, progress.evaluation_due = progress.evaluation_due, False
        if is_last or progress.ended or (is_best and recipe.keeps_best):
            run.save(is_evaluated=True)
        elif is_save_time or any(c.is_due_at(progress.step) for c in (run.saving, permanent)):
            run.save()
        if progress.ended:
            return Ending.EARLY
    return Ending.EARLY if progress.ended else Ending.FINISHED


class _Training:
    """What `run_training` repeats: steps, logs, evaluations and saves."""

    def __init__(
        self,
        engine: Engine,
        batches: Iterator[Batch],
        recipe: Recipe,
        context: RankContext,
        worker: LoopWorker,
        progress: Progress,
        compute: Compute,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._batches, self._recipe, self._context = engine, batches, recipe, context
        self._worker, self._progress, self._compute, self._clock = worker, progress, compute, clock
        self._times = StepTimes()
        self._first_step = progress.step + 1
        # A committed step, such as the start of this attempt, is not written again.
        self._saved_step, self._saved_s = progress.step, clock()
        config = recipe.checkpoint
        self.saving = Cadence(config.every_steps, config.every_minutes)
        """When checkpoints are due; rank 0 measures minutes."""
        if not progress.samples_digest:
            progress.digest_from = progress.step
        self._digest_before = int(progress.samples_digest or "0", 16)
        self._digest = self._digest_of_all = 0
        """Digests of this attempt's samples: this rank's, and all ranks'."""

    def step(self) -> _Step:
        engine, context, progress = self._engine, self._context, self._progress
        start_s = self._clock()
        batch = next(self._batches, None)
        if batch is None:
            raise RuntimeError(
                f"the stream ended before step {progress.step}; it was planned to last to the end "
                "of the run"
            )
        share = self._recipe.train.global_batch_size // context.world_size
        if len(batch["sample"]) != share:  # would shift every later sample of the order
            raise RuntimeError(
                f"a batch of {len(batch['sample'])} images came from the stream for a rank's share "
                f"of {share}; this is a defect of the stream, and no step was taken with it"
            )
        wait_s = self._clock() - start_s
        rate = lr_at(progress.step, self._recipe.optim, context.total_steps)
        loss = _accumulate(engine, batch, context.micro_batch_size, progress.step)
        samples = np.asarray(batch["sample"], np.int64)
        place = progress.step * self._recipe.train.global_batch_size + context.rank * share
        self._digest = add_digests(self._digest, samples_digest(place, samples))
        result = engine.step(rate)
        # Rank 0's clock decides for all: clocks of ranks differ.
        since_save_s = self._clock() - self._saved_s
        is_time = context.rank == 0 and self.saving.is_due_after(since_save_s)
        flags = [is_time, *self._worker.wishes(progress.step)]
        # The one host-device sync of a step: whether it was refused, and what the ranks agree on,
        # are known before the next one. The GPU idles for the first kernel launches of that step.
        # Stage 3 bounds its gathers and sums in flight by syncs of its own, and an offloaded
        # optimizer waits for its gradients.
        digest = to_floats(self._digest)
        sums = context.all_sum([loss, result.refused, result.grad_norm, *flags, *digest])
        mean_loss, refused, grad_norm = (value / context.world_size for value in sums[:3])
        self._digest_of_all = of_floats(sums[-len(digest) :])
        step_s = self._clock() - start_s
        if not progress.worker_seconds:  # a checkpoint that has only seconds left
            progress.worker_seconds = progress.train_seconds * context.world_size
        progress.step += 1
        progress.train_seconds += step_s
        progress.worker_seconds += step_s * context.world_size
        self._worker.note_step(progress.step)
        self._times.record(step_s, wait_s, engine.take_forward_s())
        if math.isfinite(mean_loss) and not refused:
            progress.nonfinite_steps = 0
        else:
            progress.nonfinite_steps += 1
            self._worker.on_bad_step(progress, batch)
        agreed = (count > 0 for count in sums[3 : 3 + len(flags)])
        return _Step(mean_loss, grad_norm, rate, *agreed)

    def log_if_due(self, step: _Step) -> None:
        """Log at the cadence, and at the first step (for early errors) and the last."""
        progress, context, times = self._progress, self._context, self._times
        is_due = Cadence(self._recipe.train.log_every_steps).is_due_at(progress.step)
        is_end = progress.step in (self._first_step, context.total_steps)
        if not (is_due or is_end):
            return
        mine = [times.total_s / len(times.steps), times.wait_fraction, times.own_median_s]
        mine.append(peak_memory_gib())
        everyone = np.zeros((len(mine), context.world_size))
        everyone[:, context.rank] = mine
        summed = context.all_sum(everyone.ravel().tolist())
        seconds, waits, own_s, memory_gib = np.reshape(summed, everyone.shape).tolist()
        # Whole steps take equally long on all ranks, because all wait for the slowest in each.
        images_per_s = self._recipe.train.global_batch_size / statistics.fmean(seconds)
        metrics = {
            TRAIN_LOSS: step.loss,
            TRAIN_LR: step.learning_rate,
            TRAIN_GRAD_NORM: step.grad_norm,
            COST_CORE_DAYS: progress.worker_seconds / 86_400,
            TRAIN_IMAGES_PER_S: images_per_s,
            DATA_WAIT_FRACTION: statistics.fmean(waits),
            PERF_STEP_MS_MEDIAN: statistics.median(times.steps) * 1e3,
            PERF_OWN_MS_MEDIAN: statistics.median(own_s) * 1e3,
            PERF_OWN_MS_MAX: max(own_s) * 1e3,
            PERF_SLOWEST_RANK: float(own_s.index(max(own_s))),
            PERF_MEMORY_GIB: max(memory_gib),
            **self._compute.rates(images_per_s / context.world_size),
        }
        progress.metrics |= metrics
        self._worker.log(progress.step, metrics)
        self._times = StepTimes()

    def evaluate_if_due(self) -> bool:
        """Evaluate at the cadence and the end; whether the validation loss is the best so far."""
        progress, context = self._progress, self._context
        is_due = Cadence(self._recipe.evaluate.every_steps).is_due_at(progress.step)
        is_asked = is_due or progress.step in context.evaluate_at
        if not is_asked and progress.step < context.total_steps:
            return False
        metrics = self._worker.evaluate(progress.step)
        if not metrics:
            return False
        # Averaged weights and held-out images may have been turned off on resume.
        others = {
            key: value
            for key, value in progress.metrics.items()
            if BEST in key or not (AVERAGED in key or key.startswith(DEV_GROUP))
        }
        progress.metrics = others | metrics
        self._worker.log(progress.step, metrics)
        # Early stopping and the best checkpoint are those of a run that was not followed.
        counts = is_due or progress.step == context.total_steps
        if not counts or progress.loss_key not in metrics:
            return False
        recipe = self._recipe
        is_best, of_best = judge_evaluation(
            progress, metrics, keeps_best=recipe.keeps_best, patience=recipe.train.early_stopping
        )
        if of_best:
            self._worker.log(progress.step, of_best)
        return is_best

    def save(self, *, is_evaluated: bool = False) -> None:
        """Start writing a checkpoint, unless this step has one.

        Args:
            is_evaluated: record what an evaluation has changed since then with the checkpoint of
                this step. All ranks wait until that is written; if it has failed, write it again.
        """
        worker, progress = self._worker, self._progress
        has_one = progress.step == self._saved_step
        if has_one and (not is_evaluated or worker.add_evaluation(progress)):
            return
        digest = add_digests(self._digest_before, self._digest_of_all)
        progress.samples_digest = f"{digest:016x}"
        worker.save(progress)
        self._saved_step, self._saved_s = progress.step, self._clock()


def _accumulate(engine: Engine, batch: Batch, micro_batch_size: int, step: int) -> Tensor:
    """Mean loss of this rank's share, after a backward pass of every micro-batch.

    It stays on the device, so the step is launched without a host-device sync.
    """
    tensors = [as_tensor(batch[k]) for k in ("image", "labels", "sample")]
    tensors = [t.to(engine.device, non_blocking=True) for t in tensors]
    columns = [torch.split(t, micro_batch_size) for t in tensors]
    total = torch.zeros((), device=engine.device)
    for images, labels, samples in zip(*columns, strict=True):
        total += engine.backward(images, labels.long(), samples, step).float()
    return total / len(columns[0])


def as_tensor(column: np.ndarray | Tensor) -> Tensor:
    """A column of a batch; images may be a tensor already, on the device."""
    if isinstance(column, Tensor):
        return column
    return torch.from_numpy(np.ascontiguousarray(column))
