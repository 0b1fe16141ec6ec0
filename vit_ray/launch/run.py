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
from vit_ray.checkpoints.run_checkpoints import (
    begin_training,
    newest_checkpoint,
    result_checkpoint,
)
from vit_ray.config import Recipe, require
from vit_ray.config.recipe import used_sections
from vit_ray.data.shards import all_first_labels
from vit_ray.data.tasks import ANSWER_S, repeated
from vit_ray.launch.cluster_checks import check_cluster, check_shared, paths_of
from vit_ray.launch.connection import ClusterShape, connect
from vit_ray.launch.named_run import accepted_changes, find_resume_point
from vit_ray.launch.resolved_run import (
    NEW_HEAD,
    Kind,
    ResolvedRun,
    check_head_is_trained,
    check_weights,
    resolve_evaluation,
    resolve_run,
)
from vit_ray.launch.run_record import OpenRun, end_record, open_record, training_cost
from vit_ray.launch.terminal import shown_progress, stopping_on_signals
from vit_ray.launch.workers import run_workers
from vit_ray.lock import hold_lock
from vit_ray.metric_names import DEV_TOP1, EVAL_AVERAGED_TOP1, EVAL_TOP1, few_shot_top1, with_best
from vit_ray.outcomes import (
    BRANCH_NOTE,
    BRANCH_TAG,
    INIT_RUN,
    EventKind,
    RunFailedError,
    RunStoppedError,
)
from vit_ray.storage import RIGHTS_PROBE, Location, check_reachable, locate
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
        is_complete: the run reached its end and was not stopped on request.
        already_complete: the run had ended before; nothing was trained.
        hint: how to open MLflow's page.
        events: events during the run: restarts, refused steps, failed saves.
        num_eval_images: images that the accuracies in `metrics` were measured on; 0 without an
            evaluation.
    """

    run_id: str | None
    name: str
    steps: int
    total_steps: int
    metrics: dict[str, float]
    checkpoint: str
    is_complete: bool
    already_complete: bool = False
    hint: str = ""
    events: list[str] = field(default_factory=list)
    num_eval_images: int = 0

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


@dataclass(frozen=True)
class PreparedRun:
    """A checked run before it starts.

    Attributes:
        init_run: MLflow run of the initial weights.
        newest: the newest valid checkpoint of a run of this name.
        notes: kind and text of the events of the run's start, for its history.
        lock_number: shows workers that this driver still holds the run; None for an evaluation.
        training_id: of a training that starts at step 0, which does not continue an earlier record.
    """

    kind: Kind
    resolved: ResolvedRun
    init_run: str | None = None
    newest: Checkpoint | None = None
    notes: tuple[tuple[EventKind, str], ...] = ()
    lock_number: int | None = None
    training_id: str | None = None

    @property
    def trains(self) -> bool:
        """Whether weights are trained, not only used."""
        return self.kind != "evaluate"


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
        resolved, newest = prepared.resolved, prepared.newest
        if newest is None or not newest.position.progress.is_over(resolved.total_steps):
            return run_prepared(prepared, tags, following)
        # The run's last driver may have died before it recorded the end.
        position = newest.position
        cost = training_cost(resolved, position.step)
        result = _recorded(prepared, newest, position.progress.metrics)
        run_id = end_record(resolved.recipe, position.tracking_run_id, position.step, cost, parent)
    return replace(result, run_id=run_id, metrics=result.metrics | cost, already_complete=True)


def finetune(recipe: Recipe, *, tags: dict[str, str] | None = None) -> RunResult:
    """Train from the weights in `init_from` with a new head; positions are resized.

    Raises:
        ValueError: no weights are given, or as `train`.
    """
    require(recipe.init_from, "init_from", "the run, checkpoint or file to fine-tune")
    return train(recipe, kind="finetune", tags=tags)


def evaluate(recipe: Recipe) -> RunResult:
    """Accuracy, and few-shot accuracy if the recipe asks for it, of the weights in `init_from`.

    Raises:
        ValueError: no weights or no data set are given, or they do not fit.
        RunStoppedError: it was stopped on request.
    """
    require(recipe.init_from, "init_from", "the run, checkpoint or file to evaluate")
    resolved = resolve_evaluation(recipe)
    init_run = check_weights(resolved, "evaluate")
    check_start(resolved.recipe, trains=False)
    return run_prepared(PreparedRun("evaluate", resolved, init_run))


@contextlib.contextmanager
def prepared_training(
    recipe: Recipe, kind: Kind, check: Callable[[Recipe], object] = lambda _: None
) -> Iterator[PreparedRun]:
    """Check a training run, and hold the run's lock inside the block.

    Args:
        check: raises ValueError if a run cannot start on the cluster; called last, before the
            folder of a new run is created.

    Raises:
        ValueError: the recipe cannot work, or another driver works on the run; nothing was started.
    """
    recipe = recipe.with_absolute_paths()
    resolved = resolve_run(recipe)
    check_head_is_trained(recipe, kind)
    folder = locate(recipe.run_folder)
    folder.refuse_file_in_its_place("output")
    if not folder.is_local:
        check_rights(folder)
    is_new = not folder.exists()
    if is_new:  # checked before the lock creates a folder: a refused recipe leaves none
        find_resume_point(recipe)
        check_weights(resolved, kind)
        check(resolved.recipe)
    # Locked before checkpoints are read: another driver may be removing them.
    with hold_lock(folder) as lock_number:
        notes: list[tuple[EventKind, str]] = []
        newest = find_resume_point(
            recipe, lambda text: notes.append((EventKind.CHECKPOINT_DAMAGED, text))
        )
        if newest is None:
            init_run = check_weights(resolved, kind)
            if not is_new:
                check(resolved.recipe)
            start = begin_training(folder)
            yield PreparedRun(kind, resolved, init_run, None, tuple(notes), lock_number, start)
            return
        position = newest.position
        window = position.recipe["data"]["shuffle_window"]
        if window != resolved.recipe.data.shuffle_window:
            resolved = resolve_run(recipe, begun=window)
        changes = accepted_changes(resolved, position)
        notes += [(EventKind.RECIPE_CHANGED, text) for text in changes]
        if not position.progress.is_over(resolved.total_steps):
            check(resolved.recipe.with_changes(init_from=None))
        init_run = position.init_run_id
        yield PreparedRun(kind, resolved, init_run, newest, tuple(notes), lock_number)


def check_rights(folder: Location) -> None:
    """Write, list, read and delete a small file in a run's folder; after an error it may stay.

    Raises:
        OSError: the store refuses it, cannot be reached, or has no such bucket.
    """
    check_reachable(folder)
    probe = folder.child(RIGHTS_PROBE)
    probe.write(b"vit_ray")
    names = [info.base_name for info in folder.list_files(recursive=False)]
    if probe.read() != b"vit_ray" or RIGHTS_PROBE not in names:
        raise OSError(f"{probe.uri} was written, and is not there; check the storage")
    probe.delete()


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
    resolved, recipe = prepared.resolved, prepared.resolved.recipe
    cluster = connect(recipe)
    use_gpu = check_cluster(recipe, cluster)
    position = prepared.newest.position if prepared.newest else None
    origin = {INIT_RUN: prepared.init_run} if prepared.init_run else {}
    branched = locate(recipe.run_folder).child(BRANCH_NOTE)
    if position is not None and branched.exists():
        origin[BRANCH_TAG] = branched.read().decode()
    measured_on, result_metric = _measured(recipe, prepared.kind)
    with open_record(
        recipe,
        prepared.kind,
        resolved,
        cluster,
        following.parent if following else None,
        run_id=position.tracking_run_id if position else None,
        tags={**(tags or {}), **origin},
        training_id=prepared.training_id,
        measured_on=measured_on,
        awaited_metric=result_metric,
    ) as run:
        for note, text in prepared.notes:
            run.record.event(note, text, position.step if position else 0)
        with contextlib.ExitStack() as watching:
            if following:
                watching.enter_context(followed(run, following))
            else:
                steps = resolved.total_steps
                watching.enter_context(shown_progress(run.record, recipe.name, steps))
                watching.enter_context(stopping_on_signals(run.record.request_stop))
            job = _job(prepared, cluster, run, following)
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


def _measured(recipe: Recipe, kind: Kind) -> tuple[str, str | None]:
    """The group of the evaluations' metrics, and the run's result on MLflow's pages, if any."""
    data, evaluate = recipe.data, recipe.evaluate
    if kind == "sweep_trial" or (data.eval is None and data.held_out_fraction > 0):
        return "dev", DEV_TOP1
    if data.eval is None:
        has_shots = evaluate.few_shot_train is not None and evaluate.shots
        return "eval", few_shot_top1(evaluate.shots[0]) if has_shots else None
    return "eval", EVAL_TOP1


