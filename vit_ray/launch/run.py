"""One training (or evaluation) from recipe to result: checks, recorder, workers, outcome."""

import contextlib
import importlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event, Thread
from typing import Final

import ray

from vit_ray.addresses import redacted
from vit_ray.checkpoints.checkpoint import Checkpoint, Progress
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint, result_checkpoint
from vit_ray.config import Recipe, require
from vit_ray.config.keys import INIT_RUN, used_sections
from vit_ray.data.shards import all_first_labels
from vit_ray.data.tasks import ANSWER_S, repeated
from vit_ray.launch.cluster_checks import check_cluster, check_shared, paths_of
from vit_ray.launch.connection import ClusterShape, connect
from vit_ray.launch.prepared_run import PreparedRun, prepare_evaluation, prepared_training
from vit_ray.launch.resolved_run import Kind
from vit_ray.launch.run_record import OpenRun, end_record, open_record, training_cost
from vit_ray.launch.terminal import shown_progress, stopping_on_signals
from vit_ray.launch.workers import RunFailedError, run_workers
from vit_ray.metric_names import DEV_TOP1, EVAL_AVERAGED_TOP1, EVAL_TOP1, few_shot_top1, with_best
from vit_ray.outcomes import BRANCH_NOTE, BRANCH_TAG, EventKind, RunStoppedError
from vit_ray.storage import locate
from vit_ray.tracking.metrics_log import ARRIVAL_S
from vit_ray.tracking.recorder import FIRST_ANSWER_S
from vit_ray.worker.job import TrainJob

# Tag of a run that its sweep has stopped: this step and the planned last step
STOPPED_EARLY: Final = "vit_ray.stopped_early"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run.

    Attributes:
        run_id: MLflow run; None if MLflow was away all the time.
        steps: optimizer steps completed.
        metrics: last value of every metric; evaluation metrics are the best ones if the run keeps
            the best.
        checkpoint: folder of the newest checkpoint, or of the best if the run keeps the best.
        already_complete: the run had ended before; nothing was trained.
        hint: how to open MLflow's page.
        events: events during the run: restarts, refused steps, failed saves.
        evaluation_due: whether the run was stopped in the evaluation after its last step.
        ended: why the run ended before its last step (early stopping); else empty.
        num_eval_images: images that the accuracies in `metrics` were measured on; 0 without an
            evaluation.
    """

    run_id: str | None
    name: str
    steps: int
    total_steps: int
    metrics: dict[str, float]
    checkpoint: str
    already_complete: bool = False
    hint: str = ""
    events: list[str] = field(default_factory=list)
    evaluation_due: bool = False
    ended: str = ""
    num_eval_images: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the run reached its end and was not stopped on request."""
        return bool(self.ended) or (self.steps >= self.total_steps and not self.evaluation_due)

    @property
    def top1(self) -> float:
        """As `top1_of` of its metrics."""
        return top1_of(self.metrics)


def top1_of(metrics: Mapping[str, float]) -> float:
    """Accuracy of the weights that `load` gives: the averaged ones, if any; NaN without one."""
    return metrics.get(EVAL_AVERAGED_TOP1, metrics.get(EVAL_TOP1, math.nan))


@dataclass(frozen=True)
class Following:
    """How a sweep or study, which the training is part of, follows and stops it.

    Attributes:
        stop: set to request a checkpoint and the end, because other trainings are better.
        on_evaluation: takes step and metrics of each evaluation before the last.
        evaluate_at: steps of evaluations in addition to those of the recipe.
    """

    parent: OpenRun
    stop: Event
    on_evaluation: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None
    evaluate_at: tuple[int, ...] = ()


def train(
    recipe: Recipe,
    *,
    kind: Kind = "pretrain",
    tags: dict[str, str] | None = None,
    following: Following | None = None,
) -> RunResult:
    """Train as the recipe says, from the newest checkpoint of this name if there is one.

    Raises:
        ValueError: the recipe cannot work; nothing was started.
        RunFailedError: training failed more often than the recipe allows.
    """
    parent = following.parent if following else None
    check = partial(check_start, is_child=parent is not None)
    with prepared_training(recipe, kind, check) as prepared:
        if prepared.resume_from is None or not prepared.is_over:
            return run_prepared(prepared, tags, following)
        # The run's last driver may have died before it recorded the end.
        position = prepared.resume_from.position
        cost = training_cost(prepared.resolved, position.step)
        result = _recorded(prepared, prepared.resume_from, position.progress.metrics)
        run_id = end_record(prepared.recipe, position.tracking_run_id, position.step, cost, parent)
    return replace(result, run_id=run_id, metrics=result.metrics | cost, already_complete=True)


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
    return evaluated(recipe).metrics


