"""A Ray Tune sweep of fine-tuning, as the paper's section 4.1 prescribes.

Each point (a learning rate, or a combination from `sweep.space`) is tried on the training set
without a dev split; the best on the dev split is trained on the whole training set, with several
seeds, and tested. Runs have stable names, so that a restarted sweep skips finished runs and
continues the others.

If a recipe averages its weights, the accuracy of the averaged weights decides and is the result, as
in the paper's Table 2; that of the last weights is reported next to it.
"""

import logging
import statistics
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.config.validation import require
from vit_ray.data.prepare.dev_split import dev_split
from vit_ray.experiments.parent_run import OpenParent, earlier_run, open_parent
from vit_ray.experiments.runner import Flow, Work
from vit_ray.experiments.search_space import (
    Point,
    errors_of_point,
    point_name,
    point_text,
    points_of,
    with_point,
)
from vit_ray.experiments.sweep_state import (
    DIVERGED,
    POINTS,
    Kept,
    RememberedAsha,
    RememberedSearch,
    grace_steps,
    rung_steps,
    trial_key,
)
from vit_ray.experiments.sweep_tables import sweep_files
from vit_ray.experiments.training import Outcome, Training
from vit_ray.experiments.write_page import page_of
from vit_ray.launch.inputs.streams import ResolvedRun, resolve_run
from vit_ray.launch.model_checks import check_head_is_trained
from vit_ray.launch.paper_comparison import PAPER_FILE, sweep_table
from vit_ray.launch.pool.pool_training import RunFailedError
from vit_ray.launch.prepared_run import PreparedRun, check_weights
from vit_ray.launch.record.open_record import tag_ended_run
from vit_ray.launch.record.run_metadata import NOTE, SOURCE_NAME, description
from vit_ray.metric_names import EVAL_AVERAGED_TOP1, EVAL_TOP1, SWEEP_GROUP
from vit_ray.outcomes import EventKind, TrialState
from vit_ray.report.tables import Table
from vit_ray.storage import locate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepResult:
    """What was tried, what was selected, and the test accuracy of the retrained models."""

    rows: list[Outcome]
    """Outcomes of the trials, in the order of their points."""
    best: Point
    finals: list[Outcome]
    """The retrainings, one for each seed."""
    parent_run_id: str | None = None
    hint: str = ""
    beside_paper: Table | None = None
    """The test accuracy, its spread and label, and the paper's."""
    page: Path | None = None
    """None while MLflow is away: `vit-ray report` can write it later."""

    @property
    def test_top1(self) -> list[float]:
        """One for each seed; with averaged weights if the recipe averages."""
        return [one.top1 for one in self.finals if one.top1 is not None]

    @property
    def last_test_top1(self) -> list[float]:
        """With the last weights, if `test_top1` is with averaged ones."""
        return [one.last_top1 for one in self.finals if one.last_top1 is not None]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.test_top1)

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds; 0 for a single one."""
        return statistics.stdev(self.test_top1) if len(self.test_top1) > 1 else 0.0


def sweep_of(recipe: Recipe) -> SweepConfig:
    """The recipe's sweep section.

    Raises:
        ValueError: there is no such section, or nothing to test on.
    """
    rates = "sweep.learning_rates, such as [0.003, 0.01, 0.03]"
    sweep = require(recipe.sweep, "sweep", rates)
    require(recipe.data.eval, "data.eval", "the test set for the selected learning rate")
    return sweep


def trial_recipe(recipe: Recipe, point: Point, split: tuple[str, str] | None = None) -> Recipe:
    """Fine-tune at one point on the training set without the dev split, and evaluate on that split.

    Args:
        split: addresses of the training set without the dev split, and of the split; None for row
            groups of `data.train`, regardless of classes.
    """
    data: dict[str, Any] = {"eval": None, "held_out_fraction": sweep_of(recipe).dev_fraction}
    if split is not None:
        data = {"train": split[0], "eval": split[1], "held_out_fraction": 0.0}
    name = f"{recipe.name}-{point_name(point)}"
    return with_point(recipe, point, name=name, data=data, sweep=None).with_absolute_paths()


def final_recipe(recipe: Recipe, point: Point, seed: int) -> Recipe:
    """Fine-tune at the selected point on the whole training set, and evaluate on the test set."""
    name = f"{recipe.name}-final-{point_name(point)}-seed{seed}"
    return with_point(recipe, point, name=name, seed=seed, sweep=None).with_absolute_paths()


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is going to train."""

    recipe: Recipe
    resolved: ResolvedRun
    """The recipe's own training, on the whole training set."""
    points: list[Point]
    trials: list[Recipe]
    """One for each point."""
    steps: list[int]
    split: tuple[str, str] | None = None
    """As for `trial_recipe`."""

    @property
    def total_steps(self) -> int:
        return sum(self.steps) + sweep_of(self.recipe).seeds * self.resolved.total_steps


