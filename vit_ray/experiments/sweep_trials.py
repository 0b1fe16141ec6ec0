"""What the trials of a sweep train.

A module of its own, which a trial's process imports: it needs neither MLflow nor charts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.config.validation import require
from vit_ray.experiments.search_space import Point, point_name, point_of, short_name, with_point
from vit_ray.experiments.trials import Context, Outcome, result_of
from vit_ray.launch.model_checks import Kind
from vit_ray.outcomes import EventKind, TrialState

REDUCTION: Final = 4
"""ASHA: factor between the steps of successive rungs; one in this many trials continues."""


@dataclass(frozen=True)
class Row:
    """A trial, and the point that it stands for."""

    point: Point
    outcome: Outcome


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
    name = short_name(f"{recipe.name}-{point_name(point)}")
    return with_point(recipe, point, name=name, data=data, sweep=None).with_absolute_paths()


def final_recipe(recipe: Recipe, point: Point, seed: int) -> Recipe:
    """Fine-tune at the selected point on the whole training set, and evaluate on the test set."""
    name = short_name(f"{recipe.name}-final-{point_name(point)}-seed{seed}")
    return with_point(recipe, point, name=name, seed=seed, sweep=None).with_absolute_paths()


def grace_steps(config: SweepConfig, max_steps: int) -> int:
    """Steps up to the first rung: as in the recipe, or two reductions before the longest trial's
    end.

    Raises:
        ValueError: the first rung is not before the end.
    """
    steps = config.grace_steps or max(1, math.ceil(max_steps / REDUCTION**2))
    if steps >= max_steps:
        raise ValueError(
            f"sweep.grace_steps={steps} must be smaller than the trial length ({max_steps} steps), "
            "or no trial would be stopped; use less, or sweep.scheduler=none"
        )
    return steps


def rung_steps(config: SweepConfig, max_steps: int) -> tuple[int, ...]:
    """Steps before the end of the longest trial at which ASHA compares trials."""
    if config.scheduler != "asha":
        return ()
    rungs = [grace_steps(config, max_steps)]
    while rungs[-1] * REDUCTION < max_steps:
        rungs.append(rungs[-1] * REDUCTION)
    return tuple(rungs)


@dataclass(frozen=True)
class Trainings:
    """What the trials of a sweep train; sent to their processes."""

    recipe: Recipe
    split: tuple[str, str] | None
    evaluate_at: tuple[int, ...]
    tags: Mapping[str, str]

    def trial(self, point: Point, context: Context) -> Outcome:
        """Train at a point without the dev split."""
        recipe = trial_recipe(self.recipe, point, self.split)
        tags = {"vit_ray.sweep_stage": "sweep_trial", **self.tags}
        outcome = context.train(recipe, "sweep_trial", tags, self.evaluate_at)
        if outcome.state is TrialState.DIVERGED:
            text = f"{point_name(point)}: {outcome.error}"
            context.parent.record.event(EventKind.TRIAL_DIVERGED, text, 0)
        return outcome

    def final(self, point: Point, seed: int, context: Context) -> Outcome:
        """Train at the selected point on all images."""
        recipe = final_recipe(self.recipe, point, seed)
        tags = {"vit_ray.sweep_stage": "finetune", **self.tags}
        kind: Kind = "finetune" if recipe.init_from else "pretrain"
        return context.train(recipe, kind, tags)


def run_trial(trainings: Trainings, config: dict[str, Any], context: Context) -> dict[str, Any]:
    """A trial of Ray Tune that tries a point."""
    point = point_of(config, sweep_of(trainings.recipe))
    return result_of(trainings.trial(point, context))


def run_final(
    trainings: Trainings, point: Point, config: dict[str, Any], context: Context
) -> dict[str, Any]:
    """A trial of Ray Tune that retrains with a seed."""
    return result_of(trainings.final(point, config["seed"], context))
