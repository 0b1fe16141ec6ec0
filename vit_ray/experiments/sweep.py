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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import SweepConfig
from vit_ray.data.parts import dev_split
from vit_ray.experiments.search_space import (
    REDUCTION,
    Point,
    errors_of_point,
    final_recipe,
    point_name,
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
    Context,
    OpenParent,
    Outcome,
    Work,
    deciding_metric,
    open_parent,
    page_of,
    run_trials,
)
from vit_ray.launch.paper_comparison import Rows, training_table
from vit_ray.launch.prepared_run import PreparedRun, check_weights
from vit_ray.launch.resolved_run import Kind, ResolvedRun, check_head_is_trained, resolve_run
from vit_ray.launch.run_record import NOTE, OpenRun, description
from vit_ray.launch.terminal import RunStoppedError
from vit_ray.launch.workers import RunFailedError
from vit_ray.metric_names import EVAL_TOP1, SWEEP_GROUP
from vit_ray.outcomes import EventKind, TrialState
from vit_ray.storage import locate

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
        page: None while MLflow is away: `vit-ray report` can write it later.
    """

    rows: list[Row]
    best: Point
    finals: list[Outcome]
    parent_run_id: str | None = None
    hint: str = ""
    beside_paper: Rows | None = None
    page: Path | None = None

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
        trials: recipes, one for each point.
        steps: of each trial.
        split: as for `trial_recipe`.
    """

    recipe: Recipe
    resolved: ResolvedRun
    points: list[Point]
    trials: list[Recipe]
    steps: list[int]
    split: tuple[str, str] | None = None

    @property
    def config(self) -> SweepConfig:
        return sweep_of(self.recipe)

    @property
    def seeds(self) -> list[int]:
        return [self.recipe.seed + k for k in range(self.config.seeds)]

    @property
    def total_steps(self) -> int:
        return sum(self.steps) + len(self.seeds) * self.resolved.total_steps

    @property
    def has_begun(self) -> bool:
        """Whether a trial has, or had, a checkpoint."""
        return any(locate(trial.run_folder).list_folders() for trial in self.trials)

    def work(self, tags: Mapping[str, str]) -> Work:
        """The function that trains a trial or a retraining; `tags`: of each training."""
        rungs = rung_steps(self.config, max(self.steps))
        return partial(_train_point, self.recipe, self.split, rungs, tags)


def _train_point(
    recipe: Recipe,
    split: tuple[str, str] | None,
    rungs: tuple[int, ...],
    tags: Mapping[str, str],
    config: dict[str, Any],
    context: Context,
) -> dict[str, Any]:
    """Train at a configuration's point: a retraining if there is a seed, else a trial."""
    point, seed = point_of(config, sweep_of(recipe)), config.get("seed")
    if seed is not None:
        final = final_recipe(recipe, point, seed)
        kind: Kind = "finetune" if final.init_from else "pretrain"
        return asdict(context.train(final, kind, {"vit_ray.sweep_stage": "finetune", **tags}))
    trial_tags = {"vit_ray.sweep_stage": "sweep_trial", **tags}
    outcome = context.train(
        trial_recipe(recipe, point, split), "sweep_trial", trial_tags, evaluate_at=rungs
    )
    if outcome.state is TrialState.DIVERGED:
        text = f"{point_name(point)}: {outcome.error}"
        context.parent.record.event(EventKind.TRIAL_DIVERGED, text, 0)
    return asdict(outcome)