def plan_sweep(recipe: Recipe, *, needs_every_class: bool = True) -> SweepPlan:
    """Check a sweep, a new one also for its weights, and split its training set; starts nothing.

    Args:
        needs_every_class: refuse a dev split that leaves a class empty; otherwise such a set is
            split regardless of classes.

    Raises:
        ValueError: the recipe cannot work.
    """
    config = sweep_of(recipe)
    points = points_of(recipe, config)
    if any(trial_recipe(recipe, point).init_from is None for point in points):
        logger.warning("init_from is not set: the models of this sweep start from random weights")
    resolved = resolve_run(recipe)
    is_new = not _has_begun(recipe, points)
    for point in points:  # on the whole training set, before that is split
        with errors_of_point(recipe, point):
            final = resolve_run(final_recipe(recipe, point, recipe.seed))
            check_head_is_trained(final.recipe, "sweep_trial")
            if final.recipe.train.loss == "masked_patch":
                raise ValueError(
                    "train.loss=masked_patch: its trials report no accuracy for a sweep to select "
                    "by; use a loss on labels"
                )
            if is_new:
                check_weights(PreparedRun("sweep_trial", final))
    split = _dev_split(recipe, points, needs_every_class=needs_every_class)
    trials = [trial_recipe(recipe, point, split) for point in points]
    steps = []
    for point, trial in zip(points, trials, strict=True):
        with errors_of_point(recipe, point):
            steps.append(resolve_run(trial).total_steps)
    if config.scheduler == "asha":
        grace_steps(config, max(steps))
    return SweepPlan(recipe, resolved, points, trials, steps, split)


def run_sweep(recipe: Recipe) -> SweepResult | None:
    """Try every point, select on the dev split, retrain, test; None if it was asked to stop.

    Raises:
        ValueError: the recipe cannot work; nothing was started.
        RunFailedError: no trial finished, or not every retraining did.
    """
    plan = plan_sweep(recipe.with_absolute_paths())
    with open_sweep(plan) as parent:
        parent.start_workers(first_to_train(plan.trials))
        outcome = parent.run_flow(recorded_sweep(plan, parent), sweep_of(recipe).max_concurrent)
        parent.run.is_complete = outcome is not None
        if outcome is None:
            return None
        return replace(outcome, page=page_of(plan.recipe, parent.run_id, parent.run.record))


def open_sweep(
    plan: SweepPlan, under: OpenParent | None = None, tags: dict[str, str] | None = None
) -> AbstractContextManager[OpenParent]:
    """The sweep's own run, and that of an earlier start with its finished trials.

    Args:
        under: the study that the sweep is part of.
        tags: of the sweep's run.
    """
    return open_parent(
        plan.recipe,
        "sweep",
        plan.resolved,
        plan.total_steps,
        earlier_run(plan.recipe, "sweep") if _has_begun(plan.recipe, plan.points) else None,
        trainings=plan.trials,
        under=under,
        tags=tags,
        varied=[*plan.points[0]],
    )


def first_to_train(recipes: Iterable[Recipe]) -> Recipe | None:
    """The first training without a checkpoint, which starts now."""
    return next((one for one in recipes if newest_checkpoint(locate(one.run_folder)) is None), None)


def _dev_split(
    recipe: Recipe, points: list[Point], *, needs_every_class: bool
) -> tuple[str, str] | None:
    """By class if one data set is trained on; None for several, and for a sweep that started
    without it.

    Raises:
        ValueError: a class would have no image in one of the parts.
    """
    config, train_set = sweep_of(recipe), recipe.data.train
    folder = locate(recipe.run_folder).child("dev-split")
    began_without = _has_begun(recipe, points) and not folder.list_folders()
    if not isinstance(train_set, str) or began_without:
        return None
    split = partial(dev_split, train_set, folder.uri, config.dev_fraction, config.seed)
    try:
        return split()
    except ValueError as error:
        if needs_every_class:
            raise
        logger.warning("%s is split regardless of classes: %s", recipe.name, error)
        return split(by_class=False)


def _has_begun(recipe: Recipe, points: list[Point]) -> bool:
    """Whether a trial has a checkpoint, or had one, or a search has proposed one."""
    trials = (trial_recipe(recipe, point) for point in points)
    return locate(recipe.run_folder).child(POINTS).exists() or any(
        locate(trial.run_folder).list_folders() for trial in trials
    )


