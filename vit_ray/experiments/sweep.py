"""A Ray Tune sweep of fine-tuning, as the paper's section 4.1 prescribes.

Each point (a learning rate, or what `sweep.space` says) is tried on the training set less a dev
split; the best on the dev split is trained on all of the training set, with several seeds, and
tested. Runs have stable names, so that a sweep started again does not repeat what is finished and
continues what is not.

Where a recipe averages its weights, the accuracy of the averaged ones decides and is the result,
as in the paper's Table 2; that of the last weights is reported beside it.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.config.validation import require
from vit_ray.data.prepare.dev_split import dev_split
from vit_ray.experiments.asha import grace_steps
from vit_ray.experiments.parent_run import OpenParent, earlier_run, open_parent
from vit_ray.experiments.search_space import (
    RATE,
    Point,
    errors_of_point,
    point_name,
    point_text,
    points_of,
    with_point,
)
from vit_ray.experiments.stage import Stage, Trained, deciding_metric
from vit_ray.experiments.sweep_rows import SweepRow, sweep_files
from vit_ray.experiments.write_page import page_of
from vit_ray.launch.model_checks import check_head_is_trained
from vit_ray.launch.paper_comparison import PAPER_FILE, sweep_table
from vit_ray.launch.pool_training import RunFailedError
from vit_ray.launch.prepared_run import PreparedRun, check_weights
from vit_ray.launch.run import ParentRun, RunResult
from vit_ray.launch.streams import ResolvedRun, resolve_run
from vit_ray.outcomes import TrialState
from vit_ray.report.tables import Table
from vit_ray.storage import locate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepResult:
    """What was tried, what was chosen, and the test accuracy of the retrained models."""

    rows: list[SweepRow]
    best: Point
    test_top1: list[float]
    """One for each seed; of the averaged weights where the recipe averages."""
    parent_run_id: str | None
    hint: str
    last_test_top1: list[float] = field(default_factory=list)
    """Of the last weights, where `test_top1` is of the averaged ones."""
    beside_paper: Table | None = None
    """The test accuracy, its spread and label, and the paper's."""
    page: Path | None = None
    """None while MLflow is away: `jobs/report.py` makes it later."""

    @property
    def learning_rate(self) -> float | None:
        """The chosen rate; None where it was not varied."""
        rate = self.best.get(RATE)
        return None if rate is None else float(rate)

    @property
    def mean(self) -> float:
        """Mean test accuracy over seeds."""
        return statistics.fmean(self.test_top1)

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds; 0 for a single one."""
        return statistics.stdev(self.test_top1) if len(self.test_top1) > 1 else 0.0


def sweep_of(recipe: Recipe) -> SweepConfig:
    """The recipe's sweep section.

    Raises:
        ValueError: it has none, or nothing to test on.
    """
    rates = "sweep.learning_rates, such as [0.003, 0.01, 0.03]"
    sweep = require(recipe.sweep, "sweep", rates)
    require(recipe.data.eval, "data.eval", "the test set for the chosen learning rate")
    return sweep


def trial_recipe(recipe: Recipe, point: Point, split: tuple[str, str] | None = None) -> Recipe:
    """Fine-tune at one point on the training set less the dev split, measured on that split.

    Args:
        split: addresses of the training set without the dev split, and of the split; None for row
            groups of `data.train` without regard to classes.
    """
    data: dict[str, Any] = {"eval": None, "held_out_fraction": sweep_of(recipe).dev_fraction}
    if split is not None:
        data = {"train": split[0], "eval": split[1], "held_out_fraction": 0.0}
    name = f"{recipe.name}-{point_name(point)}"
    return with_point(recipe, point, name=name, data=data, sweep=None)


def final_recipe(recipe: Recipe, point: Point, seed: int) -> Recipe:
    """Fine-tune at the chosen point on all of the training set, measured on the test set."""
    name = f"{recipe.name}-final-{point_name(point)}-seed{seed}"
    return with_point(recipe, point, name=name, seed=seed, sweep=None)


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is going to train."""

    recipe: Recipe
    resolved: ResolvedRun
    """Of the recipe itself, on all of the training set."""
    points: list[Point]
    trials: list[Recipe]
    """One for each point."""
    steps: list[int]
    """Of each trial."""

    @property
    def total_steps(self) -> int:
        """Of all trials and retrainings."""
        return sum(self.steps) + sweep_of(self.recipe).seeds * self.resolved.total_steps


