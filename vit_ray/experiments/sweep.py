"""A Ray Tune sweep of fine-tuning learning rates, as the paper's section 4.1 prescribes.

Each rate is tried on the training set less a dev split; the best on the dev split is trained on
all of the training set, with several seeds, and tested. Runs have stable names, so that a sweep
started again does not repeat what is finished and continues what is not.

Where a recipe averages its weights, the accuracy of the averaged ones decides and is the result,
as in the paper's Table 2; that of the last weights is reported beside it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.config.validation import require
from vit_ray.experiments.page import page_of
from vit_ray.experiments.parent_run import OpenParent, open_parent
from vit_ray.experiments.trials import Outcome, run_trials
from vit_ray.launch.actor_calls import answer
from vit_ray.launch.preflight import resolve_run
from vit_ray.launch.run import (
    ParentRun,
    RunResult,
    train,
)
from vit_ray.launch.worker_group import RunFailedError
from vit_ray.storage import locate
from vit_ray.train.run_checkpoints import newest_checkpoint

_STAGES = {"sweep_trial": "trial", "finetune": "retraining"}


@dataclass(frozen=True)
class SweepRow:
    """One learning rate and what it reached on the dev split."""

    learning_rate: float
    dev_top1: float | None
    """What decides: of the averaged weights where the recipe averages; None: the trial failed."""
    run_id: str | None
    error: str = ""
    last_dev_top1: float | None = None
    """Of the last weights, where `dev_top1` is of the averaged ones."""


@dataclass(frozen=True)
class SweepResult:
    """The grid, the rate that was chosen, and the test accuracy of the retrained models."""

    rows: list[SweepRow]
    learning_rate: float
    test_top1: list[float]
    """One for each seed; of the averaged weights where the recipe averages."""
    parent_run_id: str | None
    hint: str
    last_test_top1: list[float] = field(default_factory=list)
    """Of the last weights, where `test_top1` is of the averaged ones."""
    page: Path | None = None
    """None while MLflow is away: `jobs/report.py` makes it later."""

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
        ValueError: it has none, or nothing to fine-tune, or nothing to test on.
    """
    rates = "sweep.learning_rates, such as [0.003, 0.01, 0.03]"
    sweep = require(recipe.sweep, "sweep", rates)
    require(recipe.init_from, "init_from", "the run, checkpoint or file to fine-tune")
    require(recipe.data.eval, "data.eval", "the test set for the chosen learning rate")
    return sweep


def trial_recipe(recipe: Recipe, learning_rate: float) -> Recipe:
    """Fine-tune with one rate on the training set less the dev split, measured on that split."""
    return recipe.with_changes(
        name=f"{recipe.name}-lr{learning_rate:g}",
        optim={"learning_rate": learning_rate},
        data={"eval": None, "held_out_fraction": sweep_of(recipe).dev_fraction},
        sweep=None,
    )


def final_recipe(recipe: Recipe, learning_rate: float, seed: int) -> Recipe:
    """Fine-tune with the chosen rate on all of the training set, measured on the test set."""
    return recipe.with_changes(
        name=f"{recipe.name}-final-lr{learning_rate:g}-seed{seed}",
        seed=seed,
        optim={"learning_rate": learning_rate},
        sweep=None,
    )


def run_sweep(recipe: Recipe) -> SweepResult | None:
    """Try every rate, choose on the dev split, retrain, test; None if it was asked to stop.

    Raises:
        ValueError: the recipe cannot work; nothing was started.
        RunFailedError: no trial, or not every retraining, came to its end.
    """
    recipe = recipe.with_absolute_paths()
    config = sweep_of(recipe)
    trials = [trial_recipe(recipe, rate) for rate in config.learning_rates]
    resolved = resolve_run(recipe)
    steps = [resolve_run(trial).total_steps for trial in trials]
    total_steps = sum(steps) + config.seeds * resolved.total_steps
    is_new = newest_checkpoint(locate(trials[0].run_folder)) is None
    first = trials[0] if is_new else None
    with open_parent(recipe, "sweep", resolved, total_steps, first=first) as parent:
        outcome = _run_stages(recipe, trials, parent)
        parent.record.is_complete = outcome is not None
        return outcome