def recorded_sweep(
    plan: SweepPlan, parent: OpenParent, tags: Mapping[str, str] | None = None
) -> Flow[SweepResult]:
    """A sweep that is its own parent run, which records its selection and its results."""
    recipe, record = plan.recipe, parent.run.record
    swept = yield from sweep(plan, parent, tags or {})
    table = sweep_table(recipe, swept.test_top1)
    record.text(PAPER_FILE, table.csv())
    record.results(0, sweep_metrics(swept))
    command = parent.run.opening.tags.get(SOURCE_NAME, "")
    record.tag(NOTE, description(recipe, plan.resolved, command, sweep_sentence(swept)))
    return replace(swept, parent_run_id=parent.run_id, hint=record.hint(), beside_paper=table)


def sweep(
    plan: SweepPlan,
    parent: OpenParent,
    tags: Mapping[str, str],
    folder: str = SWEEP_GROUP,
) -> Flow[SweepResult]:
    """Try and retrain under a parent run that is open.

    Args:
        tags: of each training.
        folder: of its files in the parent run; by default that run is the sweep's own, whose
            display counts trials and retrainings.

    Raises:
        RunFailedError: as `run_sweep`.
    """
    recipe, config = plan.recipe, sweep_of(plan.recipe)
    trials, is_own = Trials(plan, parent, tags), folder == SWEEP_GROUP
    if is_own:
        parent.run.control.begin_stage("trial", len(plan.points))
    rows = yield from trials.tried()
    chosen = best_row(rows)
    for name, text in sweep_files(rows, chosen).items():
        parent.run.record.text(f"{folder}{name}", text)
    if is_own:
        parent.run.record.tag("vit_ray.best_trial_checkpoint", chosen.checkpoint)
        parent.run.control.begin_stage("retraining", config.seeds)
    finals = yield [
        Work(
            parent.training(
                final,
                "finetune" if final.init_from else "pretrain",
                tags={"vit_ray.sweep_stage": "finetune", **tags},
                point={"seed": final.seed},
                retries=config.retries,
            ),
            on_end=parent.note_end,
        )
        for final in (
            final_recipe(recipe, chosen.point, recipe.seed + k) for k in range(config.seeds)
        )
    ]
    if failed := [one for one in finals if one.top1 is None]:
        why = failed[0].error or "it has no accuracy"
        raise RunFailedError(f"retraining with {point_text(chosen.point)} failed: {why}")
    return SweepResult(rows, chosen.point, finals)


