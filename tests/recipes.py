"""Recipes for tests."""

from typing import Any

from vit_ray.config import Recipe
from vit_ray.config.schema import recipe_from_dict


def recipe_with(name: str = "run", **sections: Any) -> Recipe:
    """Defaults apart from these sections and keys."""
    return recipe_from_dict({"name": name, **sections}, "test")
