"""One training (or evaluation) from recipe to result: checks, recorder, workers, outcome."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import ray
from numpy.typing import NDArray

from vit_ray.checkpoints.run_checkpoints import newest_checkpoint, result_checkpoint
from vit_ray.config import Recipe, require
from vit_ray.config.recorded_recipe import INIT_RUN
from vit_ray.data.format.labels import all_first_labels
from vit_ray.data.stream.bad_rows import BadRowLimit
from vit_ray.launch.actor_calls import ANSWER_LIMIT_S
from vit_ray.launch.cluster import ClusterShape, connect
from vit_ray.launch.cluster_checks import check_cluster
from vit_ray.launch.mlflow_model import model_files
from vit_ray.launch.model_checks import Kind
from vit_ray.launch.open_record import OpenRun, end_record, open_record
from vit_ray.launch.paper_comparison import PAPER_FILE, evaluation_table
from vit_ray.launch.pool_training import RunFailedError, run_workers
from vit_ray.launch.prepared_run import PreparedRun, prepare_evaluation, prepared_training
from vit_ray.launch.progress_display import shown_progress
from vit_ray.launch.run_metadata import (
    is_on_dev_split,
    training_cost,
)
from vit_ray.launch.stopping import RunStoppedError, stopping_on_signals
from vit_ray.launch.streams import ResolvedRun, augmentation_of
from vit_ray.measure.best_evaluation import with_best
from vit_ray.outcomes import EventKind
from vit_ray.storage import locate
from vit_ray.worker.job import TrainJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run."""

    run_id: str | None
    """MLflow run; None if MLflow was away all the time."""
    name: str
    steps: int
    """Optimizer steps completed."""
    total_steps: int
    metrics: dict[str, float]
    """Last value of every metric, and of an evaluation the best where the run keeps that."""
    checkpoint: str
    """Folder of the newest checkpoint, or of the best where the run keeps that."""
    already_complete: bool = False
    """The run had ended before; nothing was trained."""
    hint: str = ""
    """How to open MLflow's page."""
    events: list[str] = field(default_factory=list)
    """Events during the run: restarts, refused steps, failed saves."""

    evaluation_due: bool = False
    """It was stopped in the evaluation after its last step."""
    ended: str = ""
    """Why it was over before its last step (early stopping); empty if it was not."""

    @property
    def is_complete(self) -> bool:
        """Whether it reached its end (and was not stopped on request)."""
        is_done = self.steps >= self.total_steps and not self.evaluation_due
        return is_done or bool(self.ended)


@dataclass(frozen=True)
class ParentRun:
    """The sweep or study that a run is part of."""

    run: OpenRun
    """The parent, which shows how far its children are."""
    node_id: str
    """Node of the parent's driver, where MLflow is written."""


def train(
    recipe: Recipe,
    *,
    kind: Kind = "pretrain",
    tags: dict[str, str] | None = None,
    parent: ParentRun | None = None,
    until_step: int | None = None,
) -> RunResult:
    """Train as the recipe says, from the newest checkpoint of this name if there is one.

    Args:
        until_step: end there, evaluated and saved, before the run is complete: the same call with
            a later step, or without, goes on as if it had not been interrupted.

    Raises:
        ValueError: the recipe cannot work; nothing was started.
        RunFailedError: training failed more often than the recipe allows.
    """
    with prepared_training(recipe, kind) as prepared:
        if until_step is not None and until_step < prepared.resolved.total_steps:
            prepared = replace(prepared, until_step=until_step)
        if prepared.is_over:
            return _finished_before(prepared)
        return run_prepared(prepared, tags or {}, parent)


def finetune(recipe: Recipe, *, tags: dict[str, str] | None = None) -> RunResult:
    """Train from the weights in `init_from` with a new head; positions are resized.

    Raises:
        ValueError: no weights are given, or as `train`.
    """
    require(recipe.init_from, "init_from", "the run, checkpoint or file to fine-tune")
    return train(recipe, kind="finetune", tags=tags)


