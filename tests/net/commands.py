"""Commands of this tree, many in one process, so that torch and Ray start once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from tests.net.adapters import without_ray
from tests.net.trees import HERE


class Result(NamedTuple):
    """What a command ended with, and what it printed."""

    code: int
    output: str


def run_commands(
    folder: Path, commands: list[list[str]], own: dict[str, str] | None = None
) -> list[Result]:
    """`vit-ray WORDS` for each list of words, in the folder and with the environment `own`.

    Without one, a Ray that they need is their own.
    """
    kept = {key: value for key, value in HERE.environment().items() if not key.startswith("RAY_")}
    process = subprocess.run(
        [sys.executable, "-m", "tests.net.commands"],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=folder,
        env=own or kept,
    )
    if process.returncode != 0:
        raise RuntimeError(process.stderr[-4000:])
    return [Result(*found) for found in json.loads(process.stdout.splitlines()[-1])]


def must_run(
    folder: Path, commands: list[list[str]], own: dict[str, str] | None = None
) -> list[str]:
    """What the commands print; each must succeed."""
    found = run_commands(folder, commands, own)
    for words, result in zip(commands, found, strict=True):
        if result.code != 0:
            raise RuntimeError(f"vit-ray {' '.join(words)}: {result.code}\n{result.output}")
    return [result.output for result in found]


def _run(words: list[str]) -> Result:
    printed, code = io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            with patch.object(sys, "argv", ["vit-ray", *words]):
                runpy.run_module("vit_ray", run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Result(code, printed.getvalue())


if __name__ == "__main__":
    os.environ["COLUMNS"] = "200"
    with without_ray() if "NET_WITHOUT_RAY" in os.environ else contextlib.nullcontext():
        print(json.dumps([_run(words) for words in json.loads(sys.stdin.read())]))
