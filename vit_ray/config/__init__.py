"""Recipes: written by a user, checked once when they are loaded."""

from vit_ray.config.loading import load_recipe
from vit_ray.config.recipe import Recipe
from vit_ray.config.schema import require

__all__ = ["Recipe", "load_recipe", "require"]