def evaluate(recipe: Recipe) -> dict[str, float]:
    """Accuracy, and few-shot accuracy if the recipe asks for it, of the weights in `init_from`.

    Raises:
        ValueError: no weights or no data set are given, or they do not fit.
        RunStoppedError: it was stopped on request.
    """
    require(recipe.init_from, "init_from", "the run, checkpoint or file to evaluate")
    return run_prepared(prepare_evaluation(recipe)).metrics


def run_prepared(
    prepared: PreparedRun, tags: Mapping[str, str] | None = None, parent: ParentRun | None = None
) -> RunResult:
    """Record, start the workers and wait for them.

    Raises:
        RunFailedError: as `train`.
        RunStoppedError: what has no checkpoints was stopped on request.
    """
    recipe, resolved, kind = prepared.recipe, prepared.resolved, prepared.kind
    cluster = connect(recipe)
    use_gpu = check_cluster(recipe, cluster)
    position = prepared.resume_from.position if prepared.resume_from else None
    with open_record(
        recipe,
        kind,
        resolved,
        cluster,
        run_id=position.tracking_run_id if position else None,
        tags={**(tags or {}), **_origin(prepared)},
        node_id=parent.node_id if parent else None,
        resume_step=position.step if position else None,
        training_id=prepared.training_id,
        parent=parent.run.opening if parent else None,
        measured_on="dev" if kind == "sweep_trial" or is_on_dev_split(recipe) else "eval",
        awaited_metric="dev/top1" if kind == "sweep_trial" else None,
    ) as run:
        for note, text in prepared.notes:
            run.record.event(note, text, position.step if position else 0)
        job = _job(prepared, cluster, run)
        with (
            shown_progress(run.control, recipe.name, resolved.total_steps, is_shown=parent is None),
            # A sweep or study passes it on to the runs under it.
            stopping_on_signals(run.control) if parent is None else contextlib.nullcontext(),
        ):
            try:
                run_workers(job, resolved.streams, cluster, use_gpu=use_gpu)
            except Exception:
                _record_cost_of_failure(prepared, run)
                raise
        result = _with_cost(_result(job, run), prepared, run)
        run.is_complete = result.is_complete
        if kind == "evaluate" and (table := evaluation_table(recipe, result.metrics)):
            run.record.text(PAPER_FILE, table.csv())
        try:
            _log_model(result, prepared, run)
        except (ray.exceptions.RayError, RuntimeError) as error:  # the result stands without it
            logger.warning("the trained model is not logged in MLflow: %s", error)
        return result


def _origin(prepared: PreparedRun) -> dict[str, str]:
    """Tag of the run whose weights a new one begins with; a folder alone may be another run's."""
    if prepared.recipe.init_from is None or prepared.resume_from is not None:
        return {}
    from vit_ray.checkpoints.init_weights import meta_state_of  # with torch: seconds

    run_id = meta_state_of(prepared.recipe.init_from).run_id
    return {INIT_RUN: run_id} if run_id else {}


def _job(prepared: PreparedRun, cluster: ClusterShape, run: OpenRun) -> TrainJob:
    recipe, resolved = prepared.recipe, prepared.resolved
    return TrainJob(
        recipe=recipe,
        kind="train" if prepared.trains else "evaluate",
        num_classes=prepared.num_classes,
        num_images=resolved.num_images,
        total_steps=resolved.total_steps,
        data_fingerprint=resolved.manifest.fingerprint,
        run_folder=recipe.run_folder,
        new_head=prepared.new_head,
        few_shot_classes=resolved.few_shot_classes,
        ray_ready_s=cluster.ready_s,
        record=run.record,
        control=run.control,
        lock_number=prepared.lock_number,
        note_bad_images=_bad_images(recipe, resolved).note,
        few_shot_labels=_few_shot_labels(resolved),
        extraction=prepared.extraction,
        answers=prepared.answers,
        until_step=prepared.until_step,
    )


def _few_shot_labels(resolved: ResolvedRun) -> Callable[[], NDArray[np.int32]] | None:
    stream = resolved.streams.get("few_shot_train")
    return None if stream is None else partial(all_first_labels, stream.manifest.path)


