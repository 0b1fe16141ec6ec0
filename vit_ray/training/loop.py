"""The training loop: an optimizer step per batch, with logs, evaluations and checkpoints at set
intervals.

The loop uses neither Ray nor DeepSpeed: engine, batches and everything that leaves the process are
arguments. So it runs in a unit test on a list and two fakes, and under plain torch, as the baseline
for measuring the overhead of everything else.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vit_ray.checkpoints.checkpoint import Progress, add_digests, samples_digest
from vit_ray.config import Recipe
from vit_ray.config.training_sections import is_due
from vit_ray.measure.meters import Compute, DeviceTimes, peak_memory_gib
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
    RESULT_EVALUATIONS,
    RESULT_STEP,
    TRAIN_GRAD_NORM,
    TRAIN_IMAGES_PER_S,
    TRAIN_LOSS,
    TRAIN_LR,
    TRAIN_SKIPPED_STEPS,
    best_key,
    without_best,
)
from vit_ray.training.steps import lr_at

# Steps in the running median of gradient norms, for `train.skip_above`; a quarter is enough.
NORMS_IN_MEDIAN: Final = 128
# Steps that are logged although `train.log_every_steps` is larger.
EARLY_STEPS: Final = (4, 8, 16, 32)

# `image` uint8 (b, H, W, 3), `labels` int32 (b, L), `sample` int64 (b,); b = this rank's share.
Batch = Mapping[str, Any]


class StepResult(NamedTuple):
    """The result of an optimizer step: numbers, or scalars on the device; equal on all ranks.

    Attributes:
        refused: 1 if the weights are unchanged, else 0: the loss or the gradient was not finite, or
            the norm was above the limit.
        grad_norm: global norm before clipping.
    """

    refused: float | Tensor
    grad_norm: float | Tensor


class Engine(Protocol):
    """What the loop needs of an engine."""

    device: torch.device
    forward_times: DeviceTimes
    """Of this rank's forward passes, which wait for no other rank but for weights under ZeRO 3."""

    def backward(self, images: Tensor, labels: Tensor, samples: Tensor, step: int) -> Tensor: ...
    def step(self, learning_rate: float, norm_limit: float) -> StepResult:
        """Apply the gradient, unless it is not finite or its norm is above the limit."""


class EvaluationCutError(Exception):
    """An evaluation was stopped between two batches, on all ranks, so that the run can be saved.

    Attributes:
        is_stopping: a rank was asked to stop; otherwise a rank wants a checkpoint at once.
    """

    def __init__(self, *, is_stopping: bool) -> None:
        super().__init__("the evaluation was interrupted")
        self.is_stopping = is_stopping


class LoopWorker(Protocol):
    """The worker around the loop, which calls it on all ranks together."""

    def note_step(self, step: int, wait_s: float) -> None:
        """`step` steps are completed; the last one waited `wait_s` for its batch."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take metrics of a step; must not block."""

    def wishes(self, step: int) -> tuple[bool, bool]:
        """Whether this rank wants a checkpoint at once, and whether it was asked to stop."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the model after a step; the same metrics on every rank.

        Raises:
            EvaluationCutError: a rank wants a checkpoint at once, or was asked to stop.
        """

    def save(self, progress: Progress) -> None:
        """Start writing a checkpoint."""

    def add_evaluation(self, progress: Progress) -> bool:
        """Add what an evaluation has changed to the step's checkpoint, once that is written.

        Returns:
            False if that checkpoint is incomplete, and nothing was added.
        """

    def on_bad_step(self, progress: Progress, batch: Batch) -> None:
        """Report the refused step of this batch; raise or return, as the recipe says."""

    def on_skipped_steps(
        self, progress: Progress, largest: "SkippedStep", steps: Sequence[int]
    ) -> None:
        """Report the steps skipped since the last report; `largest` has the largest norm."""


@dataclass(frozen=True)
class RankContext:
    """This rank's position in the worker group, and the length of the run.

    Attributes:
        all_sum: element-wise sum over ranks of numbers, or scalars on the device; all ranks call it
            together.
        evaluate_at: steps with an evaluation in addition to those of the recipe.
    """

    total_steps: int
    rank: int
    world_size: int
    micro_batch_size: int
    all_sum: Callable[[Sequence[float | Tensor]], list[float]]
    evaluate_at: tuple[int, ...] = ()


