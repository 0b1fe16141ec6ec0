"""A sweep's points, which are values of some keys as Tune draws them, and the points' recipes."""

import hashlib
import importlib.util
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
from ray import tune

from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.config.loading import changed
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.config.schema import errors_of, require, value_text
from vit_ray.launch.resolved_run import check_batch, check_head_is_trained, check_model

# Dotted keys of a recipe to values.
Point = Mapping[str, Any]

RATE: Final = "optim.learning_rate"
# Draws for each trial, after which a space has too few different points.
_DRAWS: Final = 100
# A run's name is also a folder's: file systems take 255 bytes.
MAX_NAME_CHARS: Final = 200
# ASHA: factor between the steps of successive rungs; one in this many trials continues.
REDUCTION: Final = 4


def sweep_of(recipe: Recipe) -> SweepConfig:
    """The recipe's sweep section.

    Raises:
        ValueError: there is no such section, or nothing to test on.
    """
    sweep = require(recipe.sweep, "sweep", "sweep.learning_rates, such as [0.003, 0.01, 0.03]")
    require(recipe.data.eval, "data.eval", "the test set for the selected learning rate")
    return sweep


def space_of(config: SweepConfig) -> dict[str, Any]:
    """Keys of the recipe to lists of values and ranges."""
    return dict(config.space or {RATE: list(config.learning_rates)})


def tune_space(config: SweepConfig) -> dict[str, Any]:
    """The domains of a random or Optuna search, from which Ray Tune draws."""
    domains: dict[str, Any] = {}
    for key, values in space_of(config).items():
        if isinstance(values, list):
            domains[key] = tune.choice([_plain(value) for value in values])
        else:
            ((kind, (low, high)),) = values.items()
            domains[key] = (tune.loguniform if kind == "log_uniform" else tune.uniform)(low, high)
    return domains


def _plain(value: Any) -> Any:
    # Tune would take the items of other values for dimensions of the space.
    return value if value is None or isinstance(value, (int, float, str)) else value_text(value)


def trial_config(point: Point) -> dict[str, Any]:
    """The configuration of the trial at a point; `point_of` is the inverse."""
    return {key: _plain(value) for key, value in point.items()}


def point_of(trial: Mapping[str, Any], config: SweepConfig) -> Point:
    """The point of a trial's, or a retraining's, configuration; empty for a trial without one."""
    point: dict[str, Any] = {}
    for key, values in space_of(config).items():
        if key in trial:
            listed = values if isinstance(values, list) else ()
            by_plain_value = {_plain(value): value for value in listed}
            point[key] = by_plain_value.get(trial[key], trial[key])
    return point


def points_of(recipe: Recipe, config: SweepConfig) -> list[Point]:
    """Every point of the grid, or `sweep.num_trials` random points; the same at each call.

    For `search=optuna` the random points stand for those that Optuna will propose.

    Raises:
        ValueError: a value is not allowed, or two points are equal.
    """
    space = space_of(config)
    if config.search == "optuna" and importlib.util.find_spec("optuna") is None:
        raise ValueError(
            "sweep.search=optuna: Optuna is not installed; run pip install 'vit_ray[search]', or "
            "set sweep.search=random"
        )
    if config.search == "grid":
        grid = itertools.product(*space.values())
        points: list[Point] = [dict(zip(space, values, strict=True)) for values in grid]
    else:
        points = _random_points(config)
    for point in points:
        with_point(recipe, point)
    names = Counter(point_name(point) for point in points)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(
            f"sweep.space: {names[twice[0]]} points have the name {twice[0]}; list values that "
            "differ more"
        )
    return points


def errors_of_point(point: Point) -> AbstractContextManager[None]:
    """Errors in the block name the point."""
    return errors_of(f"sweep.space: {point_text(point)}")


def _random_points(config: SweepConfig) -> list[Point]:
    """Different points, drawn by Tune; fewer trials have the first of the same points."""
    assert config.num_trials is not None
    random, points = np.random.RandomState(config.seed), dict[str, Point]()
    domains = tune_space(config)
    for _ in range(_DRAWS * config.num_trials):
        drawn = {key: domain.sample(random_state=random) for key, domain in domains.items()}
        point = point_of(drawn, config)
        points.setdefault(point_name(point), point)
        if len(points) == config.num_trials:
            return list(points.values())
    raise ValueError(
        f"sweep.space has {len(points)} different points and sweep.num_trials is "
        f"{config.num_trials}; list more values, widen the ranges, or lower sweep.num_trials"
    )


