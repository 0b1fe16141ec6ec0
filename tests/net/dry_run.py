"""What `--dry-run` prints for the command lines in the headers of all shipped recipes."""

from __future__ import annotations

import contextlib
import io
import os

from tests.conftest import ROOT
from tests.jobs.headers import RECIPES, commands
from vit_ray.commands.cli import run_recipe
from vit_ray.commands.job_list import COMMANDS


def record() -> dict[str, list[str]]:
    """Lines by command; those of another recipe's header are that one's."""
    # Recipes name data and weights by relative paths, and none of them is here.
    with contextlib.chdir(ROOT / "tests"):
        return {
            " ".join(words): _lines(words)
            for path in RECIPES
            for words in commands(path)
            if ROOT / words[1] == path
        }


def _lines(words: list[str]) -> list[str]:
    # The headers' own bucket would be asked for; that of the recipes is known to be a placeholder.
    job, recipe, *overrides = (word.replace("s3://MINE", "s3://BUCKET") for word in words)
    command = COMMANDS[job.removeprefix("jobs/").removesuffix(".py")]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = run_recipe(command, (str(ROOT / recipe), *overrides), True)
    lines = out.getvalue().replace(str(ROOT), "ROOT").splitlines()
    return [f"exit code {code}, {os.path.basename(job)}", *lines]