def _run_stages(recipe: Recipe, trials: list[Recipe], parent: OpenParent) -> SweepResult | None:
    config, parent_id, children = sweep_of(recipe), parent.run_id, parent.for_children
    tried = _run_all([_under(trial, parent_id) for trial in trials], "sweep_trial", children)
    if tried is None:
        return None
    rows = [
        sweep_row(recipe, rate, *found)
        for rate, found in zip(config.learning_rates, tried, strict=True)
    ]
    best = best_rate(rows)
    finals = [
        _under(final_recipe(recipe, best, recipe.seed + k), parent_id) for k in range(config.seeds)
    ]
    results = _run_all(finals, "finetune", children)
    if results is None:
        return None
    errors = [error for _, error in results if error]
    if errors:
        raise RunFailedError(f"retraining with learning rate {best:g} failed: {errors[0]}")
    measured = [result.metrics for result, _ in results if result]
    outcome = SweepResult(
        rows,
        best,
        [metrics[deciding_metric(recipe)] for metrics in measured],
        parent_id,
        parent.record.ask("hint"),
        [metrics["eval/top1"] for metrics in measured] if recipe.train.averaging else [],
    )
    parent.record.ask("metrics", 0, sweep_metrics(outcome))
    return replace(outcome, page=page_of(recipe, parent_id, parent.record.recorder))


def max_concurrent(recipe: Recipe) -> int:
    """Trials that the cluster holds at a time, each with its workers and one data task."""
    limit = sweep_of(recipe).max_concurrent if recipe.sweep else None
    if limit is not None:
        return limit
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    workers = recipe.workers
    size = recipe.group_sizes[0]
    by_cpu = resources.get("CPU", 1) // (size * workers.cpus_per_worker + recipe.data.cpus_per_task)
    by_gpu = resources.get("GPU", 0) // size if resources.get("GPU", 0) else by_cpu
    return max(1, int(min(by_cpu, by_gpu)))


def _under(recipe: Recipe, parent_id: str | None) -> Recipe:
    return recipe.with_changes(tracking={"parent_run_id": parent_id})


def _run_all(
    recipes: list[Recipe], kind: Any, parent: ParentRun
) -> list[tuple[RunResult | None, str]] | None:
    """Run all as Ray Tune trials; (result, "") or (None, error) in the order of the recipes.

    None if the sweep was told to stop: its trials have written checkpoints, and resume from them.
    """

    def train_trial(index: int) -> Outcome:
        recipe = recipes[index]
        label = f"learning rate {recipe.optim.learning_rate:g}"
        if reason := answer(parent.recorder.stop_reason.remote(), "the run's record"):
            return {"error": reason}  # it was scheduled after the sweep was asked to stop
        try:
            result = train(recipe, kind=kind, parent=parent, tags={"vit_ray.sweep_stage": kind})
        except Exception as error:  # one trial that fails must not end the sweep
            parent.recorder.child_ended.remote(label, None)
            return {"error": str(error) or repr(error)}
        parent.recorder.child_ended.remote(label, result.metrics.get(deciding_metric(recipe)))
        return {"result": vars(result), "error": ""}

    parent.recorder.begin_stage.remote(_STAGES[kind], len(recipes))
    outcomes = run_trials(
        len(recipes),
        train_trial,
        max_concurrent=max_concurrent(recipes[0]),
        name=f"{recipes[0].name}-tune",
        storage_path=f"{recipes[0].output.rstrip('/')}/tune",
    )
    if answer(parent.recorder.stop_reason.remote(), "the run's record"):
        return None
    return [_result_or_error(outcome) for outcome in outcomes]


def _result_or_error(outcome: Outcome | None) -> tuple[RunResult | None, str]:
    if outcome is None:
        return None, "the trial did not come to its end"
    if outcome["error"]:
        return None, outcome["error"]
    return RunResult(**outcome["result"]), ""


def deciding_metric(recipe: Recipe) -> str:
    """The accuracy that chooses a rate and is the result."""
    return "eval/averaged_top1" if recipe.train.averaging else "eval/top1"


def sweep_row(recipe: Recipe, rate: float, result: RunResult | None, error: str) -> SweepRow:
    """The outcome of a trial; `result` is None where it failed."""
    if result is None:
        return SweepRow(rate, None, None, error)
    last = result.metrics.get("eval/top1") if recipe.train.averaging else None
    decides = result.metrics.get(deciding_metric(recipe))
    return SweepRow(rate, decides, result.run_id, last_dev_top1=last)


def best_rate(rows: list[SweepRow]) -> float:
    """The rate with the highest `dev_top1`.

    Raises:
        RunFailedError: no trial was measured.
    """
    measured = [row for row in rows if row.dev_top1 is not None]
    if not measured:
        raise RunFailedError(f"every trial failed; the first: {rows[0].error}")
    return max(measured, key=lambda row: row.dev_top1 or 0.0).learning_rate


def sweep_metrics(outcome: SweepResult) -> dict[str, float]:
    """What the sweep's own run records, each accuracy under the name that it has in its runs."""
    mine = "eval/averaged_top1" if outcome.last_test_top1 else "eval/top1"
    metrics = {"sweep/learning_rate": outcome.learning_rate, mine: outcome.mean}
    metrics[f"{mine}_std"] = outcome.deviation
    if outcome.last_test_top1:
        metrics["eval/top1"] = statistics.fmean(outcome.last_test_top1)
    return metrics