def evaluated(recipe: Recipe) -> RunResult:
    """As `evaluate`, with the MLflow run that has the tables and pictures."""
    require(recipe.init_from, "init_from", "the run, checkpoint or file to evaluate")
    prepared = prepare_evaluation(recipe)
    check_start(prepared.recipe, trains=False)
    return run_prepared(prepared)


def check_start(recipe: Recipe, *, trains: bool = True, is_child: bool = False) -> None:
    """Join the cluster, and check that a run can start there.

    Args:
        trains: as for `paths_of`.
        is_child: whether a sweep or study has checked the files of all its trainings.

    Raises:
        ValueError: as `connect`, `check_cluster` and `check_shared`.
    """
    cluster = connect(recipe)
    check_cluster(recipe, cluster)
    if not is_child:
        check_shared(cluster, paths_of(recipe, trains=trains))


def run_prepared(
    prepared: PreparedRun,
    tags: Mapping[str, str] | None = None,
    following: Following | None = None,
) -> RunResult:
    """Record, start the workers and wait for them.

    Raises:
        RunFailedError: as `train`.
        RunStoppedError: an evaluation was stopped on request.
    """
    # Needed when workers start; the import takes seconds, in which the recorder starts.
    Thread(target=importlib.import_module, args=("ray.train.torch",), daemon=True).start()
    recipe, resolved = prepared.recipe, prepared.resolved
    cluster = connect(recipe)
    use_gpu = check_cluster(recipe, cluster)
    position = prepared.resume_from.position if prepared.resume_from else None
    init_run = _init_run(prepared)
    origin = {INIT_RUN: init_run} if init_run else {}
    branched = locate(recipe.run_folder).child(BRANCH_NOTE)
    if position is not None and branched.exists():
        origin[BRANCH_TAG] = branched.read().decode()
    is_on_dev_split = prepared.kind == "sweep_trial" or (
        recipe.data.eval is None and recipe.data.held_out_fraction > 0
    )
    with open_record(
        recipe,
        prepared.kind,
        resolved,
        cluster,
        following.parent if following else None,
        run_id=position.tracking_run_id if position else None,
        tags={**(tags or {}), **origin},
        training_id=prepared.training_id,
        measured_on="dev" if is_on_dev_split else "eval",
        awaited_metric=_result_metric(recipe, is_on_dev_split=is_on_dev_split),
    ) as run:
        for note, text in prepared.notes:
            run.record.event(note, text, position.step if position else 0)
        with _watched(run, prepared, following):
            job = _job(prepared, cluster, run, init_run, following)
            run_workers(job, resolved.streams, cluster, use_gpu=use_gpu)
        result = _result(prepared, run)
        run.is_complete = result.is_complete
        if (
            following
            and following.stop.is_set()
            and not result.is_complete
            and not following.parent.record.stop_reason()  # else it is resumed
        ):
            run.record.tag(STOPPED_EARLY, f"step {result.steps} of {result.total_steps}")
        try:
            _log_model(result, prepared, run)
        except (ray.exceptions.RayError, RuntimeError) as error:  # the result is valid without it
            logger.warning("the trained model is not logged in MLflow: %s", error)
        return result


def _init_run(prepared: PreparedRun) -> str | None:
    """The MLflow run of the initial weights."""
    if prepared.resume_from is not None:
        return prepared.resume_from.position.init_run_id
    if prepared.recipe.init_from is None:
        return None
    from vit_ray.checkpoints.init_weights import meta_state_of  # with torch: seconds

    # The folder's name is not enough: another run may use it later.
    position = meta_state_of(prepared.recipe.init_from).position
    return position.tracking_run_id if position else None


def _result_metric(recipe: Recipe, *, is_on_dev_split: bool) -> str | None:
    """The metric that MLflow's pages show as the run's result; None if there will be none."""
    if is_on_dev_split:
        return DEV_TOP1
    if recipe.data.eval is not None:
        return EVAL_TOP1
    shots = recipe.evaluate.shots
    return few_shot_top1(shots[0]) if recipe.evaluate.few_shot_train and shots else None


@contextlib.contextmanager
def _watched(run: OpenRun, prepared: PreparedRun, following: Following | None) -> Iterator[None]:
    """Follow the run, or show its progress and stop it on signals, while the block runs."""
    if following:
        with followed(run, following):
            yield
        return
    steps = prepared.resolved.total_steps
    with (
        shown_progress(run.record, prepared.recipe.name, steps),
        stopping_on_signals(run.record.request_stop),
    ):
        yield