def with_point(recipe: Recipe, point: Point, where: str = "", **changes: Any) -> Recipe:
    """The recipe with the values of a point, and other changes as in `Recipe.with_changes`.

    A value that is a section changes only the keys in it; the section's other keys stay, even with
    another `model.name`.

    Args:
        where: what an error names; unset = the sweep's point.

    Raises:
        ValueError: as `load_recipe`.
    """
    where = where or f"sweep.space: {point_text(point)}"
    tree = recipe.with_changes(**changes).model_dump(mode="json")
    for key, value in point.items():
        values = {key: value}
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            values = {f"{key}.{name}": part for name, part in value.items()}
        with errors_of(where):
            changed(tree, values)
    return recipe_from_dict(tree, where)


def trial_recipe(recipe: Recipe, point: Point, split: tuple[str, str] | None = None) -> Recipe:
    """Fine-tune at one point on the training set without the dev split, and evaluate on that split.

    Args:
        split: addresses of the training set without the dev split, and of the split; None = hold
            out row groups of `data.train`, regardless of classes.
    """
    data: dict[str, Any] = {"eval": None, "held_out_fraction": sweep_of(recipe).dev_fraction}
    if split is not None:
        data = {"train": split[0], "eval": split[1], "held_out_fraction": 0.0}
    name = short_name(f"{recipe.name}-{point_name(point)}")
    return with_point(recipe, point, name=name, data=data, sweep=None).with_absolute_paths()


def final_recipe(recipe: Recipe, point: Point, seed: int) -> Recipe:
    """Fine-tune at the selected point on the full training set, and evaluate on the test set."""
    name = short_name(f"{recipe.name}-final-{point_name(point)}-seed{seed}")
    return with_point(recipe, point, name=name, seed=seed, sweep=None).with_absolute_paths()


def rung_steps(config: SweepConfig, max_steps: int) -> tuple[int, ...]:
    """Steps before the end of the longest trial at which ASHA compares trials.

    The first rung is `sweep.grace_steps`, or two reductions before the longest trial's end.

    Raises:
        ValueError: the first rung is not before the end.
    """
    if config.scheduler != "asha":
        return ()
    rungs = [config.grace_steps or max(1, math.ceil(max_steps / REDUCTION**2))]
    if rungs[0] >= max_steps:
        raise ValueError(
            f"sweep.grace_steps={rungs[0]} must be smaller than the trial length ({max_steps} "
            "steps), or no trial would be stopped; use less, or sweep.scheduler=none"
        )
    while rungs[-1] * REDUCTION < max_steps:
        rungs.append(rungs[-1] * REDUCTION)
    return tuple(rungs)


def check_in_turn(recipe: Recipe, where: str) -> None:
    """Check the sweep, if any, of a fine-tuning in the trial of a cell or a task.

    Raises:
        ValueError: the sweep's trainings cannot run one after another.
    """
    if recipe.sweep and (recipe.sweep.search == "optuna" or recipe.sweep.scheduler == "asha"):
        raise ValueError(
            f"{where}: its fine-tunings run one after another; use sweep.search=grid or random, "
            "and sweep.scheduler=none"
        )


def checked_steps(recipe: Recipe, num_images: int) -> int:
    """Check a fine-tuning, or a sweep of it, without a dev split and without the weights.

    Args:
        num_images: of the training set.

    Returns:
        The steps of the fine-tuning, or of all trials and retrainings of the sweep.

    Raises:
        ValueError: the recipe cannot work.
    """
    check_model(recipe)
    check_batch(recipe, num_images)
    steps = recipe.optim.total_steps(num_images, recipe.train.global_batch_size)
    if recipe.sweep is None:
        return steps
    trial_steps, num_trial_images = 0, round(num_images * (1 - recipe.sweep.dev_fraction))
    for point in points_of(recipe, recipe.sweep):
        trial = with_point(recipe, point)
        with errors_of_point(point):
            check_model(trial)
            check_head_is_trained(trial, "sweep_trial")
            check_batch(trial, num_trial_images)
        trial_steps += trial.optim.total_steps(num_trial_images, trial.train.global_batch_size)
    return trial_steps + recipe.sweep.seeds * steps


def point_text(point: Point) -> str:
    """As text: `learning_rate=0.01, steps=500`."""
    return ", ".join(f"{key.rpartition('.')[2]}={_short_text(v)}" for key, v in point.items())


def point_name(point: Point) -> str:
    """As part of a run's name: `lr0.01-steps500`."""
    keys = ("lr" if key == RATE else key.rpartition(".")[2] for key in point)
    parts = (f"{key}{_short_text(v)}" for key, v in zip(keys, point.values(), strict=True))
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join(parts)).strip("-")


def short_name(name: str) -> str:
    """A run's name; the end of a long name is replaced by a digest of the full name."""
    if len(name) <= MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: MAX_NAME_CHARS - 13]}-{digest}"


def _short_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
