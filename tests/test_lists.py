"""The lists of paths in `.ci/run` and the Makefile: one that has moved is no longer tested."""

import re
import subprocess

import pytest

from tests.conftest import ROOT

RESULTS = sorted((ROOT / "benchmarks/results").glob("*.md"))


def test_each_path_that_continuous_integration_looks_at_exists():
    text = (ROOT / ".ci/run").read_text()
    lists = re.findall(r"^decides_\w+=\([^)]*\)", text, re.MULTILINE)
    assert len(lists) == text.count("\ndecides_") == 4
    command = "set -f; " + "; ".join(f"{one}; echo ${{{one.split('=')[0]}[@]}}" for one in lists)
    named = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    paths = named.stdout.split()
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_path_of_the_makefiles_lists_exists():
    rule = "print-lists: ; @echo $(NUMERIC) $(PUBLISHED)"
    command = ["make", "--silent", "-C", str(ROOT), f"--eval={rule}", "print-lists"]
    named = subprocess.run(command, capture_output=True, text=True, check=True)
    paths = named.stdout.split()
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("result", RESULTS, ids=lambda file: file.stem)
def test_a_result_is_cited_and_says_with_what_it_was_made(result):
    places = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    places += [*(ROOT / "jobs").rglob("*.yaml"), *(ROOT / "vit_ray").rglob("*.py")]
    assert any(result.stem in place.read_text() for place in places)
    text, gone = result.read_text(), []
    for name, words in re.findall(r"python (benchmarks/\w+\.py)([^\n`]*)", text):
        script = (ROOT / name).read_text() if (ROOT / name).exists() else ""
        parts = re.search(r"--parts ([a-z ]+)", words)
        used = re.findall(r"--[a-z-]+", words) + (parts[1].split() if parts else [])
        gone += [word for word in used if word not in script] if script else [name]
    assert not gone or re.search(r"Made with revision [0-9a-f]{8}[:;]", text), gone