class SkippedStep(NamedTuple):
    """A step whose gradient norm was above `train.skip_above` x the running median.

    Attributes:
        step: 0-based.
    """

    step: int
    grad_norm: float
    norm_limit: float
    batch: Batch


@dataclass
class TrainingLoop:
    """Trains from `progress.step` to `context.total_steps`.

    Every rank runs this with its share of the same global batches. `progress` is updated in place.
    """

    engine: Engine
    batches: Iterator[Batch]
    recipe: Recipe
    context: RankContext
    worker: LoopWorker
    progress: Progress
    compute: Compute
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        # Seconds of each step since the last log: all, waiting for data, forward passes.
        self._times: list[tuple[float, float, float]] = []
        self._first_step = self.progress.step + 1
        # A step with a checkpoint, such as the first of this attempt, is not written again.
        self._saved_step, self._saved_s = self.progress.step, self.clock()
        self._skipped: list[int] = []
        self._largest: SkippedStep | None = None
        if self.progress.samples_digest is None:
            self.progress.samples_digest, self.progress.digest_from = 0, self.progress.step

    def run(self) -> None:
        """Train to the end of the run, or until some rank was asked to stop (`progress` says)."""
        progress, total_steps, is_save_time = self.progress, self.context.total_steps, False
        config = self.recipe.checkpoint
        while not progress.is_over(total_steps):
            if progress.step < total_steps:
                figures, (is_save_time, is_save_wanted, is_stopping) = self._step()
                progress.evaluation_due = progress.step == total_steps
                self._log_if_due(figures)
                if progress.evaluation_due or is_save_wanted or is_stopping:
                    # Before an evaluation, in which the run may die, or for which there may be no
                    # time. At a stop an evaluation is skipped, except at the end: a run without
                    # evaluations is complete there.
                    self._save()
                    if is_stopping and not progress.evaluation_due:
                        return
            try:
                is_best = self._evaluate_if_due()
            except EvaluationCutError as cut:
                self._save()
                if cut.is_stopping:
                    return
                continue
            is_last, progress.evaluation_due = progress.evaluation_due, False
            if is_last or progress.ended or (is_best and self.recipe.keeps_best):
                self._save(is_evaluated=True)
            elif (
                is_save_time
                or is_due(progress.step, config.every_steps, config.keep_steps)
                or is_due(progress.step, config.keep_every_steps)
            ):
                self._save()

    def _step(self) -> tuple[dict[str, float], list[bool]]:
        """Train on a batch.

        Returns:
            What the step logs; and whether a checkpoint is due by rank 0's clock, some rank wants a
            checkpoint at once, and some rank was asked to stop. The same on all ranks.
        """
        engine, context, progress = self.engine, self.context, self.progress
        start_s = self.clock()
        batch: Batch = next(self.batches, {"sample": ()})
        share = self.recipe.train.global_batch_size // context.world_size
        if len(batch["sample"]) != share:  # would shift every later sample of the order
            raise RuntimeError(
                f"step {progress.step}: {len(batch['sample'])} images came from the stream for a "
                f"rank's share of {share}; this is a defect of the stream, and no step was taken"
            )
        wait_s = self.clock() - start_s
        rate = lr_at(progress.step, self.recipe.optim, context.total_steps)
        loss = _accumulate(engine, batch, context.micro_batch_size, progress.step)
        samples = np.asarray(batch["sample"], np.int64)
        first = progress.step * self.recipe.train.global_batch_size + context.rank * share
        digest = samples_digest(first, samples)
        norm_limit = self._norm_limit()
        result = engine.step(rate, norm_limit)
        # Rank 0's clock decides for all: clocks of ranks differ.
        minutes, since_save_s = self.recipe.checkpoint.every_minutes, self.clock() - self._saved_s
        is_time = context.rank == 0 and minutes is not None and since_save_s >= 60.0 * minutes
        flags = [is_time, *self.worker.wishes(progress.step)]
        # The one host-device sync of a step: the next step starts when the host has the refusal and
        # what the ranks agree on. The GPU idles for the first kernel launches of the next step.
        # DeepSpeed adds syncs: after each pass that sums gradients (stages 1 and 2 on several GPUs,
        # stage 3 on any number), and for the gradients of an offloaded optimizer.
        sums = context.all_sum([loss, result.refused, result.grad_norm, *flags, float(digest)])
        mean_loss, refused, grad_norm = (value / context.world_size for value in sums[:3])
        progress.samples_digest = add_digests(progress.samples_digest or 0, int(sums[-1]))
        step_s = self.clock() - start_s
        progress.step += 1
        progress.train_seconds += step_s
        progress.worker_seconds += step_s * context.world_size
        self.worker.note_step(progress.step, wait_s)
        self._times.append((step_s, wait_s, engine.forward_times.take_s()))
        self._note_outcome(
            batch, norm_limit, mean_loss=mean_loss, refused=refused, grad_norm=grad_norm
        )
        figures = {TRAIN_LOSS: mean_loss, TRAIN_LR: rate, TRAIN_GRAD_NORM: grad_norm}
        return figures, [count > 0 for count in sums[3:-1]]

    def _note_outcome(
        self, batch: Batch, norm_limit: float, *, mean_loss: float, refused: float, grad_norm: float
    ) -> None:
        """Count the step of this batch, just completed, as taken, skipped, or not finite."""
        progress = self.progress
        if refused and norm_limit < grad_norm < math.inf:
            progress.skipped_steps += 1
            self._skipped.append(progress.step - 1)
            if self._largest is None or grad_norm > self._largest.grad_norm:
                # On the host: the device has no memory for a second batch until the next log.
                on_host = {**batch, "image": as_tensor(batch["image"]).cpu()}
                self._largest = SkippedStep(progress.step - 1, grad_norm, norm_limit, on_host)
        elif math.isfinite(mean_loss) and not refused:
            progress.nonfinite_steps = 0
        else:
            progress.nonfinite_steps += 1
            self.worker.on_bad_step(progress, batch)
        if self.recipe.train.skip_above and math.isfinite(grad_norm):
            progress.recent_norms = [*progress.recent_norms, grad_norm][-NORMS_IN_MEDIAN:]

    def _norm_limit(self) -> float:
        """The gradient norm above which the next step is skipped.

        Norms of skipped steps count in the median: where norms stay higher, half a window of steps
        is skipped, and not the rest of the run.
        """
        factor, norms = self.recipe.train.skip_above, self.progress.recent_norms
        if factor is None or len(norms) < NORMS_IN_MEDIAN // 4:
            return math.inf
        return factor * statistics.median(norms)

    def _log_if_due(self, figures: dict[str, float]) -> None:
        """Log every `train.log_every_steps`, at the first step (for early errors), and at the last.

        Also at `EARLY_STEPS`, so that a short run has figures. `figures` are of the last step
        alone; times and rates are of all steps since the last log.
        """
        progress, context = self.progress, self.context
        every = self.recipe.train.log_every_steps
        is_early = progress.step in EARLY_STEPS and progress.step < every
        is_end = progress.step in (self._first_step, context.total_steps)
        if not (is_early or is_end or is_due(progress.step, every)):
            return
        steps, waits, forwards = np.array(self._times).T
        self._times = []
        # Batch and forward passes: the part of a step that waits for no other worker.
        own_median_s = np.median(waits + forwards)
        by_rank = np.zeros((4, context.world_size))
        by_rank[:, context.rank] = (
            steps.mean(), waits.sum() / steps.sum(), own_median_s, peak_memory_gib()
        )  # fmt: skip
        summed = context.all_sum(by_rank.ravel().tolist())
        step_s, wait_fractions, own_s, memory_gib = np.reshape(summed, by_rank.shape)
        # A full step takes equally long on all ranks, because all wait for the slowest rank.
        images_per_s = self.recipe.train.global_batch_size / float(step_s.mean())
        metrics = {
            **figures,
            COST_CORE_DAYS: progress.worker_seconds / 86_400,
            TRAIN_IMAGES_PER_S: images_per_s,
            DATA_WAIT_FRACTION: float(wait_fractions.mean()),
            PERF_STEP_MS_MEDIAN: float(np.median(steps)) * 1e3,
            PERF_OWN_MS_MEDIAN: float(np.median(own_s)) * 1e3,
            PERF_OWN_MS_MAX: float(own_s.max()) * 1e3,
            PERF_SLOWEST_RANK: float(own_s.argmax()),
            PERF_MEMORY_GIB: float(memory_gib.max()),
            **self.compute.rates(images_per_s / context.world_size),
        }
        if self.recipe.train.skip_above:
            metrics[TRAIN_SKIPPED_STEPS] = float(progress.skipped_steps)
        progress.metrics |= metrics
        self.worker.log(progress.step, metrics)
        self._report_skipped()

    def _report_skipped(self) -> None:
        # Also before a save, so that every skipped step that a checkpoint counts has a report.
        if self._largest is not None:
            self.worker.on_skipped_steps(self.progress, self._largest, self._skipped)
            self._skipped, self._largest = [], None

    def _evaluate_if_due(self) -> bool:
        """Evaluate at the recipe's steps, `evaluate_at`, and the end.

        Returns:
            Whether the validation loss is the best so far.
        """
        progress, context = self.progress, self.context
        is_end = progress.step >= context.total_steps
        is_regular = is_end or is_due(progress.step, self.recipe.evaluate.every_steps)
        if not is_regular and progress.step not in context.evaluate_at:
            return False
        metrics = self.worker.evaluate(progress.step)
        if not metrics:
            return False
        # Averaged weights and held-out images may have been turned off on resume.
        earlier = {
            key: value
            for key, value in progress.metrics.items()
            if BEST in key or not (AVERAGED in key or key.startswith(DEV_GROUP))
        }
        progress.metrics = earlier | metrics
        self.worker.log(progress.step, metrics)
        # Evaluations of `evaluate_at` change neither early stopping nor the best checkpoint.
        return is_regular and progress.loss_key in metrics and self._judge(metrics)

    def _judge(self, metrics: Mapping[str, float]) -> bool:
        """Compare an evaluation with the best so far; end the run when patience is used up.

        Returns:
            Whether the validation loss is the best so far.
        """
        progress, patience = self.progress, self.recipe.train.early_stopping
        loss = metrics[progress.loss_key]
        if progress.best_loss_key != progress.loss_key:  # losses of other weights are not compared
            progress.best_loss_key = progress.loss_key
            progress.best_eval_loss, progress.evals_without_best, progress.num_evals = None, 0, 0
        progress.num_evals += 1
        best = progress.best_eval_loss
        is_best = math.isfinite(loss) and (best is None or not math.isfinite(best) or loss < best)
        if is_best:
            progress.best_eval_loss, progress.evals_without_best = loss, 0
        else:
            progress.evals_without_best += 1
            if patience is not None and progress.evals_without_best >= patience:
                progress.ended = (
                    f"no better validation loss in {progress.evals_without_best} evaluations"
                )
        result: dict[str, float] = {}
        if is_best and self.recipe.keeps_best:
            result = {best_key(key): value for key, value in metrics.items()}
            result[RESULT_STEP] = progress.step
        if result or not self.recipe.keeps_best:
            progress.metrics = without_best(progress.metrics) | result
        if RESULT_STEP in progress.metrics:
            result[RESULT_EVALUATIONS] = progress.num_evals
            progress.metrics |= result
            self.worker.log(progress.step, result)
        return is_best

    def _save(self, *, is_evaluated: bool = False) -> None:
        """Start writing a checkpoint, unless this step has one.

        Args:
            is_evaluated: add what an evaluation has changed to the checkpoint of this step. All
                ranks wait until that is written; if writing failed, a new one is started.
        """
        self._report_skipped()
        worker, progress = self.worker, self.progress
        is_saved = progress.step == self._saved_step
        if is_saved and (not is_evaluated or worker.add_evaluation(progress)):
            return
        worker.save(progress)
        self._saved_step, self._saved_s = progress.step, self.clock()


def _accumulate(engine: Engine, batch: Batch, micro_batch_size: int, step: int) -> Tensor:
    """Mean loss of this rank's share, after a backward pass of every micro-batch.

    The loss stays on the device, so the step is launched without a host-device sync.
    """
    columns = [
        torch.split(as_tensor(batch[k]).to(engine.device, non_blocking=True), micro_batch_size)
        for k in ("image", "labels", "sample")
    ]
    total = torch.zeros((), device=engine.device)
    for images, labels, samples in zip(*columns, strict=True):
        total += engine.backward(images, labels.long(), samples, step).float()
    return total / len(columns[0])


def as_tensor(column: np.ndarray | Tensor) -> Tensor:
    """A column of a batch; images may be a tensor already, on the device."""
    if isinstance(column, Tensor):
        return column
    return torch.from_numpy(np.ascontiguousarray(column))
