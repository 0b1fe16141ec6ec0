"""Follows the tutorial line by line in a fresh folder: `python -m tests.newcomer.follow [FOLDER]`.

Commands and files are taken from the page itself; a line that fails ends the walk with its output.
Run it in an environment where `vit-ray` is installed. It takes some minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
LINE_TIMEOUT_S = 900


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of every fenced block of a page."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def follow(page: Path, folder: Path) -> None:
    """Write the page's YAML as `mine.yaml` and run its shell lines, in their order.

    Raises:
        SystemExit: a line failed; its output is told.
    """
    for language, text in blocks(page):
        if language == "yaml":
            (folder / "mine.yaml").write_text(text)
        if language == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                _run(line, folder)


def _run(line: str, folder: Path) -> None:
    print(f"$ {line}", flush=True)
    done = subprocess.run(
        line, shell=True, cwd=folder, capture_output=True, text=True, timeout=LINE_TIMEOUT_S
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nthe page lies: exit code {done.returncode}: {line}")


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="newcomer-"))
    place.mkdir(parents=True, exist_ok=True)
    follow(TUTORIAL, place)
    print(f"every line of {TUTORIAL.name} did what it says, in {place}")
