"""Sweeps and studies, and the tables printed for them."""

from vit_ray.commands.printed_tables import print_link, print_study, print_sweep, print_table
from vit_ray.config import Recipe
from vit_ray.experiments.study import run_study
from vit_ray.experiments.sweep import run_sweep
from vit_ray.experiments.vtab import run_vtab
from vit_ray.paper import SOURCE


def sweep(recipe: Recipe) -> int:
    """Fine-tune over the grid of learning rates and print every trial."""
    return print_sweep(run_sweep(recipe))


def vtab(recipe: Recipe) -> int:
    """Fine-tune on every task and print the table; 1 if a task has no accuracy, 3 if stopped."""
    result = run_vtab(recipe)
    if result is None:
        print(
            "stopped on request; run the same command again to continue with the interrupted task"
        )
        return 3
    title = f"VTAB-1k; the paper's columns are {SOURCE}, Table 9"
    print_table(title, result.table)
    print_link(result.hint, result.parent_run_id)
    return 0 if result.is_complete else 1


def study(recipe: Recipe) -> int:
    """Train and evaluate every cell, and print the table."""
    return print_study(run_study(recipe))