class Trials:
    """The trials of a sweep: what is known about them, and what happens at their rungs."""

    def __init__(self, plan: SweepPlan, parent: OpenParent, tags: Mapping[str, str]) -> None:
        config, folder = sweep_of(plan.recipe), locate(plan.recipe.run_folder)
        self._plan, self._parent = plan, parent
        self._tags = {"vit_ray.sweep_stage": "sweep_trial", **tags}
        self._diverged = Kept(folder, DIVERGED, {})
        self._search: RememberedSearch | None = None
        if config.search == "optuna":
            self._search = RememberedSearch(config, folder)
        found = self._search.points if self._search else plan.points
        self._known = found[: len(plan.points)]
        self._asha: RememberedAsha | None = None
        if config.scheduler == "asha":
            keys = [trial_key(self._trial(point)[0]) for point in self._known]
            self._asha = RememberedAsha(config, folder, keys, max(plan.steps))

    def tried(self) -> Flow[list[Outcome]]:
        """The outcome of each trial, in the order of the points.

        If rungs have stopped some and no other finished, the trial that got furthest counts.
        """
        parts = [self._part(self._training(point)) for point in self._known]
        for point in self._plan.points[len(parts) :]:  # they stand for what is drawn
            training = self._training(point)
            parts.append(Work(training, self._draw, self._goes_on, self._note_end))
        rows = yield parts
        rows = [
            replace(row, state=TrialState.FAILED, error="it was not evaluated")
            if row.state is TrialState.FINISHED and row.top1 is None
            else row
            for row in rows
        ]
        while True:
            stopped = [k for k, row in enumerate(rows) if row.state is TrialState.STOPPED_EARLY]
            if not stopped or any(row.state is TrialState.FINISHED for row in rows):
                break
            index = max(stopped, key=lambda k: (rows[k].steps or 0, rows[k].top1 or 0.0))
            training = replace(self._training(rows[index].point), rungs=())
            text = f"{training.label}: every trial that was not stopped early has failed"
            self._parent.run.record.event(EventKind.TRIAL_CONTINUED, text, 0)
            (rows[index],) = yield [Work(training, on_end=self._note_end)]
        for row in rows:
            if row.state is TrialState.STOPPED_EARLY and row.result:
                training = self._training(row.point)
                progress = f"step {row.result.steps} of {row.result.total_steps}"
                tag_ended_run(
                    training.recipe,
                    row.run_id,
                    {"vit_ray.stopped_early": progress},
                    training.parent,
                    training.node_id,
                )
        return rows

    def _trial(self, point: Point) -> tuple[Recipe, int]:
        plan = self._plan
        if point in plan.points:
            place = plan.points.index(point)
            return plan.trials[place], plan.steps[place]
        trial = trial_recipe(plan.recipe, point, plan.split)
        return trial, resolve_run(trial).total_steps

    def _training(self, point: Point) -> Training:
        """A trial, without the rungs that an earlier driver has seen it pass."""
        config, (trial, steps) = sweep_of(self._plan.recipe), self._trial(point)
        rungs = rung_steps(config, steps, max(self._plan.steps))
        if (asha := self._asha) is not None:
            passed = [asha.find(trial_key(trial), step) for step in rungs]
            rungs = tuple(
                step
                for step, known in zip(rungs, passed, strict=True)
                if not (known and known.goes_on)
            )
        return self._parent.training(
            trial, "sweep_trial", tags=self._tags, point=point, retries=config.retries, rungs=rungs
        )

    def _draw(self) -> Training:
        assert self._search is not None
        return self._training(self._search.draw())

    def _part(self, training: Training) -> Work | Flow[Outcome]:
        """The work that trains it, unless it is known to diverge."""
        reason = self._diverged.value.get(trial_key(training.recipe), "")
        if not reason:
            return Work(training, goes_on=self._goes_on, on_end=self._note_end)
        found = Outcome(TrialState.DIVERGED, error=reason, point=training.point)
        self._parent.note_end(training, found)
        return known_outcome(found)

    def _goes_on(self, training: Training, outcome: Outcome) -> bool:
        if self._asha is None or outcome.top1 is None or outcome.steps is None:
            return True
        key, step = trial_key(training.recipe), outcome.steps
        is_new = self._asha.find(key, step) is None
        goes_on = self._asha.goes_on(key, step, outcome.top1, is_over=outcome.is_over)
        if is_new and not goes_on:
            text = f"{training.label}: after {step} steps, by its accuracy on the dev split"
            self._parent.run.record.event(EventKind.TRIAL_STOPPED, text, 0)
        return goes_on

    def _note_end(self, training: Training, outcome: Outcome) -> None:
        self._parent.note_end(training, outcome)
        if self._search is not None:
            self._search.note(training.point, outcome.top1)
        if outcome.state is TrialState.DIVERGED:
            text = f"{training.label}: {outcome.error}"
            self._parent.run.record.event(EventKind.TRIAL_DIVERGED, text, 0)
            self._diverged.value[trial_key(training.recipe)] = outcome.error
            self._diverged.write()


def known_outcome(outcome: Outcome) -> Flow[Outcome]:
    """A part of a flow that needs no training."""
    yield from ()
    return outcome


def best_row(rows: list[Outcome]) -> Outcome:
    """The finished trial with the highest accuracy; of equal ones the first.

    Raises:
        RunFailedError: no trial was evaluated at its end.
    """
    measured = [row for row in rows if row.state is TrialState.FINISHED]
    if not measured:
        first = next((row for row in rows if row.error), rows[0])
        raise RunFailedError(f"every trial failed; the first: {first.error}")
    return max(measured, key=lambda row: row.top1 or 0.0)


def sweep_sentence(outcome: SweepResult) -> str:
    """What was tried, what was selected, and what it reached."""
    keys, tried = [*outcome.best], len(outcome.rows)
    many = "s" if tried > 1 else ""
    (what, won) = (
        (f"{tried} value{many} of {keys[0]}", point_text(outcome.best).partition("=")[2])
        if len(keys) == 1
        else (f"{tried} point{many} of {', '.join(keys)}", point_text(outcome.best))
    )
    dev = max(row.top1 or 0.0 for row in outcome.rows if row.point == outcome.best)
    seeds = f" (mean of {len(outcome.finals)} seeds)" if len(outcome.finals) > 1 else ""
    return f"Sweep of {what}; {won} won (dev {dev:.2%}); test {outcome.mean:.2%}{seeds}"


def sweep_metrics(outcome: SweepResult) -> dict[str, float]:
    """What the sweep's own run records, each accuracy under its name in the child runs."""
    mine = EVAL_AVERAGED_TOP1 if outcome.last_test_top1 else EVAL_TOP1
    chosen = {
        f"{SWEEP_GROUP}{key.rpartition('.')[2]}": float(value)
        for key, value in outcome.best.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    metrics = {**chosen, mine: outcome.mean}
    metrics[f"{mine}_std"] = outcome.deviation
    if outcome.last_test_top1:
        metrics[EVAL_TOP1] = statistics.fmean(outcome.last_test_top1)
    return metrics
