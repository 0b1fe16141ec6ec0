"""The command line that every job shares: `python jobs/NAME.py RECIPE [key=value ...]`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable

import yaml

from vit_ray.config import Recipe, load_recipe
from vit_ray.config.help import describe_keys


def run_job(
    what: str, main: Callable[[Recipe], int | None], plan: Callable[[Recipe], str] | None = None
) -> None:
    """Parse the command line, load the recipe, run the job.

    Errors of the user's and of the storage end in one line, with VIT_RAY_LOGS=1 in a traceback.

    Args:
        what: a sentence for `--help`.
        main: the job; returns an exit code or None.
        plan: the text of `--dry-run` beyond the resolved recipe; it must start nothing.
    """
    arguments = _parser(what).parse_args()
    # Job submission runs in a copy of the folder; recipes are looked up from where we stand.
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        if arguments.dry_run:
            print(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
            print(plan(recipe) if plan else "")
            return
        code = main(recipe)
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("VIT_RAY_LOGS") == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ValueError) else 1
    sys.exit(code or 0)


def _parser(what: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=what,
        epilog="Keys of a recipe, with [default]:\n\n" + describe_keys().replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="YAML file, such as jobs/recipes/digits.yaml"
    )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="changes, such as optim.learning_rate=3e-4",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved recipe and plan; start nothing"
    )
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return parser