def followed(run: OpenRun, following: Following) -> contextlib.AbstractContextManager[None]:
    """Pass on new evaluations, and the request to stop, while the block runs."""
    newest_step = 0

    def look(is_last: bool) -> None:
        nonlocal newest_step
        status = run.record.status(ANSWER_S)
        if following.stop.is_set() and not status.stop:
            run.record.request_stop("stopped early: other trials are better on the dev split")
        for step, metrics in status.evaluations:
            if step > newest_step and not is_last:
                newest_step = step
                following.on_evaluation(step, metrics)

    return repeated(look)


def _job(
    prepared: PreparedRun, cluster: ClusterShape, run: OpenRun, following: Following | None
) -> TrainJob:
    resolved = prepared.resolved
    few_shot = resolved.streams.get("few_shot_train")
    return TrainJob(
        recipe=resolved.recipe,
        kind="train" if prepared.trains else "evaluate",
        num_classes=resolved.num_classes,
        classes=tuple(resolved.manifest.classes),
        total_steps=resolved.total_steps,
        data_fingerprint=resolved.manifest.fingerprint,
        data_terms=redacted(resolved.manifest.about),
        new_head=NEW_HEAD[prepared.kind],
        few_shot_classes=few_shot.manifest.num_classes if few_shot else 0,
        ray_ready_s=cluster.ready_s,
        record=run.record,
        lock_number=prepared.lock_number,
        num_evaluated={name: spec.num_images for name, spec in resolved.streams.items()},
        few_shot_labels=partial(all_first_labels, few_shot.manifest.path) if few_shot else None,
        answers=resolved.answers,
        evaluate_at=following.evaluate_at if following else (),
        init_run_id=prepared.init_run,
    )