def plan_sweep(recipe: Recipe, *, needs_every_class: bool = True) -> SweepPlan:
    """Check a sweep and split its training set; starts nothing.

    Args:
        needs_every_class: refuse a dev split that leaves a class empty; else such a set is split
            without regard to classes.

    Raises:
        ValueError: the recipe cannot work.
    """
    config = sweep_of(recipe)
    points = points_of(recipe, config)
    if any(trial_recipe(recipe, point).init_from is None for point in points):
        logger.warning("init_from is not set: the models of this sweep begin with random weights")
    resolved = resolve_run(recipe)
    _check_points(recipe, points)
    split = _dev_split(recipe, points, needs_every_class=needs_every_class)
    trials = [trial_recipe(recipe, point, split) for point in points]
    steps = []
    for point, trial in zip(points, trials, strict=True):
        with errors_of_point(recipe, point):
            steps.append(resolve_run(trial).total_steps)
    if config.scheduler == "asha":
        grace_steps(config, max(steps))
    return SweepPlan(recipe, resolved, points, trials, steps)


def _check_points(recipe: Recipe, points: list[Point]) -> None:
    """Each on all of the training set, before that is split; in a new sweep its weights, too.

    Raises:
        ValueError: one cannot be trained; it is named.
    """
    is_new = not _has_begun(recipe, points)
    for point in points:
        with errors_of_point(recipe, point):
            resolved = resolve_run(final_recipe(recipe, point, recipe.seed))
            check_head_is_trained(resolved.recipe, "sweep_trial")
            if is_new:
                check_weights(PreparedRun(resolved.recipe, "sweep_trial", resolved))


def run_sweep(
    recipe: Recipe, *, under: ParentRun | None = None, tags: dict[str, str] | None = None
) -> SweepResult | None:
    """Try every point, choose on the dev split, retrain, test; None if it was asked to stop.

    Args:
        under: the study that the sweep is part of, in whose place on the cluster its trainings run
            one after another; the study's page shows them.
        tags: of the sweep's run.

    Raises:
        ValueError: the recipe cannot work; nothing was started.
        RunFailedError: no trial, or not every retraining, came to its end.
    """
    plan = plan_sweep(recipe.with_absolute_paths())
    with open_parent(
        plan.recipe,
        "sweep",
        plan.resolved,
        plan.total_steps,
        # Its own, under which its finished trials are.
        earlier_run(plan.recipe, "sweep") if _has_begun(plan.recipe, plan.points) else None,
        trainings=plan.trials,
        under=under,
        tags=tags,
    ) as parent:
        parent.start_workers(first_to_train(plan.trials))
        outcome = _run_and_record(plan, parent)
        parent.run.is_complete = outcome is not None
        return outcome


def first_to_train(recipes: Iterable[Recipe]) -> Recipe | None:
    """The first of which no checkpoint says that it has begun."""
    return next((one for one in recipes if newest_checkpoint(locate(one.run_folder)) is None), None)