def _bad_images(recipe: Recipe, resolved: ResolvedRun) -> BadRowLimit:
    """Limit for images that travel encoded and cannot be decoded in a training worker."""
    return BadRowLimit(recipe.run_folder, resolved.num_images, recipe.data.max_bad_fraction)


def _result(job: TrainJob, run: OpenRun) -> RunResult:
    status = run.control.status()
    folder = locate(job.run_folder)
    checkpoint = newest_checkpoint(folder) if job.kind == "train" else None
    steps = checkpoint.position.step if checkpoint else 0
    ended = checkpoint.position.progress.ended if checkpoint else ""
    was_stopped = any(event.kind is EventKind.STOPPED for event in status.events)
    if was_stopped and job.kind == "evaluate":
        raise RunStoppedError("the evaluation was stopped; there are no figures of it")
    if job.kind == "train" and not (steps >= job.last_step or ended or was_stopped):
        raise RunFailedError(
            f"training ended, but its newest whole checkpoint is of step {steps} of "
            f"{job.last_step}: the last one could not be written to {job.run_folder}; see the "
            "events, make room there and run the same command again"
        )
    return RunResult(
        run_id=run.record.run_id(),
        name=job.recipe.name,
        steps=steps,
        total_steps=job.total_steps,
        evaluation_due=checkpoint.position.progress.evaluation_due if checkpoint else False,
        ended=ended,
        metrics=with_best(status.metrics),
        checkpoint=result_checkpoint(folder, checkpoint).folder.uri if checkpoint else "",
        hint=run.record.hint(),
        events=[f"{event.kind}: {event.text}" for event in status.events],
    )


def _with_cost(result: RunResult, prepared: PreparedRun, run: OpenRun) -> RunResult:
    """Add the training's cost to the record and to the result."""
    if not prepared.trains:
        return result
    cost = training_cost(prepared.recipe, prepared.resolved, result.steps)
    run.record.metrics(result.steps, cost, ANSWER_LIMIT_S)  # before the end, which comes next
    return replace(result, metrics={**result.metrics, **cost})


def _record_cost_of_failure(prepared: PreparedRun, run: OpenRun) -> None:
    """What has been computed of a training that failed."""
    if prepared.trains:
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):  # the failure is reported
            step = run.control.status().step
            cost = training_cost(prepared.recipe, prepared.resolved, step)
            run.record.metrics(step, cost, ANSWER_LIMIT_S)


def _log_model(result: RunResult, prepared: PreparedRun, run: OpenRun) -> None:
    """What has been trained to its end, and has a head, as a model of MLflow."""
    recipe, config = prepared.recipe, prepared.recipe.tracking
    has_head = prepared.trains and recipe.train.loss != "masked_patch"
    if config.log_model and result.is_complete and has_head:
        augmentation = augmentation_of(recipe.model, recipe.data.eval_augment)
        num_classes = prepared.resolved.manifest.num_classes
        run.record.model(
            model_files(recipe.model, augmentation, result.checkpoint, num_classes),
            recipe.name,
            result.steps,
            {"model": recipe.model.name, "checkpoint": result.checkpoint},
            None if prepared.kind == "sweep_trial" else config.register_as,
        )


def _finished_before(prepared: PreparedRun) -> RunResult:
    """By its last checkpoint; its driver may have died after that, and before the run's end."""
    checkpoint = prepared.resume_from
    assert checkpoint is not None
    position, folder = checkpoint.position, locate(prepared.recipe.run_folder)
    metrics = with_best(position.progress.metrics)
    cost = training_cost(prepared.recipe, prepared.resolved, position.step)
    run_id = position.tracking_run_id
    if position.progress.is_over(prepared.resolved.total_steps):
        run_id = end_record(prepared.recipe, run_id, position.step, cost)
    return RunResult(
        run_id=run_id,
        name=prepared.recipe.name,
        steps=position.step,
        total_steps=prepared.resolved.total_steps,
        metrics={**metrics, **cost},
        checkpoint=result_checkpoint(folder, checkpoint).folder.uri,
        already_complete=True,
        ended=position.progress.ended,
    )