def _result(prepared: PreparedRun, run: OpenRun) -> RunResult:
    """The run's outcome, with its cost, which is recorded.

    Raises:
        RunStoppedError: an evaluation was stopped on request.
        RunFailedError: the checkpoint of the last step is missing.
    """
    status = run.record.status(mlflow_s=FIRST_ANSWER_S)
    folder = locate(prepared.resolved.recipe.run_folder)
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
    if not (result.is_complete or result.steps >= result.total_steps or was_stopped):
        raise RunFailedError(
            f"training ended, but its newest complete checkpoint is at step {result.steps} of "
            f"{result.total_steps}: the last checkpoint could not be written to {folder.uri}; see "
            "the events, free space there and run the same command again"
        )
    # Recorded before the end of the run; the cost of an earlier attempt is replaced.
    cost = training_cost(prepared.resolved, result.steps)
    run.record.results(result.steps, cost)
    return replace(result, metrics=result.metrics | cost)


def _recorded(
    prepared: PreparedRun, checkpoint: Checkpoint | None, metrics: dict[str, float]
) -> RunResult:
    """The outcome that a checkpoint records; of a run without a checkpoint, the metrics only."""
    resolved, recipe = prepared.resolved, prepared.resolved.recipe
    progress = checkpoint.position.progress if checkpoint else Progress(0)
    result = checkpoint and result_checkpoint(locate(recipe.run_folder), checkpoint)
    return RunResult(
        None,
        recipe.name,
        progress.step,
        resolved.total_steps,
        with_best(metrics),
        checkpoint=result.folder.uri if result else "",
        is_complete=progress.is_over(resolved.total_steps),
        num_eval_images=resolved.num_eval_images,
    )


def _log_model(result: RunResult, prepared: PreparedRun, run: OpenRun) -> None:
    recipe, classes = prepared.resolved.recipe, prepared.resolved.manifest.classes
    has_head = prepared.trains and recipe.train.loss != "masked_patch"
    if recipe.tracking.log_model and result.is_complete and has_head:
        from vit_ray.launch.model_card import card_of  # imports torch, and the hub's library

        run.record.model(
            recipe.name,
            result.steps,
            reference={**used_sections(recipe.recorded()), "classes": list(classes)},
            card=card_of(recipe, classes, result.checkpoint),
            params={"model": recipe.model.name, "checkpoint": result.checkpoint},
            register_as=None if prepared.kind == "sweep_trial" else recipe.tracking.register_as,
        )