def plan_sweep(recipe: Recipe, *, by_class: bool = True) -> SweepPlan:
    """Check a sweep and split the training set; starts nothing.

    The weights to start from are checked if the sweep is new.

    Args:
        by_class: as for `dev_split`.

    Raises:
        ValueError: the recipe cannot work.
    """
    config = sweep_of(recipe)
    points = points_of(recipe, config)
    trials = [trial_recipe(recipe, point) for point in points]
    if any(trial.init_from is None for trial in trials):
        logger.warning("init_from is not set: the models of this sweep start from random weights")
    plan = SweepPlan(recipe, resolve_run(recipe), points, trials, [])
    is_new = not plan.has_begun
    for point in points:  # on the full training set, before it is split
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
    split = dev_split(
        require(recipe.data.train, "data.train", "a converted training set"),
        locate(recipe.run_folder).child("dev-split").uri,
        config.dev_fraction,
        config.seed,
        by_class=by_class,
    )
    trials = [trial_recipe(recipe, point, split) for point in points]
    steps = []
    for point, trial in zip(points, trials, strict=True):
        with errors_of_point(recipe, point):
            steps.append(resolve_run(trial).total_steps)
    rung_steps(config, max(steps))
    return replace(plan, trials=trials, steps=steps, split=split)


def run_sweep(recipe: Recipe) -> SweepResult | None:
    """Try every point, select on the dev split, retrain, test; None if it was asked to stop.

    Raises:
        ValueError: the recipe cannot work; nothing was started.
        RunFailedError: no trial finished, or not every retraining did.
    """
    plan = plan_sweep(recipe.with_absolute_paths())
    try:
        with open_sweep(plan) as parent:
            swept = sweep(
                plan, parent, partial(tune_trials, plan, parent), partial(tune_finals, plan, parent)
            )
            parent.run.is_complete = True
            written = page_of(parent)
            return replace(swept, page=written.page if written else None)
    except RunStoppedError:
        return None


def open_sweep(
    plan: SweepPlan, under: OpenRun | None = None, tags: dict[str, str] | None = None
) -> AbstractContextManager[OpenParent]:
    """Open the sweep's parent run, or continue the run of an earlier start.

    Args:
        under: the study that the sweep is part of.
        tags: of the sweep's run.
    """
    return open_parent(
        plan.recipe, "sweep", plan.resolved, plan.total_steps, continues=plan.has_begun,
        trainings=plan.trials, under=under, tags=tags, varied=[*plan.points[0]],
    )  # fmt: skip


def sweep(
    plan: SweepPlan,
    parent: OpenParent,
    trials: Callable[[], list[Row]],
    finals: Callable[[Point], list[Outcome]],
) -> SweepResult:
    """Try and retrain under the sweep's parent run, which records the selection and the results.

    Args:
        trials: tries all points.
        finals: trains at the selected point, once for each seed.

    Raises:
        RunFailedError: as `run_sweep`.
    """
    recipe, record = plan.recipe, parent.run.record
    is_restarted = plan.config.scheduler == "asha" and plan.has_begun
    rows = trials()
    chosen = best_row(rows)
    record.tag("vit_ray.best_trial_checkpoint", chosen.outcome.checkpoint)
    retrained = finals(chosen.point)
    if failed := [outcome for outcome in retrained if not outcome.is_measured]:
        why = failed[0].error or "it has no accuracy"
        raise RunFailedError(f"retraining with {point_text(chosen.point)} failed: {why}")
    table = training_table(recipe, [outcome.top1 for outcome in retrained])
    swept = SweepResult(rows, chosen.point, retrained, parent.run_id, record.hint(), table)
    seeds = f" (mean of {len(retrained)} seeds)" if len(retrained) > 1 else ""
    sentence = (
        f"Of {len(rows)} trials, {point_text(chosen.point)} won (dev {chosen.outcome.top1:.2%}); "
        f"test {swept.mean:.2%}{seeds}"
    )
    if is_restarted:
        sentence += f". {RESTARTED}"
    record.tag(NOTE, description(recipe, plan.resolved, record.command, sentence))
    record.results(0, sweep_metrics(swept, deciding_metric(recipe)))
    return swept


