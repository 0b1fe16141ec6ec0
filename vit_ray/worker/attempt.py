"""One attempt of a run on one worker: it trains or evaluates, and reports how it ended.

The engine does not apply a step whose loss or gradient is not finite, or whose gradient norm is an
outlier: weights and optimizer stay as before the step.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import torch

from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.evaluation.examples import NUM_TRAINING, training_files
from vit_ray.measure.meters import is_out_of_memory, profiled
from vit_ray.measure.phases import Phase, phase_metrics
from vit_ray.metric_names import (
    CHECKPOINT_STALL_S,
    COST_GPU_HOURS,
    PERF_COMPILED,
    RESULT_STEP,
    RUN_WALL_S,
    STARTUP_COMPILE_S,
    STARTUP_FIRST_STEP_S,
)
from vit_ray.outcomes import EventKind, RunFailedError
from vit_ray.own_parts import own_part
from vit_ray.ray_internals import preemption_notice
from vit_ray.training.collectives import all_max, all_rows
from vit_ray.training.engine import COMPILE_FAILURES, DeepSpeedEngine, compile_s
from vit_ray.training.loop import Batch, RankContext, SkippedStep, TrainingLoop, as_tensor
from vit_ray.training.memory_estimate import compute_per_image
from vit_ray.training.objective import normalize
from vit_ray.worker.evaluation import Evaluator
from vit_ray.worker.job import NonfiniteError, SmallerMicroBatchError, TrainJob
from vit_ray.worker.run_link import DELIVERY_S, RunLink
from vit_ray.worker.saving import CheckpointSaver

# Steps in a row that are not finite, after which a run stops with any setting.
MAX_NONFINITE_STEPS: Final = 3
# Samples, or steps, named in an event.
MAX_LISTED: Final = 64


def _listed(numbers: Sequence[int]) -> str:
    text = ", ".join(map(str, numbers[:MAX_LISTED]))
    return text if len(numbers) <= MAX_LISTED else f"{text}, ... ({len(numbers)} in total)"


@contextlib.contextmanager
def reported_failures(link: RunLink) -> Iterator[None]:
    """Report an error of the block that would happen again after a restart.

    Raises:
        RunFailedError: the other workers may wait for this worker: Ray then ends them.
    """
    try:
        yield
    except RunFailedError as error:
        link.record.fail(error)
        if not isinstance(error, NonfiniteError):
            raise


@dataclass
class Attempt:
    """The parts of a worker, combined; answers the calls of the training loop."""

    job: TrainJob
    context: RankContext
    link: RunLink
    engine: DeepSpeedEngine
    batches: Iterator[Batch]
    evaluator: Evaluator
    saver: CheckpointSaver
    progress: Progress
    _has_started: bool = field(default=False, init=False)
    _notice_seen: str = field(default="", init=False)
    _failed_callbacks: set[str] = field(default_factory=set, init=False)

    def run(self) -> None:
        """Train to the end.

        Raises:
            RunFailedError: a restart would meet the same error.
            SmallerMicroBatchError: a pass did not fit into memory; the next attempt takes fewer
                images.
        """
        try:
            self._train()
        except RuntimeError as error:
            if isinstance(error, RunFailedError) or not is_out_of_memory(error):
                raise
            smaller = smaller_micro_batch(self.job, self.context.micro_batch_size)
            self.link.record.event(EventKind.OUT_OF_MEMORY, str(smaller), self.progress.step)
            raise smaller from error
        finally:
            self.engine.close()

    def _train(self) -> None:
        progress, batches = self.progress, self.batches
        steps = self.job.recipe.train.profile_steps
        if steps is not None and self.context.rank == 0:
            batches = profiled(batches, steps, progress.step + 1, self.link.keep_file)
        if progress.step == 0 and self.context.rank == 0:
            batches = self._with_crops_kept(batches)
        loop = TrainingLoop(
            self.engine, batches, self.job.recipe, self.context, self, progress,
            compute_per_image(self.job.recipe, self.job.num_classes),
        )  # fmt: skip
        # Asked before the first step, which takes long: it compiles, and waits for its batch.
        if not self.context.all_sum([float(self.link.is_ending())])[0]:
            loop.run()
        self.link.watchdog.allow(math.inf)  # the steps are over, and the next wait has a limit
        self.saver.wait_until_written()
        if progress.ended or not progress.is_over(self.job.total_steps):
            step, link = progress.step, self.link
            saved = f"checkpoint at step {step}" if step else "no step was taken"
            if step and not self.context.all_sum([float(self.saver.writer.is_whole(step))])[0]:
                saved = f"the checkpoint of step {step} could not be written"
            kind, why = EventKind.STOPPED, progress.ended or link.asked_stop_reason()
            if link.is_resizing and not (progress.ended or link.record.stop_reason()):
                kind, why = EventKind.RESIZING, "the group changes its size"
            link.note(kind, f"{why}; {saved}", step, DELIVERY_S)

    def _with_crops_kept(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; crops of the first batch become files of the run."""
        first = next(batches)
        pixels, samples, labels = (
            as_tensor(first[key][:NUM_TRAINING]).cpu().numpy()
            for key in ("image", "sample", "labels")
        )
        files = training_files(pixels, samples.tolist(), labels, self.job.classes)
        self.link.show_files(files, "images")
        yield first
        yield from batches

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Send metrics to MLflow, and call the recipe's callbacks on rank 0.

        A callback that raises an error is not called again.
        """
        self.link.log(step, metrics)
        if metrics.get(RESULT_STEP) == step:  # the best evaluation so far
            self.evaluator.show_files()
        if self.context.rank:
            return
        for name in self.job.recipe.train.callbacks:
            if name in self._failed_callbacks:
                continue
            try:
                own_part(name, "train.callbacks")(step, dict(metrics))
            except Exception as error:  # training does not depend on the user's callbacks
                self._failed_callbacks.add(name)
                text = f"{name} is not called again: {type(error).__name__}: {error}"
                self.link.note(EventKind.CALLBACK_FAILED, text, step)

    def note_step(self, step: int, wait_s: float) -> None:
        """Give the progress to the watchdog, whose heartbeats give it to the display.

        Raises:
            RunFailedError: checkpoints can no longer be written.
        """
        self.link.watchdog.note_step(step)
        self.link.clock.note_step(wait_s)
        self.saver.check()
        self._note_start(step)

    def _note_start(self, step: int) -> None:
        """Log once, in seconds, how long the start took, and how much of that was compiling."""
        if self._has_started:
            return
        self._has_started = True
        since_ray_s = time.time() - self.job.ray_ready_s
        compiled_s, failures = compile_s(), COMPILE_FAILURES
        metrics = {
            STARTUP_FIRST_STEP_S: since_ray_s,
            PERF_COMPILED: float(compiled_s > 0 and not failures),
        }
        text = f"{since_ray_s:.1f} s after Ray was up"
        if compiled_s:
            metrics[STARTUP_COMPILE_S] = compiled_s
            text += f", {compiled_s:.1f} s of them torch.compile's"
        if failures:
            self.link.note(EventKind.NOT_COMPILED, f"the model runs eagerly: {failures[0]}", step)
        self.link.note(EventKind.FIRST_STEP, text, step)
        self.link.log(step, metrics)

    def evaluate(self, step: int) -> dict[str, float]:
        with self.link.clock.within(Phase.EVALUATION):
            metrics = self.evaluator.evaluate(step, partial(self.save_is_wanted, step))
        if metrics:
            self._note_start(step)  # an attempt may only evaluate
            if step == self.job.total_steps and not self.job.recipe.keeps_best:
                self.evaluator.show_files()
        return metrics

    def save(self, progress: Progress) -> None:
        """Start writing a checkpoint, and log how long training waited and where time went."""
        metrics = self._note_time(progress)
        with self.link.clock.within(Phase.CHECKPOINT):
            stall_s = self.saver.save(progress)
        progress.metrics[CHECKPOINT_STALL_S] = stall_s
        self.link.log(progress.step, {**metrics, CHECKPOINT_STALL_S: stall_s})

    def _note_time(self, progress: Progress) -> dict[str, float]:
        """Metrics of where the run's time went so far; also stored in `progress`."""
        progress.seconds, progress.until_s = self.link.clock.spent()
        metrics = phase_metrics(progress.seconds)
        if self.engine.device.type == "cuda" and progress.train_seconds:
            placed_s = metrics[RUN_WALL_S] - progress.seconds[Phase.PLACE]
            mean_workers = progress.worker_seconds / progress.train_seconds
            metrics[COST_GPU_HOURS] = placed_s * mean_workers / 3600
        progress.metrics |= metrics
        return metrics

    def add_evaluation(self, progress: Progress) -> bool:
        """Add an evaluation to the checkpoint of its step; first waits until that is written.

        Returns:
            Whether the checkpoint is complete and now has the evaluation.

        Raises:
            LockLostError: another driver has taken over the run.
        """
        with self.link.watchdog.paused(), self.link.clock.within(Phase.CHECKPOINT):
            self.saver.wait_until_written()
        metrics, is_added = self._note_time(progress), False
        if self.context.rank == 0:
            # These replace the metrics that `save` logged before the evaluation.
            self.link.record.metrics(progress.step, metrics, again=True)
            is_added = self.saver.writer.note_evaluation(progress)
        return self.context.all_sum([float(is_added)])[0] > 0

    def on_bad_step(self, progress: Progress, batch: Batch) -> None:
        """Report step `progress.step - 1`, which is not finite.

        Raises:
            NonfiniteError: the recipe says to stop, or too many steps in a row are not finite.
        """
        step, nonfinite = progress.step, self.job.recipe.train.nonfinite
        text = (
            f"loss or gradient of step {step - 1} is not finite; the step was not applied. "
            f"{self._described(batch)}"
        )
        self.link.note(EventKind.NOT_FINITE, text, step)
        if nonfinite == "stop" or progress.nonfinite_steps >= MAX_NONFINITE_STEPS:
            self.link.watchdog.allow(math.inf)
            # All ranks are alive: they can still finish the last checkpoint.
            with contextlib.suppress(RuntimeError, TimeoutError):
                self.saver.wait_until_written()
            raise NonfiniteError(
                f"{text}. train.nonfinite={nonfinite} with {progress.nonfinite_steps} such "
                "steps in a row; lower optim.learning_rate (with resume=changed), or set "
                "train.nonfinite to skip"
            )

    def on_skipped_steps(
        self, progress: Progress, largest: SkippedStep, steps: Sequence[int]
    ) -> None:
        text = (
            f"steps not applied: {_listed(steps)}; {progress.skipped_steps} since the run began. "
            f"The gradient norm of step {largest.step} is {largest.grad_norm:.3g}, above the limit "
            f"of {largest.norm_limit:.3g} (train.skip_above={self.job.recipe.train.skip_above:g} x "
            f"the median). {self._described(largest.batch)}"
        )
        self.link.note(EventKind.SKIPPED, text, progress.step)

    def _described(self, batch: Batch) -> str:
        """A text for an event: samples of the global batch, and the first layer whose activations
        are not finite, or the one with the largest; all ranks call it.
        """
        engine = self.engine
        rank_samples = np.asarray(batch["sample"], np.int64)
        samples = np.unique(all_rows(rank_samples, engine.device)).tolist()
        passes = [
            engine.activation_sizes(normalize(images.to(engine.device), engine.dtype))
            for images in torch.split(as_tensor(batch["image"]), self.context.micro_batch_size)
        ]
        layers = list(passes[0])
        by_layer = [max(one_pass[layer] for one_pass in passes) for layer in layers]
        sizes = all_max(by_layer, engine.device)
        largest = layers[int(np.argmax(sizes))]  # the first of those that are not finite
        where = "finite when the model is evaluated, largest in"
        if math.isinf(max(sizes)):
            where = "first not finite in"
        return f"Samples {_listed(samples)}. Activations are {where} {largest}"

    def wishes(self, step: int) -> tuple[bool, bool]:
        """Whether this rank wants a checkpoint at once, and whether it wants to stop."""
        return self.save_is_wanted(step), self.link.is_ending()

    def save_is_wanted(self, step: int) -> bool:
        """True once for each notice that a node of this run will be preempted; reports it."""
        notice = repr(preemption_notice())
        if notice in ("None", self._notice_seen):
            return False
        self._notice_seen = notice
        self.link.record.event(EventKind.PREEMPTION, "a node leaves: checkpoint at once", step)
        return True


def smaller_micro_batch(job: TrainJob, failed: int) -> SmallerMicroBatchError:
    """The error that ends this attempt; the next attempt takes at most half the images per pass.

    Args:
        failed: images per pass that did not fit.

    Raises:
        RunFailedError: the smallest possible pass did not fit.
    """
    minimum = job.recipe.train.pass_multiple
    if failed <= minimum:
        raise RunFailedError(
            f"a pass of {failed} does not fit into device memory, and no smaller one is possible; "
            "use train.zero_stage=3, train.activation_checkpointing=1 or train.offload=true, or a "
            "smaller model"
        )
    limit = max(minimum, failed // 2)
    return SmallerMicroBatchError(
        f"{failed} images per pass do not fit; trying at most {limit}", limit
    )
