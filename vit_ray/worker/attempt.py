"""One attempt of a run on one worker: it trains or evaluates, and reports how it ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.evaluation.examples import NUM_TRAINING, training_files
from vit_ray.measure.phases import Phase, phase_metrics
from vit_ray.measure.profile import profiled
from vit_ray.metric_names import (
    CHECKPOINT_STALL_S,
    COST_GPU_HOURS,
    PERF_COMPILED,
    RESULT_STEP,
    RUN_WALL_S,
    STARTUP_COMPILE_S,
    STARTUP_FIRST_STEP_S,
)
from vit_ray.outcomes import EventKind, Failure
from vit_ray.own_parts import Callback, own_part
from vit_ray.training.engine.deepspeed_engine import DeepSpeedEngine
from vit_ray.training.loop import (
    Batch,
    Ending,
    EvaluationCutError,
    RankContext,
    SkippedStep,
    TrainingLoop,
    as_tensor,
)
from vit_ray.training.out_of_memory import is_out_of_memory
from vit_ray.worker.evaluation import Evaluator
from vit_ray.worker.job import DivergedError, TrainJob, UnrecoverableError
from vit_ray.worker.nonfinite import NonfinitePolicy
from vit_ray.worker.run_link import RunLink
from vit_ray.worker.saving import CheckpointSaver
from vit_ray.worker.setup import smaller_micro_batch, work_per_image
from vit_ray.worker.watchdog import Watchdog


def run_attempt(link: RunLink, set_up: Callable[[], Attempt | EvaluationAttempt | None]) -> None:
    """Run to the end, and report an error that would happen again after a restart.

    Args:
        set_up: builds the attempt; None if there is nothing left to do.
    """
    try:
        attempt = set_up()
        if attempt is not None:
            with contextlib.closing(attempt):
                attempt.run()
    except UnrecoverableError as error:
        link.record.fail(Failure(str(error), has_diverged=isinstance(error, DivergedError)))
        if not error.is_agreed:
            raise  # the other workers may wait for this one: let Ray end them


@dataclass
class EvaluationAttempt:
    """An evaluation's own run on one worker."""

    link: RunLink
    evaluator: Evaluator
    watchdog: Watchdog

    def run(self) -> None:
        """Evaluate once.

        Raises:
            UnrecoverableError: as `Evaluator.evaluate`.
        """
        try:
            self.link.log(0, self.evaluator.evaluate(0, self.link.is_ending))
        except EvaluationCutError:
            text = f"{self.link.asked_stop_reason()}; the evaluation has no results"
            self.link.note_last(EventKind.STOPPED, text, 0)

    def close(self) -> None:
        self.watchdog.stop()