def _dev_split(
    recipe: Recipe, points: list[Point], *, needs_every_class: bool
) -> tuple[str, str] | None:
    """By class where one data set is trained on; None for several, and for a sweep that began so.

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
        logger.warning("%s is split without regard to classes: %s", recipe.name, error)
        return split(by_class=False)


def _has_begun(recipe: Recipe, points: list[Point]) -> bool:
    """Whether a trial has a checkpoint, or had one."""
    trials = (trial_recipe(recipe, point) for point in points)
    return any(locate(trial.run_folder).list_folders() for trial in trials)


def _run_and_record(plan: SweepPlan, parent: OpenParent) -> SweepResult | None:
    recipe, record = plan.recipe, parent.run.record

    def record_choice(rows: list[SweepRow], chosen: SweepRow) -> None:
        for name, text in sweep_files(rows, chosen).items():
            record.text(name, text)
        record.tag("vit_ray.best_trial_checkpoint", chosen.checkpoint)

    swept = run_planned(plan, parent, record_choice)
    if swept is None:
        return None
    table = sweep_table(recipe, swept.test_top1)
    record.text(PAPER_FILE, table.csv())
    outcome = SweepResult(
        swept.rows,
        swept.chosen.point,
        swept.test_top1,
        parent.run_id,
        record.hint(),
        [run.metrics["eval/top1"] for run in swept.finals] if recipe.train.averaging else [],
        table,
    )
    record.results(0, sweep_metrics(outcome))
    if parent.is_nested:
        return outcome
    return replace(outcome, page=page_of(recipe, parent.run_id, record))


@dataclass(frozen=True)
class Swept:
    """What a planned sweep came to."""

    rows: list[SweepRow]
    chosen: SweepRow
    finals: list[RunResult]
    """The retrainings, one for each seed."""
    test_top1: list[float]
    """Of them; of the averaged weights where the recipe averages."""


def run_planned(
    plan: SweepPlan,
    parent: OpenParent,
    on_choice: Callable[[list[SweepRow], SweepRow], None],
) -> Swept | None:
    """Try and retrain under a parent run that is open; None if it was asked to stop.

    Args:
        on_choice: called with all rows and the chosen one before the retrainings.

    Raises:
        RunFailedError: as `run_sweep`.
    """
    recipe, config = plan.recipe, sweep_of(plan.recipe)
    trials = [_under(trial, parent.run_id) for trial in plan.trials]
    tried = Stage(recipe, config, trials, plan.points, "sweep_trial", parent, plan.steps).run()
    if tried is None:
        return None
    rows = [sweep_row(recipe, *both) for both in zip(plan.points, tried, strict=True)]
    chosen = best_row(rows)
    on_choice(rows, chosen)
    finals = [
        _under(final_recipe(recipe, chosen.point, recipe.seed + k), parent.run_id)
        for k in range(config.seeds)
    ]
    seeds = [{"seed": final.seed} for final in finals]
    finished = Stage(recipe, config, finals, seeds, "finetune", parent).run()
    if finished is None:
        return None
    failed = [found for found in finished if found.state is not TrialState.FINISHED]
    if failed:
        text = f"retraining with {point_text(chosen.point)} failed: {failed[0].error}"
        raise RunFailedError(text)
    results = [found.result for found in finished if found.result]
    top1 = [result.metrics[deciding_metric(recipe)] for result in results]
    return Swept(rows, chosen, results, top1)


def _under(recipe: Recipe, parent_id: str | None) -> Recipe:
    return recipe.with_changes(tracking={"parent_run_id": parent_id})


def sweep_row(recipe: Recipe, point: Point, found: Trained) -> SweepRow:
    """The outcome of a trial."""
    result = found.result
    if result is None:
        return SweepRow(point, None, None, found.state, found.error)
    dev_top1 = result.metrics.get(deciding_metric(recipe))
    return SweepRow(
        point,
        dev_top1,
        result.run_id,
        TrialState.FAILED if dev_top1 is None else found.state,
        last_dev_top1=result.metrics.get("eval/top1") if recipe.train.averaging else None,
        checkpoint=result.checkpoint,
        steps=result.steps,
    )


def best_row(rows: list[SweepRow]) -> SweepRow:
    """The finished row with the highest `dev_top1`; of equal ones the first.

    Raises:
        RunFailedError: no trial was measured at its end.
    """
    measured = [row for row in rows if row.state is TrialState.FINISHED]
    if not measured:
        first = next((row for row in rows if row.error), rows[0])
        raise RunFailedError(f"every trial failed; the first: {first.error}")
    return max(measured, key=lambda row: row.dev_top1 or 0.0)


def sweep_metrics(outcome: SweepResult) -> dict[str, float]:
    """What the sweep's own run records, each accuracy under the name that it has in its runs."""
    mine = "eval/averaged_top1" if outcome.last_test_top1 else "eval/top1"
    chosen = {
        f"sweep/{key.rpartition('.')[2]}": float(value)
        for key, value in outcome.best.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    metrics = {**chosen, mine: outcome.mean}
    metrics[f"{mine}_std"] = outcome.deviation
    if outcome.last_test_top1:
        metrics["eval/top1"] = statistics.fmean(outcome.last_test_top1)
    return metrics