def fine_tune(
    recipe: Recipe, context: Context, tags: Mapping[str, str], *, by_class: bool = True
) -> SweepResult:
    """Fine-tune within the trial of a cell or a task: once, or the recipe's sweep one by one.

    Args:
        tags: of each training.
        by_class: as for `dev_split`.

    Raises:
        RunFailedError: the fine-tuning failed, or each trial of the sweep.
        ValueError: the recipe cannot work, or the weights do not exist.
    """
    if recipe.sweep is None:
        outcome = context.alone.train(recipe, "finetune", tags)
        if not outcome.is_measured:
            raise RunFailedError(outcome.error or "its evaluation has no accuracy; set data.eval")
        return SweepResult([], {}, [outcome])
    plan = plan_sweep(recipe, by_class=by_class)
    with open_sweep(plan, context.parent, dict(tags)) as parent:
        inner, work = Context(parent.run, context.stop), plan.work(tags)

        def train(point: Point, **seed: int) -> Outcome:
            return Outcome.of_result(work({**trial_config(point), **seed}, inner))

        swept = sweep(
            plan,
            parent,
            lambda: [Row(point, train(point)) for point in plan.points],
            lambda point: [train(point, seed=seed) for seed in plan.seeds],
        )
        parent.run.is_complete = True
    return swept


def tune_trials(plan: SweepPlan, parent: OpenParent) -> list[Row]:
    """Run the trials by Ray Tune.

    Returns:
        The rows in the order of the points; for `search=optuna` in the order in which Optuna
        proposed them.
    """
    config, points = plan.config, plan.points
    stage, has_memory = "trials", config.search == "optuna"
    if has_memory:  # the memory is of one search: the folder's name depends on the settings
        settings = json.dumps(config.model_dump(mode="json", exclude={"seeds"}), sort_keys=True)
        stage += f"-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
    ended = run_trials(
        plan.work({}),
        parent,
        stage,
        plan.trials,
        space=tune_space(config),
        max_concurrent=config.max_concurrent,
        num_samples=1 if config.search == "grid" else len(points),
        search_alg=searcher(config, points),
        scheduler=_scheduler(config, max(plan.steps)),
        has_memory=has_memory,
    )
    rows = [
        Row(point_of(result["config"], config), Outcome.of_result(result))
        for result in ended.results
    ]
    if has_memory:
        return rows + [Row({}, ended.lost)] * ended.num_lost
    by_name = {point_name(row.point): row for row in rows}
    return [by_name.get(point_name(point), Row(point, ended.lost)) for point in points]


def tune_finals(plan: SweepPlan, parent: OpenParent, point: Point) -> list[Outcome]:
    """Run the retrainings at a point by Ray Tune, one for each seed."""
    ended = run_trials(
        plan.work({}),
        parent,
        "retrainings",
        [final_recipe(plan.recipe, point, seed) for seed in plan.seeds],
        space={**trial_config(point), "seed": tune.grid_search(plan.seeds)},
        max_concurrent=plan.config.max_concurrent,
    )
    by_seed = ended.by("seed")
    return [by_seed.get(seed, ended.lost) for seed in plan.seeds]


def searcher(config: SweepConfig, points: Sequence[Point]) -> Any:
    """Tune's searcher; None for a grid."""
    if config.search == "grid":
        return None
    if config.search == "random":
        drawn = [trial_config(point) for point in points]
        return BasicVariantGenerator(points_to_evaluate=drawn, random_state=config.seed)
    from ray.tune.search.optuna import OptunaSearch  # Optuna is an extra

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


def sweep_metrics(outcome: SweepResult, metric: str) -> dict[str, float]:
    """What the sweep's parent run records; `metric`: name of the accuracy in child runs."""
    chosen = {
        f"{SWEEP_GROUP}{key.rpartition('.')[2]}": float(value)
        for key, value in outcome.best.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    # MLflow's pages show metrics in this order; with averaging, `metric` is not EVAL_TOP1.
    last = [final.metrics[EVAL_TOP1] for final in outcome.finals if EVAL_TOP1 in final.metrics]
    first = {EVAL_TOP1: statistics.fmean(last)} if last else {}
    return {**first, metric: outcome.mean, f"{metric}_std": outcome.deviation, **chosen}
