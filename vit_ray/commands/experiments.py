"""Sweeps and studies, and the tables that are printed of them."""

from __future__ import annotations

from vit_ray.commands.study_tables import print_study
from vit_ray.commands.tables import print_sweep
from vit_ray.config import Recipe
from vit_ray.experiments.study import run_study
from vit_ray.experiments.sweep import run_sweep


def sweep(recipe: Recipe) -> int:
    """Fine-tune over the grid of learning rates and print every trial."""
    return print_sweep(run_sweep(recipe))


def study(recipe: Recipe) -> int:
    """Train and evaluate every cell and print the table."""
    return print_study(run_study(recipe))
