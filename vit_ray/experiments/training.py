"""One training among many: a named recipe, the trial of Ray Tune that trains it, and its outcome.

A trial is a small driver: it borrows a pool of workers, trains from rung to rung, and reports each
outcome. Everything that starts slowly (workers, streams, MLflow) outlives it.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final, TypeVar

import ray
from ray import tune

from vit_ray.config import Recipe
from vit_ray.experiments.search_space import Point
from vit_ray.launch.cluster.connection import mark_private
from vit_ray.launch.inputs.streams import reads_of
from vit_ray.launch.model_checks import Kind
from vit_ray.launch.pool.pool_keeper import borrowing
from vit_ray.launch.pool.pool_training import RunDivergedError, RunFailedError
from vit_ray.launch.record.open_record import OpenRun
from vit_ray.launch.run import RunResult, train
from vit_ray.launch.stopping import RunStoppedError
from vit_ray.metric_names import EVAL_AVERAGED_TOP1, EVAL_TOP1
from vit_ray.outcomes import EventKind, TrialState
from vit_ray.tracking.metrics_log import RunOpening

T = TypeVar("T")

TRIAL: Final = "trial"
"""Key of a trial's configuration with its `Training`, which is shown by its name."""
OUTCOME: Final = "outcome"
"""Key of a trial's report with its `Outcome`."""


@dataclass(frozen=True)
class Training:
    """A named recipe, and how it is trained; sent to the process of its trial."""

    recipe: Recipe
    kind: Kind
    parent: RunOpening
    node_id: str
    """Node of the driver, where the parent run is recorded."""
    point: Point = field(default_factory=dict)
    """Keys of the recipe that vary: what Ray Tune's tables, callbacks and searchers see."""
    tags: Mapping[str, str] = field(default_factory=dict)
    retries: int = 0
    """How often it is restarted, from what it has saved, after a failure."""
    rungs: tuple[int, ...] = ()
    """Steps before its end at which it reports, and may be stopped."""
    num_sharing: int = 0
    """How many trainings, including this one, start together with equal streams; 0: not shared."""
    begin: Callable[[Callable[[str], None]], str] | None = None
    """Called before the first step with a function that notes events; returns the origin of a
    branch."""

    def __repr__(self) -> str:
        return self.recipe.name

    @cached_property
    def reads(self) -> str:
        """Trainings with equal text can share a stream."""
        return reads_of(self.recipe)

    @property
    def label(self) -> str:
        """The part of its name that differs from its parent's."""
        return self.recipe.name.removeprefix(f"{self.parent.run_name}-")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training, at a rung or at its end."""

    state: TrialState
    """At a rung, the state that a trial has if it is stopped there."""
    result: RunResult | None = None
    """None if it failed."""
    error: str = ""
    top1: float | None = None
    """The accuracy that decides: with averaged weights if the recipe averages."""
    last_top1: float | None = None
    """With the last weights, if `top1` is with averaged ones."""
    is_cut: bool = False
    """It was stopped on request before its end; the same command continues it."""
    branched_from: str = ""
    """Cell and step of the checkpoint that it started with; empty if it was trained from its
    start."""
    point: Point = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """What the driver would have logged."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train, or it cannot be trained."""
        return self.state is not TrialState.STOPPED_EARLY

    @property
    def run_id(self) -> str | None:
        return self.result.run_id if self.result else None

    @property
    def steps(self) -> int | None:
        return self.result.steps if self.result else None

    @property
    def checkpoint(self) -> str:
        """Folder of its last checkpoint."""
        return self.result.checkpoint if self.result else ""


def deciding_metric(recipe: Recipe) -> str:
    """The accuracy that selects a point and is the result."""
    return EVAL_AVERAGED_TOP1 if recipe.train.averaging else EVAL_TOP1


def outcomes(training: Training) -> Iterator[Outcome]:
    """Train from rung to rung, with an evaluation at each.

    Errors become outcomes: one failed training must not end the others.
    """
    parent = OpenRun.joined(training.parent, training.node_id)
    if parent.control.stop_reason():  # since it was handed out
        yield Outcome(TrialState.FAILED, is_cut=True)
        return
    origin = ""
    try:
        if training.begin is not None:
            origin = training.begin(lambda text: parent.record.event(EventKind.BRANCH, text, 0))
        recipe, kind, tags = training.recipe, training.kind, dict(training.tags)
        for step in (*training.rungs, None):
            run = partial(train, recipe, kind=kind, parent=parent, tags=tags, until_step=step)
            result = with_retries(training, parent, run)
            outcome = replace(outcome_of(recipe, result, step), branched_from=origin)
            yield outcome
            if outcome.is_over:
                return
    except RunStoppedError:
        yield Outcome(TrialState.FAILED, is_cut=True)
    except RunDivergedError as error:
        yield Outcome(TrialState.DIVERGED, error=str(error))
    except Exception as error:
        yield Outcome(TrialState.FAILED, error=str(error).strip() or repr(error))


def outcome_of(recipe: Recipe, result: RunResult, step: int | None) -> Outcome:
    """Of a training up to a rung, or to its end (None)."""
    is_at_rung = step is not None and result.steps >= step and not result.evaluation_due
    if not result.is_complete and not is_at_rung:
        return Outcome(TrialState.FAILED, result, is_cut=True)
    return Outcome(
        TrialState.FINISHED if result.is_complete else TrialState.STOPPED_EARLY,
        result,
        top1=result.metrics.get(deciding_metric(recipe)),
        last_top1=result.metrics.get(EVAL_TOP1) if recipe.train.averaging else None,
    )


def with_retries(training: Training, parent: OpenRun, run: Callable[[], T]) -> T:
    """What `run` returns; after a failure it is called again, unless the training has diverged.

    Raises:
        RunDivergedError: it has diverged, and would again.
        RunFailedError: it has failed more than `retries` times.
        Exception: any other error of `run`.
    """
    for left in range(training.retries, -1, -1):
        try:
            return run()
        except RunFailedError as error:
            if left == 0 or isinstance(error, RunDivergedError):
                raise
            text = f"{training.recipe.name}: {error}; it continues from its newest checkpoint"
            parent.record.event(EventKind.RETRIED, text, 0)
    raise AssertionError


@dataclass(frozen=True)
class HeldTraining:
    """A training by reference: Ray Tune writes configurations to disk, and a recipe's addresses may
    hold a password.
    """

    name: str
    reference: Any

    def __str__(self) -> str:
        return self.name


def trial_of(keeper: Any, *, is_private: bool) -> Callable[[dict[str, Any]], None]:
    """What Ray Tune runs as a trial.

    Args:
        keeper: handle of the keeper of worker pools.
        is_private: only this driver uses the cluster.
    """

    def trial(config: dict[str, Any]) -> None:
        if is_private:
            mark_private()
        # no limit: it is in the object store of the driver's node, where trials run
        training: Training = ray.get(config[TRIAL].reference)
        with borrowing(keeper, training.num_sharing), kept_warnings() as warnings:
            for outcome in outcomes(training):
                step = {"step": outcome.steps, "top1": outcome.top1}
                # Does not return if the scheduler stops the trial.
                tune.report({**step, OUTCOME: replace(outcome, warnings=tuple(warnings))})

    return trial


@contextlib.contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Collects warnings logged in this block, because a trial's own output is not shown."""
    kept: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vit_ray")
    logger.addHandler(handler)
    try:
        yield kept
    finally:
        logger.removeHandler(handler)