def followed(run: OpenRun, following: Following) -> contextlib.AbstractContextManager[None]:
    """Pass on new evaluations, and the request to stop, while the block runs."""
    newest_step, has_requested = 0, False

    def look(is_last: bool) -> None:
        nonlocal newest_step, has_requested
        if following.stop.is_set() and not has_requested and not run.record.stop_reason():
            run.record.request_stop("stopped early: other trials are better on the dev split")
            has_requested = True
        for step, metrics in run.record.status(ANSWER_S).evaluations:
            if step > newest_step and not is_last:
                newest_step = step
                following.on_evaluation(step, metrics)

    return repeated(look)


def _job(
    prepared: PreparedRun,
    cluster: ClusterShape,
    run: OpenRun,
    init_run: str | None,
    following: Following | None,
) -> TrainJob:
    recipe, resolved = prepared.recipe, prepared.resolved
    few_shot = resolved.streams.get("few_shot_train")
    return TrainJob(
        recipe=recipe,
        kind="train" if prepared.trains else "evaluate",
        num_classes=prepared.num_classes,
        classes=tuple(resolved.manifest.classes),
        total_steps=resolved.total_steps,
        data_fingerprint=resolved.manifest.fingerprint,
        data_terms=redacted(resolved.manifest.about),
        new_head=prepared.new_head,
        few_shot_classes=few_shot.manifest.num_classes if few_shot else 0,
        ray_ready_s=cluster.ready_s,
        record=run.record,
        lock_number=prepared.lock_number,
        num_evaluated={name: spec.num_images for name, spec in resolved.streams.items()},
        few_shot_labels=partial(all_first_labels, few_shot.manifest.path) if few_shot else None,
        answers=prepared.answers,
        evaluate_at=following.evaluate_at if following else (),
        init_run_id=init_run,
    )


def _result(prepared: PreparedRun, run: OpenRun) -> RunResult:
    """The run's outcome, with its cost, which is recorded.

    Raises:
        RunStoppedError: an evaluation was stopped on request.
        RunFailedError: the checkpoint of the last step is missing.
    """
    status = run.record.status(mlflow_s=FIRST_ANSWER_S)
    folder = locate(prepared.recipe.run_folder)
    was_stopped = any(event.kind == EventKind.STOPPED for event in status.events)
    if was_stopped and not prepared.trains:
        raise RunStoppedError("the evaluation was stopped; it has no results")
    result = replace(
        _recorded(prepared, newest_checkpoint(folder) if prepared.trains else None, status.metrics),
        run_id=status.run_id,
        hint=status.hint,
        events=[f"{event.kind}: {event.text}" for event in status.events],
    )
    if not prepared.trains:
        return result
    if not (result.steps >= result.total_steps or result.ended or was_stopped):
        raise RunFailedError(
            f"training ended, but its newest complete checkpoint is at step {result.steps} of "
            f"{result.total_steps}: the last checkpoint could not be written to {folder.uri}; see "
            "the events, free space there and run the same command again"
        )
    return replace(result, metrics=result.metrics | _record_cost(prepared, run, result.steps))


def _recorded(
    prepared: PreparedRun, checkpoint: Checkpoint | None, metrics: dict[str, float]
) -> RunResult:
    """The outcome that a checkpoint records; of a run without a checkpoint, the metrics only."""
    recipe = prepared.recipe
    progress = checkpoint.position.progress if checkpoint else Progress(0)
    result = checkpoint and result_checkpoint(locate(recipe.run_folder), checkpoint)
    return RunResult(
        None,
        recipe.name,
        progress.step,
        prepared.resolved.total_steps,
        with_best(metrics),
        checkpoint=result.folder.uri if result else "",
        evaluation_due=progress.evaluation_due,
        ended=progress.ended,
        num_eval_images=prepared.num_eval_images,
    )


def _record_cost(prepared: PreparedRun, run: OpenRun, step: int) -> dict[str, float]:
    cost = training_cost(prepared.resolved, step)
    # Recorded before the end of the run; the cost of an earlier attempt is replaced.
    run.record.metrics(step, cost, ARRIVAL_S, again=True)
    return cost


def _log_model(result: RunResult, prepared: PreparedRun, run: OpenRun) -> None:
    recipe, config = prepared.recipe, prepared.recipe.tracking
    has_head = prepared.trains and recipe.train.loss != "masked_patch"
    if config.log_model and result.is_complete and has_head:
        from vit_ray.launch.model_card import card_of  # imports torch, and the hub's library

        classes = prepared.resolved.manifest.classes
        run.record.model(
            recipe.name,
            result.steps,
            reference={**used_sections(recipe.recorded()), "classes": list(classes)},
            card=card_of(recipe, classes, result.checkpoint),
            params={"model": recipe.model.name, "checkpoint": result.checkpoint},
            register_as=None if prepared.kind == "sweep_trial" else config.register_as,
        )
