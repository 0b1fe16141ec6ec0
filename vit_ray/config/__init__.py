"""Recipes: what a person writes, checked once, at the border."""

from vit_ray.config.loading import load_recipe
from vit_ray.config.schema import Recipe

__all__ = ["Recipe", "load_recipe"]
