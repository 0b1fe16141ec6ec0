"""A Ray Tune sweep of fine-tuning, as the paper's section 4.1 prescribes.

Each point (a learning rate, or a combination from `sweep.space`) is tried on the training set
without a dev split. The best point on the dev split is trained on the full training set, with
several seeds, and tested. Trials and retrainings are two experiments of Ray Tune. Runs have stable
names, so a restarted sweep skips finished runs and resumes the others.

If a recipe averages weights, the accuracy of the averaged weights selects the point and is the
result, as in the paper's Table 2.
"""

import hashlib
import json
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

from ray.tune.schedulers import ASHAScheduler

from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import SweepConfig
from vit_ray.data.parts import dev_split
from vit_ray.experiments.search_space import (
    REDUCTION,
    Point,
    errors_of_point,
    final_recipe,
    point_of,
    point_text,
    points_of,
    rung_steps,
    sweep_of,
    trial_config,
    trial_recipe,
    tune_space,
)
from vit_ray.experiments.trials import (
    METRIC,
    STEP,
    OpenParent,
    Outcome,
    Published,
    first_line,
    open_parent,
    run_trials,
    train_child,
)
from vit_ray.launch.paper_comparison import Rows, training_table
from vit_ray.launch.resolved_run import (
    Kind,
    ResolvedRun,
    check_head_is_trained,
    check_weights,
    resolve_run,
)
from vit_ray.launch.run import Following
from vit_ray.launch.run_record import OpenRun
from vit_ray.metric_names import EVAL_AVERAGED_TOP1, EVAL_TOP1, SWEEP_GROUP
from vit_ray.outcomes import EventKind, RunFailedError, RunStoppedError
from vit_ray.storage import locate

# Trains configurations of `SweepPlan.train`; returns the results with their `config`, in order.
TrainAll = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
RESTARTED: Final = "The sweep was restarted, and the rungs of ASHA began empty"

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """A point, and the outcome of the trial at that point."""

    point: Point
    outcome: Outcome


@dataclass(frozen=True)
class SweepResult:
    """The trials, the selected point, and the test accuracy of the retrained models.

    Attributes:
        rows: the trials, in the order of the points.
        finals: the retrainings, one for each seed.
        beside_paper: the test accuracy with spread and label, and the paper's.
    """

    rows: list[Row]
    best: Point
    finals: list[Outcome]
    published: Published = field(default_factory=Published)
    beside_paper: Rows | None = None

    @property
    def test_top1(self) -> list[float]:
        """For each seed; with averaged weights if the recipe averages."""
        return [outcome.top1 for outcome in self.finals]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.test_top1)

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds; 0 for a single seed."""
        return statistics.stdev(self.test_top1) if len(self.test_top1) > 1 else 0.0


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is going to train.

    Attributes:
        resolved: the recipe's training, on the full training set.
        split: as for `trial_recipe`.
        steps: of each trial.
    """

    recipe: Recipe
    resolved: ResolvedRun
    points: list[Point]
    split: tuple[str, str]
    steps: list[int]

    @property
    def config(self) -> SweepConfig:
        return sweep_of(self.recipe)

    @property
    def trials(self) -> list[Recipe]:
        """Recipes, one for each point."""
        return [trial_recipe(self.recipe, point, self.split) for point in self.points]

    def training(self, config: Mapping[str, Any]) -> Recipe:
        """At a configuration's point: a retraining if there is a seed, else a trial."""
        point = point_of(config, self.config)
        if "seed" in config:
            return final_recipe(self.recipe, point, config["seed"])
        return trial_recipe(self.recipe, point, self.split)

    def train(
        self, tags: Mapping[str, str], config: dict[str, Any], following: Following
    ) -> dict[str, Any]:
        """Train as `training`, with these tags; returns the fields of the `Outcome`."""
        recipe, is_final = self.training(config), "seed" in config
        final_kind: Kind = "finetune" if recipe.init_from else "pretrain"
        outcome = train_child(
            following,
            recipe,
            final_kind if is_final else "sweep_trial",
            {"vit_ray.sweep_stage": "finetune" if is_final else "sweep_trial", **tags},
            evaluate_at=() if is_final else rung_steps(self.config, max(self.steps)),
        )
        if outcome.error:
            text = f"{recipe.name}: {outcome.error}"
            following.parent.record.event(EventKind.TRIAL_FAILED, text, 0)
        return asdict(outcome)


