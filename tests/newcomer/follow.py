"""Follows README, tutorial and how-to pages line by line in a fresh clone; fails where one lies.

`make newcomer`, or `python -m tests.newcomer.follow [FOLDER]`; Python alone is enough, and an
hour. What is committed is cloned into the folder, and the lines of a page are run in one shell,
with a home and a Ray of their own. The lines and files are the page's own blocks; what it does not
show is in a comment above a block:

    <!-- newcomer first: LINE -->             a line that a reader has run, or has otherwise
    <!-- newcomer skips START: REASON -->     lines that begin so are not run; `all`: the block
    <!-- newcomer file: NAME -->              the block is the text of this file
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
IN_CLONE = ("README.md", "docs/index.md", "docs/clusters.md")
"""Pages whose lines run in the clone; the others' run in a folder of one's own."""
HOW_TO = ("data", "training", "experiments", "python")
PAGES = (*IN_CLONE, "docs/tutorial.md", *(f"docs/{name}.md" for name in HOW_TO))
PAGE_TIMEOUT_S = 3600
# What a newcomer's shell does not have.
OURS = ("RAY_", "VIT_RAY_", "MLFLOW_", "AWS_", "DS_", "PYTHON", "VIRTUAL_ENV", "MAKE", "MFLAGS")

_BLOCK = re.compile(
    r"((?:^<!-- newcomer .*?-->\n)*)^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_NOTE = re.compile(r"<!-- newcomer (first|skips|file)(?: ([^:]+))?: (.*?) -->", re.DOTALL)


class Block(NamedTuple):
    """A fenced block, and the comments above it: kind, what skipped lines begin with, text."""

    language: str
    text: str
    notes: list[tuple[str, str, str]]

    def told(self, kind: str) -> list[str]:
        return [text for found, _, text in self.notes if found == kind]

    def lines(self) -> list[str]:
        """Shell lines with continued ones joined, and without those that are skipped."""
        skipped = tuple(start for kind, start, _ in self.notes if kind == "skips")
        lines = [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]
        return [] if "all" in skipped else [line for line in lines if not line.startswith(skipped)]


def blocks(page: Path) -> Iterator[Block]:
    for notes, language, text in _BLOCK.findall(page.read_text()):
        yield Block(language, text, _NOTE.findall(notes))


def script_of(page: Path) -> str:
    """The page as a bash script, which tells every line, its time, and the one that fails."""
    parts = [
        "set -Eeuo pipefail",
        """trap 'echo "the page lies: exit code $?: $line" >&2' ERR""",
    ]
    for block in blocks(page):
        for name in block.told("file"):
            parts.append(f"cat > {name} <<'THE_END'\n{block.text}THE_END")
        if block.language == "sh":
            for line in (*block.told("first"), *block.lines()):
                tell = f'line={shlex.quote(line)}; echo "$ $line"; SECONDS=0'
                parts += [tell, line, 'echo "  # $SECONDS s"']
    return "\n".join(parts) + "\n"


def follow(page: Path, folder: Path, home: Path) -> None:
    """Run a page's lines in a folder, and end whatever they have left behind.

    Raises:
        SystemExit: a line failed; it was told with its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    home.mkdir(exist_ok=True)
    print(f"== {page.name}, in {folder}", flush=True)
    mark = f"walk-{uuid.uuid4()}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    cache = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
    kept |= {"HOME": str(home), "PIP_CACHE_DIR": cache, "PYTHON": sys.executable, "NEWCOMER": mark}
    with tempfile.TemporaryDirectory(prefix="nc-", ignore_cleanup_errors=True) as ray:
        try:
            done = subprocess.run(
                ["bash", "-c", script_of(page)], cwd=folder, env=kept | {"RAY_TMPDIR": ray},
                timeout=PAGE_TIMEOUT_S, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            _end_processes(mark)
    if done.returncode:
        sys.exit(f"{page.name} does not do what it says")


def _end_processes(mark: str) -> None:
    """End what was started with this in its environment, such as the Ray of `ray start`."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def main() -> None:
    """Clone, and follow every page."""
    place = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="newcomer-"))
    clone, home = place.absolute() / "vit_ray", place.absolute() / "home"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    for page in PAGES:
        follow(clone / page, clone if page in IN_CLONE else place.absolute() / "mine", home)
    print(f"every line of {', '.join(PAGES)} did what it says, in {place}")


if __name__ == "__main__":
    main()
