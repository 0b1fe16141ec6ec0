"""What a sweep tries: points of a grid or drawn at random, each some keys of the recipe."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.config.schema import recipe_from_dict

Point = Mapping[str, Any]
"""Dotted keys of a recipe to values."""

RATE: Final = "optim.learning_rate"
_FIXED: Final = (
    "name", "output", "resume", "seed", "sweep", "tracking",
    "data.eval", "data.held_out_fraction", "data.train",
)  # fmt: skip
"""Set by the sweep itself, for each trial and retraining."""
_DIGITS: Final = 4
"""Of a number that is drawn, so that it can be read and repeated."""


def points_of(recipe: Recipe, config: SweepConfig) -> list[Point]:
    """Every point of the grid, or as many random ones as the recipe says: the same each time.

    Raises:
        ValueError: a key cannot be varied, a value is not allowed, or two points are the same.
    """
    space = config.space or {RATE: list(config.learning_rates)}
    if fixed := [key for key in space if _is_fixed(key)]:
        raise ValueError(f"sweep.space: {fixed[0]} cannot be varied in one sweep")
    points = _drawn(space, config) if config.search == "random" else _grid(space)
    for point in points:
        with_point(recipe, point)
    names = [point_name(point) for point in points]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"sweep.space: the point {twice[0]} stands there {names.count(twice[0])} times; widen "
            "the ranges, or lower sweep.num_trials"
        )
    return points


def _is_fixed(key: str) -> bool:
    return any(f"{one}.".startswith(f"{key}.") or key.startswith(f"{one}.") for one in _FIXED)


def _grid(space: Mapping[str, Any]) -> list[Point]:
    ranges = [key for key, values in space.items() if isinstance(values, dict)]
    if ranges:
        raise ValueError(
            f"sweep.space: {ranges[0]} is a range, of which a grid has no values; set "
            "sweep.search=random and sweep.num_trials, or list values"
        )
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def _drawn(space: Mapping[str, Any], config: SweepConfig) -> list[Point]:
    assert config.num_trials is not None
    return [
        {key: _draw(values, config.seed, index, place) for place, (key, values) in items}
        for index in range(config.num_trials)
        for items in [list(enumerate(space.items()))]
    ]


def _draw(values: Any, *key: int) -> Any:
    random = np.random.default_rng(key)
    if isinstance(values, list):
        return values[int(random.integers(len(values)))]
    ((kind, (low, high)),) = values.items()
    if kind == "uniform":
        return float(f"{random.uniform(low, high):.{_DIGITS}g}")
    return float(f"{np.exp(random.uniform(np.log(low), np.log(high))):.{_DIGITS}g}")


def with_point(recipe: Recipe, point: Point, **changes: Any) -> Recipe:
    """The recipe with the values of a point, and other changes as in `Recipe.with_changes`.

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
        node[last] = value
    return recipe_from_dict(tree, where=f"sweep.space: {point_text(point)}")


def point_text(point: Point) -> str:
    """For people: `learning_rate=0.01, steps=500`."""
    return ", ".join(f"{key.rpartition('.')[2]}={_shown(value)}" for key, value in point.items())


def point_name(point: Point) -> str:
    """Part of a run's name: `lr0.01-steps500`."""
    parts = (f"{_SHORT.get(key, key.rpartition('.')[2])}{_shown(v)}" for key, v in point.items())
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join(parts)).strip("-")


_SHORT: Final = {RATE: "lr"}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