def plan_sweep(recipe: Recipe, *, by_class: bool = True) -> SweepPlan:
    """Check a sweep and split the training set; starts nothing.

    The weights of trials that have a checkpoint are not checked.

    Args:
        by_class: as for `dev_split`.

    Raises:
        ValueError: the recipe cannot work.
    """
    config, resolved = sweep_of(recipe), resolve_run(recipe)
    points, steps = points_of(recipe, config), list[int]()
    for point in points:  # on the full training set, before it is split
        with errors_of_point(point):
            final = resolve_run(final_recipe(recipe, point, recipe.seed))
            check_head_is_trained(final.recipe, "sweep_trial")
            if final.recipe.train.loss == "masked_patch":
                raise ValueError(
                    "train.loss=masked_patch: its trials report no accuracy for a sweep to select "
                    "by; use a loss on labels"
                )
            if newest_checkpoint(locate(trial_recipe(recipe, point).run_folder)) is None:
                check_weights(final, "sweep_trial")
    split = dev_split(
        require(recipe.data.train, "data.train", "a converted training set"),
        locate(recipe.run_folder).child("dev-split").uri,
        config.dev_fraction,
        config.seed,
        by_class=by_class,
    )
    plan = SweepPlan(recipe, resolved, points, split, steps)
    for point, trial in zip(points, plan.trials, strict=True):
        with errors_of_point(point):
            steps.append(resolve_run(trial).total_steps)
    rung_steps(config, max(steps))
    if any(trial.init_from is None for trial in plan.trials):
        logger.warning("init_from is not set: the models of this sweep start from random weights")
    return plan


def run_sweep(recipe: Recipe) -> SweepResult:
    """Try every point, select on the dev split, retrain, test.

    Raises:
        ValueError: the recipe cannot work; nothing was started.
        RunFailedError: no trial finished, or not every retraining did.
        RunStoppedError: as `run_trials`.
    """
    plan = plan_sweep(recipe.with_absolute_paths())
    with open_sweep(plan) as parent:
        return sweep(plan, parent, partial(tune_all, plan, parent))


def open_sweep(
    plan: SweepPlan, under: OpenRun | None = None, tags: dict[str, str] | None = None
) -> AbstractContextManager[OpenParent]:
    """Open the sweep's parent run, or continue the run of an earlier start.

    Args:
        under: the study that the sweep is part of.
        tags: of the sweep's run.
    """
    total_steps = sum(plan.steps) + plan.config.seeds * plan.resolved.total_steps
    # The retraining reads the whole training set and the test set.
    trainings = [*plan.trials, final_recipe(plan.recipe, plan.points[0], plan.recipe.seed)]
    return open_parent(
        plan.recipe, "sweep", plan.resolved, total_steps, trainings, under=under, tags=tags,
        varied=[*plan.points[0]],
    )  # fmt: skip


def sweep(plan: SweepPlan, parent: OpenParent, train_all: TrainAll) -> SweepResult:
    """Try and retrain under the sweep's parent run, which records the selection and the results.

    Raises:
        RunFailedError: as `run_sweep`.
    """
    tried = train_all([trial_config(point) for point in plan.points])
    rows = [
        Row(point_of(result["config"], plan.config), Outcome.of_result(result)) for result in tried
    ]
    chosen = best_row(rows)
    seeds = range(plan.recipe.seed, plan.recipe.seed + plan.config.seeds)
    configs = [{**trial_config(chosen.point), "seed": seed} for seed in seeds]
    retrained = [Outcome.of_result(result) for result in train_all(configs)]
    if failed := [outcome for outcome in retrained if not outcome.is_measured]:
        why = failed[0].error or "it has no accuracy"
        raise RunFailedError(f"retraining with {point_text(chosen.point)} failed: {why}")
    table = training_table(plan.recipe, [outcome.top1 for outcome in retrained])
    swept = SweepResult(rows, chosen.point, retrained, beside_paper=table)
    of_seeds = f" (mean of {len(seeds)} seeds)" if len(seeds) > 1 else ""
    sentence = (
        f"Of {len(rows)} trials, {point_text(chosen.point)} won (dev {chosen.outcome.top1:.2%}); "
        f"test {swept.mean:.2%}{of_seeds}"
    )
    if plan.config.scheduler == "asha" and parent.has_begun:
        sentence += f". {RESTARTED}"
    metrics = sweep_metrics(swept, plan.recipe)
    return replace(swept, published=parent.conclude(sentence, metrics))


