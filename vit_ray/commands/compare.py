"""`report compare A B`: what differs between two runs, or two studies, from MLflow alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Printed

from vit_ray.config import Recipe, load_recipe
from vit_ray.config.loading import recipe_without_file
from vit_ray.launch.preflight import metrics_log_path
from vit_ray.report.compare import Comparison, compare
from vit_ray.report.compare_page import notes, write_comparison
from vit_ray.report.runs import require_store
from vit_ray.report.tables import Table
from vit_ray.tracking.mlflow_client import absolute_uri, asking, reached_client


def compare_words(words: tuple[str, ...]) -> int:
    """Print how two runs differ, and write a page of it with their curves over each other.

    Args:
        words: two names or ids of runs, a recipe whose `tracking` says where they are, which may be
            left out, and overrides in any place.

    Raises:
        ValueError: there are not two, or they cannot be compared.
        RuntimeError: MLflow does not answer.
    """
    pair, recipe = parse_words(words)
    require_store(recipe.tracking.uri)
    reached_client(recipe.tracking.uri)
    with asking(recipe.tracking.uri):
        _show(pair, recipe)
    return 0


def _show(pair: tuple[str, str], recipe: Recipe) -> None:
    found = compare(absolute_uri(recipe.tracking.uri), recipe.tracking.experiment, pair)
    print_comparison(found)
    name = re.sub(r"[^A-Za-z0-9._+]+", "-", f"compare-{pair[0]}-{pair[1]}")
    page = metrics_log_path(recipe.with_changes(name=name)).with_name("compare.html").resolve()
    write_comparison(found, page)
    print(f"with curves over each other: {page}")


def parse_words(words: Sequence[str]) -> tuple[tuple[str, str], Recipe]:
    """The two runs, and the recipe.

    Raises:
        ValueError: not two or three words without `=`, or a recipe that cannot be loaded.
    """
    overrides = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    if len(names) not in (2, 3):
        raise ValueError(
            f"report compare: expected two runs, given {len(names)} words; the line is "
            "`report compare A B [RECIPE] [tracking.uri=... tracking.experiment=...]`, A and B "
            "names or ids of runs"
        )
    first, second, *recipe = names
    if recipe:
        return (first, second), load_recipe(recipe[0], overrides)
    return (first, second), recipe_without_file("compare", overrides)


def print_comparison(found: Comparison) -> None:
    """Recipe keys, metrics, and cells that only one side has."""
    console = Console()
    for letter, side, told in found.described():
        console.print(escape(f"{letter}: {side.root.name}: {told}"), soft_wrap=True)
    if found.keys:
        _print(found.key_table(), console)
    else:
        console.print("no recorded key of the recipe differs")
    _print(found.difference_table(), console)
    for note in notes(found):
        console.print(escape(note), soft_wrap=True)


def _print(table: Table, console: Console) -> None:
    printed = Printed(title=escape(table.caption), title_justify="left")
    for column in table.columns:
        printed.add_column(escape(column.title), overflow="fold")
    for row in table.rows:
        printed.add_row(*(escape("-" if value is None else str(value)) for value in row))
    console.print(printed)