@dataclass
class Attempt:
    """The parts of a worker, combined; each part answers some of the loop's calls."""

    job: TrainJob
    context: RankContext
    link: RunLink
    engine: DeepSpeedEngine
    batches: Iterator[Batch]
    evaluator: Evaluator
    saver: CheckpointSaver
    nonfinite: NonfinitePolicy
    watchdog: Watchdog
    progress: Progress
    preemption_notice: Callable[[], Any]
    """What the cluster has announced about this group's nodes; None = nothing."""
    _has_started: bool = field(default=False, init=False)
    _notice_seen: str = field(default="", init=False)
    _failed_callbacks: set[str] = field(default_factory=set, init=False)

    def run(self) -> None:
        """Train to the end.

        Raises:
            UnrecoverableError: the recipe says to stop here, or the data are invalid.
            SmallerMicroBatchError: a pass did not fit into memory; a smaller one in the next
                attempt may.
        """
        try:
            self._train()
        except UnrecoverableError as error:
            if error.is_agreed:  # no rank has died: the last checkpoint can still be finished
                self.watchdog.pause()
                with contextlib.suppress(UnrecoverableError, RuntimeError, TimeoutError):
                    self.saver.wait_until_written()
            raise
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            smaller = smaller_micro_batch(self.job, self.context.micro_batch_size)
            self.link.note_own(EventKind.OUT_OF_MEMORY, str(smaller), self.progress.step)
            raise smaller from error

    def close(self) -> None:
        """Stop the watchdog and leave the process group in the way Ray expects."""
        self.watchdog.stop()
        self.engine.close()

    def _train(self) -> None:
        progress, clock = self.progress, self.link.clock
        batches = clock.waits_for(self.batches)
        steps = self.job.recipe.train.profile_steps
        if steps is not None and self.context.rank == 0:
            batches = profiled(batches, steps, progress.step + 1, self.link.keep_file)
        if progress.step == 0 and self.context.rank == 0:
            batches = self._shown(batches)
        loop = TrainingLoop(
            self.engine, batches, self.job.recipe, self.context, self, progress,
            work_per_image(self.job),
        )  # fmt: skip
        # A first step compiles, and waits for the first batch.
        is_stopping = self.context.all_sum([float(self.link.is_ending())])[0] > 0
        ending = Ending.STOPPED if is_stopping else loop.run()
        self.watchdog.pause()  # the steps are over, and waiting has its own limits
        self.saver.wait_until_written()
        if ending is not Ending.FINISHED:
            step = progress.step
            saved = f"checkpoint at step {step}"
            if step == 0:
                saved = "no step was taken"
            elif not self.context.all_sum([float(self.saver.is_whole(step))])[0]:
                saved = f"the checkpoint of step {step} could not be written"
            if self.link.is_resizing and not (progress.ended or self.link.record.stop_reason()):
                text = f"the group changes its size; {saved}"
                self.link.note_last(EventKind.RESIZING, text, step)
                return
            text = f"{progress.ended or self.link.asked_stop_reason()}; {saved}"
            self.link.note_last(EventKind.STOPPED, text, step)

    def _shown(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; crops of the first batch are kept with the run."""
        first = next(batches, None)
        if first is None:
            return
        pixels, samples, labels = (
            as_tensor(first[key][:NUM_TRAINING]).cpu().numpy()
            for key in ("image", "sample", "labels")
        )
        files = training_files(pixels, samples.tolist(), labels, self.job.classes)
        self.link.show_files(files, "images")
        yield first
        yield from batches

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics for MLflow, and on rank 0 a copy for the recipe's callbacks.

        A callback that raises is not called again.
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
                own_part(name, "train.callbacks", Callback)(step, dict(metrics))
            except Exception as error:  # of the user's code, which training does not depend on
                self._failed_callbacks.add(name)
                text = f"{name} is not called again: {type(error).__name__}: {error}"
                self.link.note(EventKind.CALLBACK_FAILED, text, step)

    def note_step(self, step: int) -> None:
        """Progress for the watchdog, and through its heartbeat for the display.

        Raises:
            UnrecoverableError: checkpoints can no longer be written.
        """
        self.watchdog.note_step(step)
        self.link.clock.note_step()
        self.saver.check()
        self._note_start(step)

    def _note_start(self, step: int) -> None:
        """Log, once, how long it took since Ray was up, and how much of that was compiling."""
        if self._has_started:
            return
        self._has_started = True
        since_ray_s = time.time() - self.job.ray_ready_s
        compiled_s, failure = self.engine.compile_s(), self.engine.compile_failure()
        metrics = {
            STARTUP_FIRST_STEP_S: since_ray_s,
            PERF_COMPILED: float(compiled_s > 0 and failure is None),
        }
        text = f"{since_ray_s:.1f} s after Ray was up"
        if compiled_s:
            metrics[STARTUP_COMPILE_S] = compiled_s
            text += f", {compiled_s:.1f} s of them torch.compile's"
        if failure is not None:
            self.link.note(EventKind.NOT_COMPILED, f"the model runs eagerly: {failure}", step)
        self.link.note(EventKind.FIRST_STEP, text, step)
        self.link.log(step, metrics)

    def evaluate(self, step: int) -> dict[str, float]:
        wants_save = partial(self.save_is_wanted, step)
        try:
            with self.link.clock.within(Phase.EVALUATION):
                figures = self.evaluator.evaluate(step, self.link.is_ending, wants_save)
        except EvaluationCutError as cut:
            reason = "a stop" if cut.is_stopping else "a checkpoint at once"
            text = f"for {reason}; it has no results"
            self.link.note(EventKind.EVALUATION_CUT, text, step)
            raise
        if figures:
            self._note_start(step)  # in an attempt without steps, which only evaluates
            if step == self.job.total_steps and not self.job.recipe.keeps_best:
                self.evaluator.show_files()
        return figures

    def save(self, progress: Progress) -> None:
        """Start writing a checkpoint, and log how long training stood still and where time went."""
        metrics = self._note_time(progress)
        with self.link.clock.within(Phase.CHECKPOINT):
            stall_s = self.saver.save(progress)
        progress.metrics[CHECKPOINT_STALL_S] = stall_s
        self.link.log(progress.step, {**metrics, CHECKPOINT_STALL_S: stall_s})

    def _note_time(self, progress: Progress) -> dict[str, float]:
        """Where the time of the run went so far, also in its progress."""
        progress.seconds, progress.until_s = self.link.clock.spent()
        metrics = phase_metrics(progress.seconds)
        if self.engine.device.type == "cuda" and progress.train_seconds:
            held_s = metrics[RUN_WALL_S] - progress.seconds[Phase.PLACE]
            mean_workers = progress.worker_seconds / progress.train_seconds
            metrics[COST_GPU_HOURS] = held_s * mean_workers / 3600
        progress.metrics |= metrics
        return metrics

    def add_evaluation(self, progress: Progress) -> bool:
        """Add an evaluation to the checkpoint of its step, when all ranks have written that."""
        with self.watchdog.paused(), self.link.clock.within(Phase.CHECKPOINT):
            self.saver.wait_until_written()
        metrics = self._note_time(progress)
        if self.context.rank == 0:  # instead of those of the checkpoint before the evaluation
            self.link.record.metrics(progress.step, metrics, again=True)
        is_added = self.context.rank == 0 and self.saver.note_evaluation(progress)
        return self.context.all_sum([float(is_added)])[0] > 0

    def on_bad_step(self, progress: Progress, batch: Batch) -> None:
        """Report a refused step.

        Raises:
            DivergedError: the recipe says to stop, or there were too many in a row.
        """
        self.nonfinite.handle(progress, batch)

    def on_skipped_step(self, progress: Progress, skipped: SkippedStep) -> None:
        self.nonfinite.report_skipped(progress, skipped)

    def wishes(self, step: int) -> tuple[bool, bool]:
        """For a checkpoint at once, and to stop."""
        return self.save_is_wanted(step), self.link.is_ending()

    def save_is_wanted(self, step: int) -> bool:
        """Once for each notice that a node of this run leaves."""
        notice = self.preemption_notice()
        if notice is None or repr(notice) == self._notice_seen:
            return False
        self._notice_seen = repr(notice)
        text = "a node is about to leave: checkpoint at once"
        if notice.deadline_ms is not None:
            left_s = notice.deadline_ms / 1e3 - time.time()
            text = f"a node leaves in {left_s:.0f} s: checkpoint at once"
        self.link.note_own(EventKind.PREEMPTION, text, step)
        return True
