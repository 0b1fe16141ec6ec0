"""What a sweep tries: points of a grid or random ones, with values for some keys."""

import importlib.util
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.config.validation import InvalidValueError, errors_of, value_text
from vit_ray.data.order.keyed_random import KeyedUniform
from vit_ray.launch.model_checks import check_model

Point = Mapping[str, Any]
"""Dotted keys of a recipe to values."""

RATE: Final = "optim.learning_rate"
_FIXED: Final = (
    "name", "output", "resume", "seed", "sweep", "tracking",
    "data.eval", "data.held_out_fraction", "data.train",
)  # fmt: skip
"""Set by the sweep itself, for each trial and retraining."""
_DIGITS: Final = 4
_MISSES: Final = 100
"""Draws in a row for each trial without a new point before giving up: of the points of lists, at
least one in `num_trials` is new, so a chance of exp(-100) remains."""


def points_of(recipe: Recipe, config: SweepConfig) -> list[Point]:
    """Every point of the grid, or as many random ones as the recipe says; the same each time.

    For `search=optuna` they stand for the points that it will propose.

    Raises:
        ValueError: a key cannot be varied, a value is not allowed, the model does not exist, or two
            points are equal.
    """
    space: Mapping[str, Any] = config.space or {RATE: list(config.learning_rates)}
    for key, fixed in itertools.product(space, _FIXED):
        if f"{fixed}.".startswith(f"{key}.") or key.startswith(f"{fixed}."):
            raise ValueError(f"sweep.space: {key} cannot be varied in one sweep")
    if config.search == "optuna":
        check_optuna(space)
    ranges = [key for key, values in space.items() if isinstance(values, dict)]
    if config.search != "grid":
        points = _drawn(space, config)
    elif ranges:
        raise ValueError(
            f"sweep.space: {ranges[0]} is a range, but a grid needs lists of values; set "
            "sweep.search=random and sweep.num_trials, or list values"
        )
    else:
        grid = itertools.product(*space.values())
        points = [dict(zip(space, values, strict=True)) for values in grid]
    for point in points:
        try:
            changed = with_point(recipe, point)
        except InvalidValueError as error:
            if "int_type" in error.types and ranges:
                hint = "a range has numbers with a fraction; list the values of a whole number"
                raise ValueError(f"{error}; {hint}") from None
            raise
        with errors_of_point(recipe, point):
            check_model(changed)
    names = Counter(point_name(point) for point in points)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(
            f"sweep.space: {names[twice[0]]} points have the name {twice[0]}; list values that "
            "differ more"
        )
    return points


def errors_of_point(recipe: Recipe, point: Point) -> AbstractContextManager[None]:
    """Errors in the block name the point if points have more than rates."""
    if recipe.sweep is None or recipe.sweep.space is None:
        return nullcontext()
    return errors_of(f"sweep.space: {point_text(point)}")


def check_optuna(space: Mapping[str, Any]) -> None:
    """Refuse what Optuna cannot search.

    Raises:
        ValueError: it is not installed, or a value is a list or a section.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ValueError(
            "sweep.search=optuna: Optuna is not installed; run pip install 'vit_ray[search]', or "
            "set sweep.search=random"
        )
    for key, values in space.items():
        if key.startswith("workers."):
            raise ValueError(f"sweep.space: {key} cannot be varied by search=optuna; leave it out")
        for value in values if isinstance(values, list) else ():
            if isinstance(value, (dict, list)):
                raise ValueError(
                    f"sweep.space: {key}={value_text(value)}: search=optuna varies numbers, texts "
                    "and ranges; list such values, or set sweep.search=random"
                )


def _drawn(space: Mapping[str, Any], config: SweepConfig) -> list[Point]:
    """Different points; a smaller number of trials takes the first of them."""
    assert config.num_trials is not None
    found: dict[str, Point] = {}
    missed = 0
    for number in itertools.count():
        if len(found) == config.num_trials:
            return list(found.values())
        point = {
            key: _draw(values, KeyedUniform(config.seed, number, place))
            for place, (key, values) in enumerate(space.items())
        }
        missed = missed + 1 if point_name(point) in found else 0
        found.setdefault(point_name(point), point)
        if missed == _MISSES * config.num_trials:
            raise ValueError(
                f"sweep.space has {len(found)} different points and sweep.num_trials is "
                f"{config.num_trials}; list more values, widen the ranges, or lower "
                "sweep.num_trials"
            )
    raise AssertionError


def _draw(values: Any, uniform: KeyedUniform) -> Any:
    if isinstance(values, list):
        return values[uniform.below(len(values))]
    ((kind, (low, high)),) = values.items()
    if kind == "uniform":
        return rounded(uniform.between(low, high))
    return rounded(math.exp(uniform.between(math.log(low), math.log(high))))


def rounded(value: float) -> float:
    """A drawn number, rounded so that it can be read and repeated."""
    return float(f"{value:.{_DIGITS}g}")


def with_point(recipe: Recipe, point: Point, where: str = "", **changes: Any) -> Recipe:
    """The recipe with the values of a point, and other changes as in `Recipe.with_changes`.

    A point may give a section, whose values change only the keys that they name; the others stay,
    even with another `model.name`.

    Args:
        where: what an error names; unset = the sweep's point.

    Raises:
        ValueError: as `load_recipe`.
    """
    tree = recipe.with_changes(**changes).model_dump(mode="json")
    for key, value in point.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            below = node.setdefault(section, {})
            node = below if isinstance(below, dict) else node.update({section: {}}) or node[section]
        is_section = not sections and isinstance(value, dict) and isinstance(node.get(last), dict)
        node[last] = {**node[last], **value} if is_section else value
    return recipe_from_dict(tree, where or f"sweep.space: {point_text(point)}")


def point_text(point: Point) -> str:
    """As text: `learning_rate=0.01, steps=500`."""
    return ", ".join(f"{key.rpartition('.')[2]}={_shown(value)}" for key, value in point.items())


def point_name(point: Point) -> str:
    """As part of a run's name: `lr0.01-steps500`."""
    parts = (f"{_SHORT.get(key, key.rpartition('.')[2])}{_shown(v)}" for key, v in point.items())
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join(parts)).strip("-")


_SHORT: Final = {RATE: "lr"}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
