"""The pages tell the truth: command lines are understood."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from tests.commands.command_line import run_cli
from tests.newcomer.follow import ROOT, blocks
from vit_ray.commands import cli
from vit_ray.commands.job_list import COMMANDS
from vit_ray.config import load_recipe

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def command_lines() -> Iterator[tuple[str, str, list[str]]]:
    """Page, command and words of every line that runs one of our commands."""
    for page in PAGES:
        for block in blocks(page):
            for line in block.text.replace("\\\n", " ").splitlines():
                found = re.search(r"(?:vit-ray|python jobs/)\s*(\w+)(?:\.py)?((?: +\S+)+)", line)
                if found and found[1] in COMMANDS:
                    yield page.name, found[1], shlex.split(found[2], comments=True)


LINES = list(command_lines())
assert len(LINES) > 20  # without lines there is no case
FILES = {
    file: block.text for page in PAGES for block in blocks(page) for file in block.told("file")
} | {
    f"{images}{'-tuned' if weights else ''}.yaml": (
        f"base: digits\nname: {images}\nconvert: {{source: x, destination: y}}\n"
    )
    for page in PAGES
    for images, weights in re.findall(r"vit-ray init +(\w+)( --weights)?", page.read_text())
}


@pytest.mark.parametrize(("page", "name", "words"), LINES, ids=[f"{p}-{n}" for p, n, _ in LINES])
def test_every_command_line_is_understood(page, name, words, tmp_path, monkeypatch):
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    given: list[tuple[str, ...]] = []
    monkeypatch.setattr(cli, "run_recipe", lambda command, words, is_dry: given.append(words))
    words = [word for word in words if word != "--help"]
    assert run_cli(name, *words).exit_code == 0
    recipe, overrides = cli.split_words(given[0])
    load_recipe(recipe, overrides)
    cli.refuse_unread(COMMANDS[name], overrides)
