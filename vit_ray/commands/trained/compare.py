"""`report compare A B`: what differs between two runs, or two studies, from MLflow alone."""

import re
from collections.abc import Sequence

from vit_ray.addresses import absolute_uri
from vit_ray.commands.printed_tables import print_table
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.loading import changed
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.report.comparison import compare, write_comparison
from vit_ray.tracking.metrics_log import metrics_log_path
from vit_ray.tracking.mlflow_client import asking


def compare_words(words: tuple[str, ...]) -> int:
    """Print how two runs differ, and write a page of it with the curves of both.

    Args:
        words: two names or ids of runs, optionally a recipe whose `tracking` says where they are,
            and overrides in any position.

    Raises:
        ValueError: there are not two, or they cannot be compared.
        RuntimeError: MLflow does not answer.
    """
    pair, recipe = parse_words(words)
    with asking(recipe.tracking.uri):
        found = compare(absolute_uri(recipe.tracking.uri), recipe.tracking.experiment, pair)
        for text in found.headline():
            print(text)
        for section in found.sections()[:3]:
            for text in section.texts:
                print(text)
            for table in section.tables:
                if table.rows:
                    print_table(table)
        name = re.sub(r"[^A-Za-z0-9._+]+", "-", f"compare-{pair[0]}-{pair[1]}")
        folder = recipe.with_changes(name=name).run_folder
        page = metrics_log_path(folder).with_name("compare.html").resolve()
        write_comparison(found, page)
        print(f"with curves of both: {page}")
    return 0


def parse_words(words: Sequence[str]) -> tuple[tuple[str, str], Recipe]:
    """The two runs, and the recipe.

    Raises:
        ValueError: not two or three arguments without `=`, or a recipe that cannot be loaded.
    """
    overrides = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    if len(names) not in (2, 3):
        raise ValueError(
            f"report compare: expected two runs, given {len(names)} arguments; the line is `report "
            "compare A B [RECIPE] [tracking.uri=... tracking.experiment=...]`, with names or ids "
            "of runs for A and B"
        )
    first, second, *recipe = names
    if recipe:
        return (first, second), load_recipe(recipe[0], overrides)
    tree = changed({"name": "compare"}, overrides)
    return (first, second), recipe_from_dict(tree, where="compare")
