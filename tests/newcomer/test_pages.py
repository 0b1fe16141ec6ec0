"""The pages tell the truth: their command lines are understood, and their links lead on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.newcomer.follow import blocks
from vit_ray.commands.catalog import COMMANDS
from vit_ray.commands.cli import split_words
from vit_ray.config import load_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONS = ("--dry-run", "--help")


def command_lines() -> Iterator[tuple[str, str, list[str]]]:
    """Page, command and words of every line that runs one of our commands."""
    for page in PAGES:
        for language, text in blocks(page):
            if language not in ("", "sh"):
                continue
            for line in text.replace("\\\n", " ").splitlines():
                found = re.search(r"(?:vit-ray|python jobs/)\s*(\w+)(?:\.py)?((?: +\S+)+)", line)
                if found and found[1] in COMMANDS:
                    yield page.name, found[1], shlex.split(found[2], comments=True)


LINES = list(command_lines())


@pytest.mark.parametrize(("page", "name", "words"), LINES, ids=[f"{p}-{n}" for p, n, _ in LINES])
def test_every_command_line_is_understood(
    page: str, name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for language, text in blocks(ROOT / "docs" / "tutorial.md"):
        if language == "yaml":
            (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    words = [word for word in words if word not in OPTIONS and word != "optim"]
    recipe, overrides = split_words(tuple(words))
    load_recipe(recipe, overrides)


def test_the_pages_have_command_lines() -> None:
    assert {page for page, _, _ in LINES} >= {"README.md", "tutorial.md", "how_to.md"}
    assert len(LINES) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" in target or target.startswith("reference/"):
            continue
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