def fine_tune(
    recipe: Recipe, following: Following, tags: Mapping[str, str], *, by_class: bool = True
) -> SweepResult:
    """Fine-tune within the trial of a cell or a task: once, or the recipe's sweep one by one.

    Args:
        tags: of each training.
        by_class: as for `dev_split`.

    Raises:
        RunFailedError: there is no accuracy; the message says why, in one line.
        RunStoppedError: the trial was stopped.
    """
    try:
        if recipe.sweep is not None:
            plan = plan_sweep(recipe, by_class=by_class)
            with open_sweep(plan, following.parent, dict(tags)) as parent:
                inner = Following(parent.run, following.stop)
                return sweep(
                    plan,
                    parent,
                    lambda configs: [
                        {**plan.train(tags, config, inner), "config": config} for config in configs
                    ],
                )
        alone = Following(following.parent, following.stop)  # Tune compares no fine-tunings
        outcome = train_child(alone, recipe, "finetune", tags)
        if outcome.is_measured:
            return SweepResult([], {}, [outcome])
        raise RunFailedError(outcome.error or "its evaluation has no accuracy; set data.eval")
    except RunStoppedError:
        raise
    except Exception as error:
        raise RunFailedError(first_line(error)) from error


def tune_all(
    plan: SweepPlan, parent: OpenParent, configs: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Train by Ray Tune: all trials, of which Optuna proposes its own, or all retrainings."""
    config, stage, search = plan.config, "retrainings", dict[str, Any]()
    if "seed" not in configs[0]:
        stage, search["scheduler"] = "trials", _scheduler(config, max(plan.steps))
        if config.search == "optuna":  # whose memory is of one search: its settings name the folder
            settings = json.dumps(config.model_dump(mode="json", exclude={"seeds"}), sort_keys=True)
            stage += f"-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
            search |= {"space": tune_space(config), "searcher": optuna_search(config)}
    return run_trials(
        partial(plan.train, {}),
        parent,
        stage,
        [plan.training(config) for config in configs],
        configs,
        max_concurrent=config.max_concurrent,
        **search,
    )


def optuna_search(config: SweepConfig) -> Any:
    """Tune's searcher by Optuna, an extra."""
    from ray.tune.search.optuna import OptunaSearch

    logging.getLogger("optuna").setLevel(logging.WARNING)
    return OptunaSearch(metric=METRIC, mode="max", seed=config.seed)


def _scheduler(config: SweepConfig, max_steps: int) -> ASHAScheduler | None:
    if config.scheduler == "none":
        return None
    return ASHAScheduler(
        time_attr=STEP,
        max_t=max_steps,
        grace_period=rung_steps(config, max_steps)[0],
        reduction_factor=REDUCTION,
        stop_last_trials=False,
    )


def best_row(rows: list[Row]) -> Row:
    """The finished trial with the highest accuracy; of several, the first.

    Raises:
        RunFailedError: no trial was evaluated at its end.
    """
    measured = [row for row in rows if row.outcome.is_measured]
    if not measured:
        errors = [row.outcome.error for row in rows if row.outcome.error]
        why = errors[0] if errors else "its accuracy is not a number"
        raise RunFailedError(f"every trial failed; the first: {why}")
    return max(measured, key=lambda row: row.outcome.top1)


def sweep_metrics(outcome: SweepResult, recipe: Recipe) -> dict[str, float]:
    """What the sweep's parent run records: the accuracy has the name that it has in child runs."""
    chosen = {
        f"{SWEEP_GROUP}{key.rpartition('.')[2]}": float(value)
        for key, value in outcome.best.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    metric = EVAL_AVERAGED_TOP1 if recipe.train.averaging else EVAL_TOP1
    # MLflow's pages show metrics in this order; with averaging, `metric` is not EVAL_TOP1.
    last = [final.metrics[EVAL_TOP1] for final in outcome.finals if EVAL_TOP1 in final.metrics]
    first = {EVAL_TOP1: statistics.fmean(last)} if last else {}
    return {**first, metric: outcome.mean, f"{metric}_std": outcome.deviation, **chosen}
