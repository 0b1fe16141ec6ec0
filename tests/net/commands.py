"""Commands of this tree, many in one process, so that torch and Ray start once."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.net.trees import HERE

RECIPE = Path(__file__).with_name("recipe.yaml")
Result = tuple[int, str]  # exit code, and what was printed


def words(command: str, *more: str, **keys: Any) -> list[str]:
    """Of a command for data sets: its keys, then others."""
    return [command, str(RECIPE), *(f"{command}.{key}={keys[key]}" for key in keys), *more]


def run_commands(
    folder: Path, commands: list[list[str]], own: dict[str, str] | None = None
) -> list[Result]:
    """`vit-ray WORDS` for each list of words, in the folder and with the environment `own`.

    Without one, a Ray that they need is their own.
    """
    process = subprocess.run(
        [sys.executable, "-m", "tests.net.commands"],
        input=json.dumps(commands), capture_output=True, text=True,
        cwd=folder, env=own or HERE.environment(),
    )  # fmt: skip
    if process.returncode != 0:
        raise RuntimeError(process.stderr[-4000:])
    return [(code, output) for code, output in json.loads(process.stdout.splitlines()[-1])]


def must_run(folder: Path, commands: list[list[str]], own: dict[str, str] | None = None) -> None:
    """As `run_commands`; each must succeed."""
    for words, (code, output) in zip(commands, run_commands(folder, commands, own), strict=True):
        if code != 0:
            raise RuntimeError(f"vit-ray {' '.join(words)}: exit code {code}\n{output}")


def run_here(words: list[str]) -> Result:
    printed, code = io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            with patch.object(sys, "argv", ["vit-ray", *words]):
                runpy.run_module("vit_ray", run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, printed.getvalue()


if __name__ == "__main__":
    os.environ["COLUMNS"] = "200"
    print(json.dumps([run_here(words) for words in json.loads(sys.stdin.read())]))
